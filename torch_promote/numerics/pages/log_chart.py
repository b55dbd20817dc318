"""Charts on logarithmic axes: positions in an SVG image that a template draws."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Chart", "CountAxis", "LogAxis", "Mark"]

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 54, 446, 14, 276
_LANE = 34.0
_MOST_TICKS = 7
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class LogAxis:
    """An axis of errors. Zero and infinity get separate lanes at its ends if needed.

    Args:
        values: The values that have to fit.
        start: Where the axis starts in the image.
        end: Where it ends.
        scale: Further values to fit between the lanes: those of the other axis, if both have the same scale.

    Example:
        >>> axis = LogAxis([0.0, 1e-3, 1e-1], 0, 134)
        >>> axis.place(0.0), axis.place(1e-3), axis.place(1e-2)
        (0, 34.0, 84.0)
        >>> axis.ticks
        [(0, '0'), (34.0, '10⁻³'), (84.0, '10⁻²'), (134.0, '10⁻¹')]
    """

    def __init__(self, values: Iterable[float], start: float, end: float, *, scale: Iterable[float] = ()) -> None:
        known = list(values)
        powers = [math.log10(value) for value in [*known, *scale] if 0 < value < math.inf]
        self.low, self.high = math.floor(min(powers, default=0.0)), math.ceil(max(powers, default=1.0))
        self.high += self.low == self.high
        sign = 1 if end > start else -1
        self._zero, self._infinity = start, end
        zero, infinite = any(value <= 0 for value in known), any(not value < math.inf for value in known)
        self._start = start + sign * _LANE * zero
        self._end = end - sign * _LANE * infinite
        step = math.ceil((self.high - self.low) / _MOST_TICKS)
        self.ticks = [
            *([(self._zero, "0")] if zero else []),
            *((self.place_power(power), spell_power(power)) for power in range(self.low, self.high + 1, step)),
            *([(self._infinity, "inf")] if infinite else []),
        ]

    def place(self, value: float) -> float:
        """Returns the position of a value in the image."""
        if not value < math.inf:
            return self._infinity
        if value <= 0:
            return self._zero
        return self.place_power(math.log10(value))

    def place_power(self, power: float) -> float:
        """Returns the position of a power of ten in the image."""
        share = (power - self.low) / (self.high - self.low)
        return round(self._start + share * (self._end - self._start), 1)


class CountAxis:
    """An axis of numbers from 0, with more room for small numbers.

    Args:
        most: The largest number.
        start: The position of 0 in the image.
        end: The position of the largest number.

    Example:
        >>> [label for _, label in CountAxis(60, 0, 100).ticks]
        ['0', '1', '2', '5', '10', '20', '60']
    """

    def __init__(self, most: int, start: float, end: float) -> None:
        self._start, self._scale = start, (end - start) / math.log1p(max(most, 1))
        steps = [round(digit * 10**power) for power in range(7) for digit in (1, 2, 5)]
        shown = [0, *(step for step in steps if step * 1.9 <= most), max(most, 1)]
        self.ticks = [(self.place(number), f"{number:,}") for number in shown]

    def place(self, number: float) -> float:
        """Returns the position of a number in the image."""
        return round(self._start + math.log1p(number) * self._scale, 1)


def spell_power(power: int) -> str:
    """Returns a power of ten: "1", "10⁻³"."""
    return "1" if power == 0 else "10" if power == 1 else f"10{str(power).translate(_RAISED)}"


@dataclass(frozen=True)
class Mark:
    """A point.

    Attributes:
        x: Its position in the image.
        y: Its position in the image.
        kind: "passed" or "failed".
        title: The tooltip.
    """

    x: float
    y: float
    kind: str
    title: str


@dataclass
class Chart:
    """A chart.

    Attributes:
        title: Its title.
        note: A sentence that explains it.
        x_label: The name of the axis below.
        y_label: The name of the axis on the left.
        x_ticks: Positions and labels of the axis below.
        y_ticks: Positions and labels of the axis on the left.
        marks: The points.
        best: The path of a line through the best points; "" for none.
        limit: The path of the line that shows the tolerance; "" for none.
        limit_label: Its label.
        limit_y: The position of the label.
    """

    title: str
    note: str
    x_label: str
    y_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[Mark] = field(default_factory=list)
    best: str = ""
    limit: str = ""
    limit_label: str = ""
    limit_y: float = 0.0
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM
