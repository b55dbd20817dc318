"""Draws the suite `instructions` of `torch-promote bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_promote.bench.cases import ALREADY_CAST, HAND, OURS, PLAIN, STOCK
from torch_promote.cli.terminal import Table

__all__ = ["instruction_table"]

_NAMES = {OURS: "ours", STOCK: "stock", HAND: "hand", ALREADY_CAST: "cast before", PLAIN: "plain"}


def instruction_table(results: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the table of ratios, targets and instructions.

    Args:
        results: The results of the suite, as plain data.
    """
    shown = [name for name in _NAMES if any(name in result["instructions"] for result in results)]
    listing = Table("case", "ours / stock", "target", "measured", *(_NAMES[name] for name in shown))
    for result in results:
        counts = result["instructions"]
        ratio = f"{counts[OURS] / counts[STOCK]:.3f}" if STOCK in counts else "-"
        numbers = (f"{counts[name]:,.0f}" if name in counts else "-" for name in shown)
        listing.add_row(result["case"], ratio, *_target(result["target"]), *numbers)
    return listing


def _target(target: Mapping[str, Any] | None) -> tuple[str, str]:
    if target is None:
        return "", ""
    base = _NAMES[target["base"]]
    figure = f"over {base}" if target["over"] else f"ours / {base}"
    return f"{figure}: {target['at_most']:.2f}", f"{target['measured']:.3f}"
