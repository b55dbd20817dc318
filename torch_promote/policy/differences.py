"""Differences between two policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch_promote.policy.cast_policy import spell_policy
from torch_promote.policy.named import Value, stock_policy

__all__ = ["Difference", "PolicyDiff", "differences"]


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


class PolicyDiff(tuple[Difference, ...]):
    """The differences between two policies: a tuple that prints as a table, also in a notebook.

    Args:
        found: The differences.
        names: What to call the two policies.

    Example:
        >>> from torch_promote import Policy
        >>> print(Policy.stock().override({"mm.default": "fp32"}, device_type="cpu").diff("stock"))
        op  device  this policy  stock
        mm  cpu     fp32         lower_precision_fp
    """

    names: tuple[str, str]

    def __new__(cls, found: Iterable[Difference], names: tuple[str, str]) -> PolicyDiff:
        """Makes the tuple."""
        made = super().__new__(cls, found)
        made.names = names
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return PolicyDiff, (tuple(self), self.names)

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences as values that JSON has."""
        return {
            "policies": list(self.names),
            "differences": [
                {"op": each.overload, "device": each.device, "policies": [_plain(each.mine), _plain(each.theirs)]}
                for each in self
            ],
        }

    def _rows(self) -> list[list[str]]:
        return [
            [each.overload.removeprefix("aten::"), each.device, _plain(each.mine) or "-", _plain(each.theirs) or "-"]
            for each in self
        ]

    def __str__(self) -> str:
        from torch_promote.text_layout import text_table

        if not self:
            return f"{self.names[0]} and {self.names[1]} are equal."
        return text_table(["op", "device", *self.names], self._rows())

    def __repr__(self) -> str:
        ops = len({each.overload for each in self})
        between = " and ".join(self.names)
        return f"<PolicyDiff between {between}: {len(self)} differences in {ops} ops. print() shows a table.>"

    def _repr_html_(self) -> str:
        from torch_promote.text_layout import html_table

        return html_table(["op", "device", *self.names], self._rows()) if self else f"<p>{self}</p>"


def _plain(value: Value | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else spell_policy(value)
