"""Draws what the suite `compile` of `torch-promote bench` counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_promote.cli.terminal import Table

__all__ = ["compile_table"]


def compile_table(results: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the table of kernels, graphs, guards, calls of the compiler and peak memory.

    Args:
        results: The results of cases that have counts, as plain data.
    """
    counts = list(dict.fromkeys(name for result in results for of in result["compiled"].values() for name in of))
    heads = (*(name.replace("_", " ") for name in counts), "peak, KiB")
    listing = Table("case: contender", *heads)
    for result in results:
        for contender, compiled in result["compiled"].items():
            peak = f"{result['peak_bytes'][contender] / 1024:.1f}"
            figures = (f"{compiled[name]:,}" if name in compiled else "" for name in counts)
            listing.add_row(f"{result['case']}: {contender}", *figures, peak)
    return listing
