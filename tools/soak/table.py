"""What a soak reports: a table, JSON, and a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from readings import MEMORY
from soaking import Judged, Soak

__all__ = ["failed", "plot", "print_soak", "to_json", "write_json"]


def failed(judged: Sequence[Judged]) -> bool:
    """Whether a measure grows, or may grow."""
    return any(one.verdict in ("grows", "unclear") for one in judged)


def print_soak(result: Soak, judged: Sequence[Judged]) -> None:
    """Prints a line for each measure of memory, and for each registry whose size changed."""
    ran = ", ".join(f"{name} {count}" for name, count in sorted(result.counts.items()))
    print(f"{result.iterations[-1]} iterations with seed {result.seed}: {ran}\n")
    print(f"{'':42} {'after 1/4':>14} {'at the end':>14} {'per iteration':>14} {'at most':>10} {'bound':>8}")
    unchanged = 0
    for one in judged:
        growth = one.growth
        if one.name not in MEMORY and len(set(result.values(one.name))) == 1:
            unchanged += 1
            continue
        unit = f" ({MEMORY[one.name]})" if one.name in MEMORY else ""
        print(
            f"{one.name + unit:42} {growth.first:14,.0f} {growth.last:14,.0f} {growth.slope:14.4f} {growth.high:10.4f} "
            f"{one.bound:8g}  {one.verdict}"
        )
    print(f"{unchanged} other registries kept their size")


def to_json(result: Soak, judged: Sequence[Judged]) -> dict[str, Any]:
    """Returns the readings and the verdicts as JSON values."""
    return {
        "features": list(result.names),
        "counts": result.counts,
        "seed": result.seed,
        "stock": result.stock,
        "iterations": list(result.iterations),
        "series": {name: list(result.values(name)) for name in result.series},
        "measures": {
            one.name: {
                "slope": one.growth.slope,
                "low": one.growth.low,
                "high": one.growth.high,
                "first": one.growth.first,
                "last": one.growth.last,
                "bound": one.bound,
                "verdict": one.verdict,
            }
            for one in judged
        },
    }


def write_json(file: Path, values: Any) -> None:
    text = json.dumps(values, indent=1)
    if file.name == "-":
        print(text)
    else:
        file.write_text(text + "\n", encoding="utf-8")


def plot(result: Soak, file: Path) -> None:
    """Draws the measures of memory over the iterations."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    figure = Figure(figsize=(8, 2 * len(MEMORY)), layout="constrained")
    for place, (name, unit) in enumerate(MEMORY.items(), start=1):
        axes = figure.add_subplot(len(MEMORY), 1, place)
        axes.plot(result.iterations, result.values(name), color="#0b5394")
        axes.set_ylabel(f"{name}\n({unit})")
        axes.axvline(result.iterations[-1] / 4, color="#999999", linestyle=":")
    axes.set_xlabel("iterations; the slope is that of the part after the dotted line")
    figure.savefig(file)
