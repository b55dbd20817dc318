"""Histograms of the exponents of results, compared with the ranges of float16 and bfloat16.

They exclude composite ops and views, whose values were computed by other calls, and ops that return uninitialized
memory.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torch_promote.numerics.ranges.values import Values
from torch_promote.numerics.records.calls import Call

__all__ = ["ExponentRow", "Exponents", "exponent_rows"]

#: The exponents of the smallest subnormal, the smallest normal and the largest number.
RANGES = {"float16": (-24, -14, 15), "bfloat16": (-133, -126, 127)}
_MOST = 40
_HEIGHT = 40


@dataclass(frozen=True)
class ExponentRow:
    """The results of an op.

    Attributes:
        op: The op's name with its overload.
        results: The number of measured results.
        bars: The outlines of the bars as a path of SVG, in units of one exponent and of 1/40 of the highest bar.
        amax: The largest magnitude among the finite values, as text.
        below: The share of the values that a cast to float16 would round to 0.
        subnormal: The share of the values that are subnormal numbers in float16.
        above: The share of the values that a cast to float16 would make infinite.
        infinite: The number of results with an inf or a NaN.
    """

    op: str
    results: int
    bars: str
    amax: str
    below: float
    subnormal: float
    above: float
    infinite: int


@dataclass(frozen=True)
class Exponents:
    """The histograms, on one scale.

    Attributes:
        rows: A row for each op, largest share outside of float16's normal numbers first.
        low: The exponent at the left end.
        width: The number of exponents shown.
        left_out: The number of ops left out.
        ranges: Dtypes, with the start and width of their subnormal and of their normal numbers in the picture.
        ticks: The exponents under the picture.
    """

    rows: list[ExponentRow]
    low: int
    width: int
    left_out: int
    ranges: list[tuple[str, float, float, float, float]]
    ticks: list[int]


def exponent_rows(calls: Iterable[Call]) -> Exponents | None:
    """Makes the histograms of the calls that have values.

    Args:
        calls: The calls.

    Returns:
        The histograms; None if no call has values.
    """
    counts: dict[str, Counter[int]] = {}
    measured: dict[str, list[Values]] = {}
    for call in calls:
        if not call.composite and not _is_view(call.op, call.overload) and not _is_uninitialized(call.op):
            counts.setdefault(call.name, Counter()).update(_exponents(call.values))
            measured.setdefault(call.name, []).extend(values for values in call.values if values.count)
    counts = {op: counted for op, counted in counts.items() if counted}
    if not counts:
        return None
    seen = [exponent for counted in counts.values() for exponent in counted]
    low, high = min(-26, min(seen) - 1), max(17, max(seen) + 2)
    rows = [_row(op, counted, measured[op], low) for op, counted in counts.items()]
    rows.sort(key=lambda row: (-row.above, -row.below, -row.subnormal, row.op))
    step = 8 if high - low < 100 else 32
    ticks = [tick for tick in range(-256 * 8, 1025, step) if low <= tick <= high]
    return Exponents(rows[:_MOST], low, high - low, max(0, len(rows) - _MOST), _ranges(low, high), ticks)


@functools.lru_cache(maxsize=4096)
def _is_view(op: str, overload: str) -> bool:
    """Whether an op returns a view of an argument, whose values another call has computed."""
    try:
        returns = torch._C._get_schema(op, overload).returns
    except RuntimeError:
        return False  # an op of a library that is not loaded
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _is_uninitialized(op: str) -> bool:
    """Whether an op returns uninitialized memory: torch.empty, empty_like, new_empty_strided and others."""
    return op.partition("::")[2].lstrip("_").removeprefix("new_").startswith("empty")


def _exponents(found: tuple[Values, ...]) -> Counter[int]:
    counted: Counter[int] = Counter()
    for values in found:
        counted.update(dict(values.exponents))
    return counted


def _row(op: str, counted: Counter[int], measured: list[Values], low: int) -> ExponentRow:
    most, total = max(counted.values()), sum(values.count for values in measured)
    smallest, normal, _ = RANGES["float16"]
    bars = "".join(
        f"M{exponent - low} {_HEIGHT}v-{max(0.6, _HEIGHT * number / most):.3g}h1V{_HEIGHT}"
        for exponent, number in sorted(counted.items())
    )
    return ExponentRow(
        op,
        len(measured),
        bars,
        f"{max(values.amax or 0.0 for values in measured):.3g}",
        sum(values.under_float16 * values.count for values in measured) / total,
        sum(number for exponent, number in counted.items() if smallest <= exponent < normal) / total,
        sum(values.over_float16 * values.count for values in measured) / total,
        sum(bool(values.infs or values.nans) for values in measured),
    )


def _ranges(low: int, high: int) -> list[tuple[str, float, float, float, float]]:
    found: list[tuple[str, float, float, float, float]] = []
    for name, (smallest, normal, largest) in RANGES.items():
        start, middle, end = (min(max(edge, low), high) - low for edge in (smallest, normal, largest + 1))
        found.append((name, start, middle - start, middle, end - middle))
    return found
