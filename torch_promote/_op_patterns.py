"""Shell patterns over the names of ops."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from torch_promote.errors import OptionError, did_you_mean
from torch_promote.policies import op_table

__all__ = ["is_pattern", "matches", "no_match"]


def is_pattern(name: str) -> bool:
    """Says whether a name has a wildcard in it; names of ops have none.

    Example:
        >>> is_pattern("linalg_*"), is_pattern("softmax.int")
        (True, False)
    """
    return any(wildcard in name for wildcard in "*?[")


def matches(name: str, pattern: str) -> bool:
    """Says whether an op is meant by a pattern: by its name, its overload or its full name.

    Example:
        >>> [matches("aten::softmax.int", pattern) for pattern in ("softmax", "softmax.*", "aten::*", "soft")]
        [True, True, True, False]
    """
    overload = name.partition("::")[2]
    return any(fnmatch.fnmatchcase(known, pattern) for known in (overload.partition(".")[0], overload, name))


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
