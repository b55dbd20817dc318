"""A stopwatch for a statement: some milliseconds of it at a time.

On a CPU with one thread the clock is the CPU time of this process: what other programs take from it does not count, and
on a quiet machine it is the time of the day. With more threads it would be the sum over them, so that it is the time of
the day there, and on a GPU, which is waited for.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torch_promote.bench.cases import Settings, Timer

__all__ = ["stopwatch", "threads"]

_MOST_RUNS = 1_000_000


def stopwatch(
    statement: str | Callable[[], Any],
    names: Mapping[str, Any],
    settings: Settings,
    region: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Timer:
    """Returns a function that times a statement for a slice, and returns the nanoseconds that one run takes.

    A slice begins with a run that is not counted: it fills the cast cache of a region that has just been entered.

    Args:
        statement: What is timed, as source or as a function. Source has no cost of a call.
        names: What the source can name.
        settings: The device, and how long a slice is.
        region: Makes what is open around a slice; entering it is not timed.
    """
    timer = timeit.Timer(statement, timer=_clock(settings), globals=dict(names))
    runs = 0

    def time_a_slice() -> float:
        nonlocal runs
        with region():
            timer.timeit(1)
            if runs == 0:  # here, since the statement may need the region
                runs = _runs_in(settings.slice_seconds, timer)
            return timer.timeit(runs) / runs * 1e9

    return time_a_slice


def _runs_in(seconds: float, timer: timeit.Timer) -> int:
    runs = 1
    while (took := timer.timeit(runs)) < seconds / 4:
        runs *= 4
    return max(1, min(_MOST_RUNS, int(runs * seconds / max(took, 1e-9))))


def _clock(settings: Settings) -> Callable[[], float]:
    if settings.device == "cpu":
        return time.process_time if settings.clock == "cpu" else time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Has PyTorch compute in so many threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
