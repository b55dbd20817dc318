"""Statistics of the times of all rounds: medians and quartiles of times, ratios and overheads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Overhead", "Spread", "overhead", "ratio", "spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its quartiles.

    Attributes:
        median: The middle value.
        low: The lower quartile.
        high: The upper quartile.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """The overhead of ours over a base, as a share of stock's: 1 equals stock's, 0 is none.

    Attributes:
        spread: The share; None if stock's overhead is within the noise.
        left_out: The number of rounds in which stock took no longer than the base.
        reason: The reason why there is no share; "" if there is one.
    """

    spread: Spread | None
    left_out: int = 0
    reason: str = ""


def spread(values: Sequence[float]) -> Spread:
    """Returns the median and the quartiles of two or more values. Quartiles lie between values.

    Example:
        >>> spread([4, 1, 3, 2, 5])
        Spread(median=3, low=2.0, high=4.0)
    """
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


def ratio(times: Sequence[float], to: Sequence[float]) -> Spread:
    """Returns the spread of the ratios of two contenders' times, round by round.

    Other load on the machine slows both contenders of a round and hardly changes their ratio.

    Example:
        >>> ratio([1, 20, 3], [2, 40, 6]).median
        0.5
    """
    return spread([mine / other for mine, other in zip(times, to, strict=True)])


def overhead(ours: Sequence[float], stock: Sequence[float], base: Sequence[float]) -> Overhead:
    """Returns the spread of (ours - base) / (stock - base) over the rounds.

    There is one only if the median of stock - base exceeds the distance between its quartiles.

    Args:
        ours: Our time in each round.
        stock: Stock's time in each round.
        base: The base's time in each round.

    Example:
        >>> overhead([3, 3, 3], [5, 5, 5], [1, 1, 1]).spread.median
        0.5
        >>> overhead([3, 3, 3], [2, 1, 0], [1, 1, 1]).spread is None
        True
    """
    costs = [theirs - least for theirs, least in zip(stock, base, strict=True)]
    cost = spread(costs)
    shares = [(mine - least) / cost for mine, least, cost in zip(ours, base, costs, strict=True) if cost > 0]
    if cost.median <= cost.high - cost.low or len(shares) < 2:
        quartiles = f"{cost.low:.0f} to {cost.high:.0f}"
        what = "stock takes no longer than the base" if cost.median <= 0 else "stock - base is within its noise"
        reason = f"{what}: median {cost.median:.0f} ns, quartiles {quartiles}"
        return Overhead(None, len(costs) - len(shares), reason)
    return Overhead(spread(shares), len(costs) - len(shares))
