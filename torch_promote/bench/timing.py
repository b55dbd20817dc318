"""A stopwatch for a statement, which runs for some milliseconds at a time.

On the CPU with one thread, it measures the CPU time of this process, which excludes the time that other programs take;
on a quiet machine this equals wall-clock time. With several threads, CPU time would be the sum over the threads, so it
measures wall-clock time. On a GPU, it measures wall-clock time, and waits for the GPU before it reads the clock. If the
settings say so, it counts the kernels of a single run instead.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torch_promote.bench.cases import Settings, Timer
from torch_promote.bench.kernels import count_kernels

__all__ = ["stopwatch", "threads"]

_MOST_RUNS = 1_000_000


def stopwatch(
    statement: str | Callable[[], Any],
    names: Mapping[str, Any],
    settings: Settings,
    region: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Timer:
    """Returns a function that runs a statement for a slice, and returns the time of one run in nanoseconds.

    With `settings.counted`, the function returns the number of kernels of one run.

    The first run of a slice does not count: it fills the cast cache of the new region.

    Args:
        statement: The statement, as source or as a function. Source does not include the cost of a function call.
        names: The names that the source can use.
        settings: The device, and the length of a slice.
        region: Makes the region around a slice. The time does not include entering it.
    """
    timer = timeit.Timer(statement, timer=_clock(settings), globals=dict(names))
    runs = 0

    def count_a_run() -> float:
        with region():
            timer.timeit(1)
            return float(count_kernels(lambda: timer.timeit(1)))

    def time_a_slice() -> float:
        nonlocal runs
        with region():
            timer.timeit(1)
            if runs == 0:  # here, because the statement may need the region
                runs = _runs_in(settings.slice_seconds, timer)
            return timer.timeit(runs) / runs * 1e9

    return count_a_run if settings.counted else time_a_slice


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
    """Sets the number of threads that PyTorch computes in, for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
