"""A case of a suite, its contenders, and how they are run: in alternation, round by round."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import timer as synchronized_clock

from benchmarks.measures import count_casts, count_copies, count_kernels, peak_bytes

__all__ = [
    "ALREADY_CAST",
    "HAND",
    "LOW",
    "OURS",
    "PLAIN",
    "STOCK",
    "Case",
    "Contender",
    "Prepared",
    "Settings",
    "measure",
    "overhead",
    "spread",
]

#: The contenders; benchmarks/__init__.py says what each runs.
OURS, STOCK, HAND, ALREADY_CAST, PLAIN = "ours", "stock", "hand", "already_cast", "plain"

#: The low-precision dtype of all cases: CPUs and GPUs have fast kernels for it.
LOW = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        device: "cpu" or "cuda".
        rounds: The number of times that each contender of a case is timed, 2 or more.
        threads: The number of threads that PyTorch computes in.
        slice_seconds: The approximate time that a contender runs in each round.
        tiny: Whether the models are small enough for a test.
        counted: Count kernels and bytes on the stand-in device instead of times; `device` is then "cuda".
        keep: The folder for callgrind's files, one for each contender of a case; None to delete them.
    """

    device: str = "cpu"
    rounds: int = 31
    threads: int = 1
    slice_seconds: float = 0.005
    tiny: bool = False
    counted: bool = False
    keep: Path | None = None

    @property
    def clock(self) -> str:
        """The clock: "cpu" for CPU time, "wall" for wall-clock time, "kernels" for counts.

        On the CPU with one thread, CPU time of the process excludes other programs. With several threads it would be
        the sum over the threads.
        """
        if self.counted:
            return "kernels"
        return "cpu" if self.device == "cpu" and self.threads == 1 else "wall"


@dataclass(slots=True)
class Contender:
    """Code to run, the names that it uses, and the region around a slice of runs.

    Attributes:
        statement: The code, as source or as a function. Source does not include the cost of a function call.
        names: The names that the source can use.
        region: Makes the region around a slice. The time does not include entering it.
        setup: Source that runs in the region before the statement. Its variables live as long as the slice.
    """

    statement: str | Callable[[], Any]
    names: Mapping[str, Any] = field(default_factory=dict)
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    setup: str = "pass"

    def timer(self, clock: Callable[[], float] = time.process_time) -> timeit.Timer:
        """Returns the timer of the statement."""
        return timeit.Timer(self.statement, self.setup, clock, dict(self.names))


@dataclass
class Prepared:
    """A case that is ready to run.

    Attributes:
        contenders: The contenders.
        bases: The contenders over which the overhead of ours and of stock is reported.
        weights: The weights of all contenders, whose casts are counted; None: a CPU counts no casts and no memory.
        counts: Returns more counts of a contender, under the name "compiled"; None: there are none.
        stopwatch: Times a contender in place of the clock of a slice; None: it is a slice.
    """

    contenders: Mapping[str, Contender]
    bases: Sequence[str] = ()
    weights: Sequence[Tensor] | None = None
    counts: Callable[[Contender], dict[str, int]] | None = None
    stopwatch: Callable[[Contender], float] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a suite.

    Attributes:
        suite: The suite's name.
        name: The case's name.
        prepare: Makes tensors, models and contenders.
    """

    suite: str
    name: str
    prepare: Callable[[Settings], Prepared]


# Running a case


def measure(case: Case, settings: Settings) -> dict[str, Any]:
    """Runs a case, and returns its result as benchmarks/__init__.py documents it, without instructions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        prepared = case.prepare(settings)
        times = {} if settings.counted else _interleaved(prepared, settings)
        return {
            "suite": case.suite,
            "case": case.name,
            **_summary(times, prepared.bases),
            **_counts(prepared, settings),
        }
    finally:
        torch.set_num_threads(threads)


class _Slice:
    """Times a contender for a slice in a region."""

    def __init__(self, contender: Contender, settings: Settings) -> None:
        clock = time.process_time if settings.clock == "cpu" else synchronized_clock
        self._timer, self._region, self._seconds = contender.timer(clock), contender.region, settings.slice_seconds

    @cached_property
    def _runs(self) -> int:
        runs = 1
        while (took := self._timer.timeit(runs)) < self._seconds / 4:
            runs *= 4
        return max(1, min(1_000_000, int(runs * self._seconds / max(took, 1e-9))))

    def __call__(self) -> float:
        """Returns the time of one run in nanoseconds. The first run fills the cast cache and does not count."""
        with self._region():
            self._timer.timeit(1)
            return self._timer.timeit(self._runs) / self._runs * 1e9


def _interleaved(prepared: Prepared, settings: Settings) -> dict[str, list[float]]:
    """Returns the times of each contender by round, in nanoseconds. One more round runs first and does not count."""
    timers: dict[str, Callable[[], float]] = {
        name: _Slice(contender, settings) if prepared.stopwatch is None else partial(prepared.stopwatch, contender)
        for name, contender in prepared.contenders.items()
    }
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    for timer in timers.values():
        timer()
    for number in range(settings.rounds):
        first = number % len(names)  # CPU caches affect the first of a round
        for name in (*names[first:], *names[:first]):
            times[name].append(timers[name]())
    return times


def _counts(prepared: Prepared, settings: Settings) -> dict[str, Any]:
    """Returns casts, memory and kernels by contender."""
    found: dict[str, dict[str, Any]] = {"casts": {}, "peak_bytes": {}, "kernels": {}, "copies": {}, "compiled": {}}
    for name, contender in prepared.contenders.items():
        run_once = partial(contender.timer().timeit, 1)
        if settings.device == "cuda":
            with contender.region():
                run_once()
                if settings.counted:
                    counts = count_copies(run_once, prepared.weights or ())
                else:
                    counts = {"kernels": count_kernels(run_once)}
            for key, value in counts.items():
                found[key][name] = value

            def run_twice(contender: Contender = contender, run_once: Callable[[], Any] = run_once) -> None:
                with contender.region():
                    run_once()
                    run_once()

            found["peak_bytes"][name] = peak_bytes(run_twice, "cuda")
        elif prepared.weights is not None or prepared.counts is not None:
            run_once()
            found["peak_bytes"][name] = peak_bytes(run_once, settings.device)
        if prepared.weights is not None and not settings.counted:
            found["casts"][name] = count_casts(run_once, prepared.weights)
        if prepared.counts is not None:
            found["compiled"][name] = prepared.counts(contender)
    return found


# Statistics


def _summary(times: Mapping[str, Sequence[float]], bases: Sequence[str]) -> dict[str, Any]:
    def of_pairs(name: str, base: str, combine: Callable[[float, float], float]) -> dict[str, float] | None:
        if name not in times or base not in times:
            return None
        return spread([combine(*pair) for pair in zip(times[name], times[base], strict=True)])

    there = [base for base in bases if base in times and STOCK in times]
    return {
        # Other load on the machine slows both contenders of a round, and hardly changes their ratio.
        "ratio": of_pairs(OURS, STOCK, lambda ours, base: ours / base),
        "ratio_to_hand": of_pairs(OURS, HAND, lambda ours, base: ours / base),
        "overheads": {base: overhead(times[OURS], times[STOCK], times[base]) for base in there},
        "times_ns": {name: spread(values) for name, values in times.items()},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median and the quartiles of two or more values. Quartiles lie between values.

    Example:
        >>> spread([4, 1, 3, 2, 5])
        {'median': 3, 'low': 2.0, 'high': 4.0}
    """
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": statistics.median(values), "low": low, "high": high}


def overhead(ours: Sequence[float], stock: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Returns the spread of (ours - base) / (stock - base) over the rounds: 1 is stock's overhead, 0 is none.

    Args:
        ours: Our time in each round.
        stock: Stock's time in each round.
        base: The base's time in each round.

    Returns:
        `spread`, None unless the median of stock - base exceeds the distance between its quartiles; `reason`: why
        there is no spread, or "".

    Example:
        >>> overhead([3, 3, 3], [5, 5, 5], [1, 1, 1])["spread"]["median"]
        0.5
        >>> overhead([3, 3, 3], [2, 1, 0], [1, 1, 1])["reason"]
        'stock takes no longer than the base'
    """
    costs = [theirs - least for theirs, least in zip(stock, base, strict=True)]
    shares = [(mine - least) / cost for mine, least, cost in zip(ours, base, costs, strict=True) if cost > 0]
    cost = spread(costs)
    if cost["median"] <= cost["high"] - cost["low"] or len(shares) < 2:
        noise = "stock - base is within its noise"
        return {"spread": None, "reason": noise if cost["median"] > 0 else "stock takes no longer than the base"}
    return {"spread": spread(shares), "reason": ""}
