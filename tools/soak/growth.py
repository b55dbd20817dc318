"""Whether a series of readings grows: a slope that outliers do not move, and the interval that it lies in.

The slope is the median of the slopes of all pairs of readings (Theil and Sen). The interval is that of Sen (1968): it
contains the slope with the confidence that is asked for, whatever the distribution of the noise, if the noise of the
readings is independent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CONFIDENCE", "Growth", "growth_of"]

CONFIDENCE = 0.99

#: The part of a run that counts as its warm-up.
_WARM_UP = 0.25


@dataclass(frozen=True)
class Growth:
    """The growth of one measure after the warm-up.

    Attributes:
        slope: The growth of an iteration.
        low: The lower end of the slope's interval.
        high: The upper end of the slope's interval.
        first: The reading at the end of the warm-up.
        last: The last reading.
    """

    slope: float
    low: float
    high: float
    first: float
    last: float

    def verdict(self, bound: float) -> str:
        """Returns "flat" if the slope is at most the bound, "grows" if it is more, and "unclear" if both may be."""
        if self.high <= bound:
            return "flat"
        return "grows" if self.low > bound else "unclear"


def growth_of(iterations: Sequence[int], values: Sequence[float]) -> Growth:
    """Returns the growth over the last three quarters of a run.

    Args:
        iterations: The number of iterations before each reading, increasing.
        values: The readings.
    """
    begin = iterations[0] + (iterations[-1] - iterations[0]) * _WARM_UP
    points = [point for point in zip(iterations, values, strict=True) if point[0] >= begin]
    if len(points) < 3:
        raise ValueError(f"a slope needs 3 readings after the warm-up, got {len(points)}")
    pairs = ((a, b) for place, a in enumerate(points) for b in points[place + 1 :])
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)
    count = len(points)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)  # of Kendall's S, if there is no trend
    width = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation
    low = max(0, math.floor((len(slopes) - width) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + width) / 2))
    return Growth(statistics.median(slopes), slopes[low], slopes[high], points[0][1], points[-1][1])
