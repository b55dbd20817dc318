"""The option --op, which selects the ops of the op table."""

from __future__ import annotations

from collections.abc import Iterable

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.policy.op_table import op_table

__all__ = ["no_match"]


def no_match(pattern: str, others: Iterable[str] = ()) -> OptionError:
    """Returns the error for a pattern that matches no op.

    Args:
        pattern: The value of --op.
        others: The full names of ops that the pattern could match besides the rows of the table.
    """
    names = (*(row.name for row in op_table()), *others)
    overloads = [name.partition("::")[2] for name in names]
    known = [name for overload in overloads for name in (overload.partition(".")[0], overload)]
    close = did_you_mean(pattern.removeprefix("aten::").strip("*?"), dict.fromkeys(known))
    return OptionError(
        f"--op {pattern!r} matches none of the table's {len(op_table())} rows.{close} "
        f"`torch-promote policies` lists them all."
    )
