"""Differences between two policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch_promote.policy.named import Value, stock_policy

__all__ = ["Difference", "differences"]


class Difference(NamedTuple):
    """One difference between two policies.

    Attributes:
        overload: An overload's full name. In a table of modules also "policy", for the policy of a whole module.
        device: "cpu" or "cuda"; for an entry of a table of modules, the table's section, `[modules."blocks.*.attn"]`.
        mine: The first policy's value; None if it has none for the overload.
        theirs: The second policy's value.
    """

    overload: str
    device: str
    mine: Value | str | None
    theirs: Value | str | None


def differences(
    mine: Mapping[tuple[str, str], Value | str], theirs: Mapping[tuple[str, str], Value | str], by_stock: bool
) -> tuple[Difference, ...]:
    """Returns the differences between two mappings of places (an overload and a device type or section), sorted.

    Args:
        mine: The first.
        theirs: The second.
        by_stock: Whether a place that is missing has stock's policy. Otherwise it has none.
    """
    found = []
    for place in sorted({*mine, *theirs}):
        stock = stock_policy(*place) if by_stock else None
        found.append(Difference(*place, mine.get(place, stock), theirs.get(place, stock)))
    return tuple(one for one in found if one.mine != one.theirs)
