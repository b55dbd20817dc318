"""The option --op, which selects the ops of the op table."""

from __future__ import annotations

from collections.abc import Iterable

from torch_promote.errors import OptionError, PolicyError
from torch_promote.policy.op_names import HOW_TO_NAME, closest_ops, find_overloads, is_pattern
from torch_promote.policy.op_table import op_table

__all__ = ["find_ops", "no_match"]


def find_ops(pattern: str) -> tuple[str, ...]:
    """Returns the overloads of all ops, with a row or without, that a name or a pattern selects.

    Args:
        pattern: The value of --op.
    """
    try:
        return find_overloads(pattern)
    except PolicyError:
        return ()


def no_match(pattern: str, others: Iterable[str] = ()) -> OptionError:
    """Returns the error for a pattern that matches no op.

    Args:
        pattern: The value of --op.
        others: The full names of ops that the pattern could match besides the rows of the table.
    """
    try:
        find_overloads(pattern)
    except PolicyError as error:
        reason = str(error)
    else:
        return OptionError(
            f"--op {pattern!r}: these ops have no row in the op table, so there is nothing to compare. See "
            f"`torch-promote policies --op {pattern!r}`."
        )
    # The error about an unknown op is the command's own, which names --import.
    if "::" not in pattern and not is_pattern(pattern) and HOW_TO_NAME not in reason:
        return OptionError(f"--op {pattern!r}: {reason}")
    names = (*(row.name for row in op_table()), *others)
    ops = (name.partition("::")[2].partition(".")[0] for name in names)
    found = closest_ops(pattern.removeprefix("aten::").strip("*?").partition(".")[0], ops)
    close = f" Closest: {', '.join(found)}." if found else ""
    return OptionError(
        f"--op {pattern!r} matches no op.{close} `torch-promote policies` lists the op table. If a library defines the "
        f"op, import it: --import MODULE."
    )
