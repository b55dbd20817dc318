"""The option --op: which ops a command is asked about."""

from __future__ import annotations

from collections.abc import Iterable

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.policy.op_table import op_table

__all__ = ["no_match"]


def no_match(pattern: str, others: Iterable[str] = ()) -> OptionError:
    """Returns the error for a pattern that means no row of the table, and none of some other ops.

    Args:
        pattern: What was asked for.
        others: Full names of ops without a row that could have been meant.
    """
    names = (*(row.name for row in op_table()), *others)
    overloads = [name.partition("::")[2] for name in names]
    known = [name for overload in overloads for name in (overload.partition(".")[0], overload)]
    close = did_you_mean(pattern.removeprefix("aten::").strip("*?"), dict.fromkeys(known))
    return OptionError(
        f"--op {pattern!r} matches none of the table's {len(op_table())} rows.{close} "
        f"`torch-promote policies` lists them all."
    )
