"""A case of a suite, its contenders, and how they are run: in alternation, round by round."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measures import count_casts, count_compiled, count_kernels, count_on_stand_in, peak_bytes

#: The contenders; benchmarks/__init__.py says what each runs.
OURS, STOCK, ALREADY_CAST, PLAIN = "ours", "stock", "already_cast", "plain"

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
    """

    device: str = "cpu"
    rounds: int = 31
    threads: int = 1
    slice_seconds: float = 0.005
    tiny: bool = False
    counted: bool = False

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
        compiles: Whether the statements call compiled functions; `count_compiled` then counts the results.
    """

    contenders: Mapping[str, Contender]
    bases: Sequence[str] = ()
    weights: Sequence[Tensor] | None = None
    compiles: bool = False


#: Makes the tensors, models and contenders of a case.
Case = Callable[[Settings], Prepared]


# Running a case


def measure(case: Case, settings: Settings) -> dict[str, Any]:
    """Runs a case, and returns its result as benchmarks/__init__.py documents it, without names and instructions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        prepared = case(settings)
        times = {} if settings.counted else _interleaved(prepared, settings)
        return {**_summary(times, prepared.bases), **_counts(prepared, settings)}
    finally:
        torch.set_num_threads(threads)


def synchronized_clock() -> float:
    """Returns seconds after the device's work. `torch.utils.benchmark` has it, and imports setuptools."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def _interleaved(prepared: Prepared, settings: Settings) -> dict[str, list[float]]:
    """Returns the times of each contender by round, in nanoseconds. One more round runs first and does not count."""
    clock = time.process_time if settings.clock == "cpu" else synchronized_clock
    timers = {name: contender.timer(clock) for name, contender in prepared.contenders.items()}
    runs = {}
    for name, timer in timers.items():
        with prepared.contenders[name].region():
            runs[name] = _runs_of_a_slice(timer, settings.slice_seconds)
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    for number in range(settings.rounds + 1):
        first = number % len(names)  # CPU caches affect the first of a round
        for name in (*names[first:], *names[:first]):
            with prepared.contenders[name].region():
                timers[name].timeit(1)  # fills the cast cache, and does not count
                times[name].append(timers[name].timeit(runs[name]) / runs[name] * 1e9)
    return {name: values[1:] for name, values in times.items()}


def _runs_of_a_slice(timer: timeit.Timer, seconds: float) -> int:
    runs = 1
    while (took := timer.timeit(runs)) < seconds / 4:
        runs *= 4
    return max(1, min(1_000_000, int(runs * seconds / max(took, 1e-9))))


def _counts(prepared: Prepared, settings: Settings) -> dict[str, Any]:
    """Returns casts, memory and kernels by contender."""
    found: dict[str, dict[str, Any]] = {"casts": {}, "peak_bytes": {}, "kernels": {}, "moved_bytes": {}, "compiled": {}}
    for name, contender in prepared.contenders.items():
        run_once = partial(contender.timer().timeit, 1)
        if settings.device == "cuda":
            with contender.region():
                run_once()
                if settings.counted:
                    counts = count_on_stand_in(run_once, prepared.weights or ())
                else:
                    counts = {"kernels": count_kernels(run_once)}
            for key, value in counts.items():
                found[key][name] = value

            def run_twice(contender: Contender = contender, run_once: Callable[[], Any] = run_once) -> None:
                with contender.region():
                    run_once()
                    run_once()

            found["peak_bytes"][name] = peak_bytes(run_twice, "cuda")
        elif prepared.weights is not None or prepared.compiles:
            run_once()
            found["peak_bytes"][name] = peak_bytes(run_once, settings.device)
        if prepared.weights is not None and not settings.counted:
            found["casts"][name] = count_casts(run_once, prepared.weights)
        if prepared.compiles:
            found["compiled"][name] = count_compiled(run_once)
    return found


# Statistics


def _summary(times: Mapping[str, Sequence[float]], bases: Sequence[str]) -> dict[str, Any]:
    # Other load on the machine slows both contenders of a round, and hardly changes their ratio.
    ratios = [ours / stock for ours, stock in zip(times.get(OURS, ()), times.get(STOCK, ()), strict=True)]
    return {
        "ratio": spread(ratios) if ratios else None,
        "overheads": {base: overhead(times[OURS], times[STOCK], times[base]) for base in bases if base in times},
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


def overhead(ours: Sequence[float], stock: Sequence[float], base: Sequence[float]) -> dict[str, float] | None:
    """Returns the spread of (ours - base) / (stock - base) over the rounds: 1 is stock's overhead, 0 is none.

    None if stock - base is within its noise.

    Example:
        >>> overhead([3, 3, 3], [5, 5, 5], [1, 1, 1])["median"], overhead([3, 3, 3], [2, 1, 0], [1, 1, 1])
        (0.5, None)
    """
    costs = [theirs - least for theirs, least in zip(stock, base, strict=True)]
    shares = [(mine - least) / cost for mine, least, cost in zip(ours, base, costs, strict=True) if cost > 0]
    cost = spread(costs)
    return None if cost["median"] <= cost["high"] - cost["low"] or len(shares) < 2 else spread(shares)
