"""Runs the iterations of a soak in this process, and judges its readings."""

from __future__ import annotations

import random
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from features import FEATURES
from filling import fill
from growth import Growth, growth_of
from readings import MEMORY, read
from registries import limit_of
from tool_features import ALONE, STOCK

import torch_promote as tp

__all__ = ["BOUNDS", "Judged", "Soak", "names_of", "soak"]

#: The growth of an iteration up to which a measure counts as flat.
BOUNDS = {"resident": 64.0, "allocated": 32.0, "python blocks": 0.1, "tensors": 0.001, "ours": 0.01}
_BOUND_OF_REGISTRIES = 0.005

#: How often a process is measured.
_READINGS = 100


@dataclass(frozen=True)
class Judged:
    """One measure of a soak.

    Attributes:
        name: The measure.
        growth: Its growth.
        bound: The growth of an iteration up to which it is flat.
        verdict: "flat", "grows", "unclear" (the run is too short to tell), or "bounded": it has an upper limit, which
            it has not exceeded.
    """

    name: str
    growth: Growth
    bound: float
    verdict: str


@dataclass
class Soak:
    """The readings of one process.

    Attributes:
        names: The features that it drew from.
        seed: The seed.
        stock: Whether it ran the twins of the features, without torch_promote.
        most: The number of readings that there is room for.
        iterations: The number of iterations before each reading.
        series: The readings: the values of each measure, in arrays that do not grow with the readings.
        counts: How often each feature ran.
    """

    names: Sequence[str]
    seed: int
    stock: bool
    most: int
    iterations: array[int] = field(default_factory=lambda: array("q"))
    series: dict[str, array[int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def measure(self, number: int) -> None:
        """Adds a reading. A registry of a module that is not loaded yet has no entries."""
        for name, value in read().items():
            if name not in self.series:
                self.series[name] = array("q", bytes(8 * self.most))
            self.series[name][len(self.iterations)] = value
        self.iterations.append(number)

    def values(self, name: str) -> array[int]:
        """Returns the readings of a measure."""
        return self.series[name][: len(self.iterations)]

    def judge(self) -> list[Judged]:
        """Returns the verdict on every measure."""
        registries = sorted(set(self.series) - set(MEMORY))
        return [self._judge(name) for name in (*MEMORY, *registries)]

    def _judge(self, name: str) -> Judged:
        values = self.values(name)
        growth = growth_of(self.iterations, values)
        bound = BOUNDS.get(name, _BOUND_OF_REGISTRIES)
        limit = None if name in BOUNDS else limit_of(name.removeprefix("registry "))
        if limit is not None and max(values) <= limit:
            return Judged(name, growth, bound, "bounded")
        return Judged(name, growth, bound, growth.verdict(bound))


def names_of(only: Sequence[str]) -> list[str]:
    """Returns the features to draw from: those that are named, or all that do not make PyTorch grow."""
    return list(only) or [name for name in FEATURES if name not in ALONE]


def soak(
    names: Sequence[str],
    iterations: int,
    seed: int,
    *,
    stock: bool = False,
    full: bool = True,
    readings: int = _READINGS,
    tell: Callable[[str], Any] = lambda remark: None,
) -> Soak:
    """Runs iterations, each of which draws one or two features, and measures the process at equal distances.

    Args:
        names: The features.
        iterations: The number of iterations.
        seed: The seed of the draws, and of each iteration's generator together with its number.
        stock: Whether to run the twins of the features that have one.
        full: Whether to fill the registries that keep a number of entries first.
        readings: The number of readings.
        tell: Called after each iteration with a remark.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", tp.UnusedOverrideWarning)  # a feature of its own asks for them
    if full and not stock:
        fill()
    result = Soak(list(names), seed, stock, readings + 2)
    functions = {name: STOCK[name] if stock else FEATURES[name] for name in names}
    # A reading leaves a block or two, in a list of free ones: not at every iteration of a short run.
    every = max(1, -(-iterations // min(readings, max(8, iterations // 40))))
    for number in range(iterations + 1):
        if number % every == 0:
            result.measure(number)
        if number == iterations:
            break
        draw = random.Random(f"{seed} {number}")
        torch.manual_seed(number)
        for name in draw.sample(list(functions), min(len(functions), draw.choice((1, 1, 2)))):
            try:
                functions[name](draw, number)
            except Exception as error:
                # Random policies may give an op operands of two dtypes, which PyTorch refuses.
                if isinstance(error, RuntimeError) and "same dtype" in str(error):
                    continue
                error.add_note(f"in iteration {number} of the feature {name}, with seed {seed}")
                raise
            result.counts[name] = result.counts.get(name, 0) + 1
        tell(f"{result.series['allocated'][len(result.iterations) - 1] / 2**20:.1f} MiB allocated")
    return result
