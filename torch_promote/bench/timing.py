"""A stopwatch for a statement, which runs for some milliseconds at a time.

On the CPU with one thread, it measures the CPU time of this process, which excludes other programs; on a quiet machine
this equals wall-clock time. With several threads, CPU time would be the sum over the threads, so it measures wall-clock
time. On a GPU, it measures wall-clock time, and synchronizes before it reads the clock.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from torch_promote.bench.callgrind import instructions_of
from torch_promote.bench.cases import Settings

__all__ = ["Stopwatch", "stopwatch", "threads"]

_MOST_RUNS = 1_000_000

_Count = TypeVar("_Count")


class Stopwatch:
    """Times a statement, or counts its instructions or kernels. `stopwatch` creates one."""

    def __init__(
        self, timer: timeit.Timer, seconds: float, region: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._timer, self._seconds, self._region = timer, seconds, region
        self._runs = 0

    def __call__(self) -> float:
        """Times the statement for a slice in a region, and returns the time of one run in nanoseconds.

        The first run does not count: it fills the cast cache of the new region.
        """
        with self._region():
            self._timer.timeit(1)
            if self._runs == 0:  # inside the region, because the statement may need it
                self._runs = _runs_in(self._seconds, self._timer)
            return self._timer.timeit(self._runs) / self._runs * 1e9

    def run_twice(self) -> None:
        """Runs the statement twice in a region."""
        with self._region():
            self._timer.timeit(1)
            self._timer.timeit(1)

    def counted(self, count: Callable[[Callable[[], Any]], _Count]) -> _Count:
        """Applies a counter to the second run in a region.

        Args:
            count: Runs a function and returns its count.
        """
        with self._region():
            self._timer.timeit(1)
            return count(lambda: self._timer.timeit(1))

    def instructions(self, folder: Path) -> float:
        """Counts the instructions of a run in a region, under callgrind.

        Args:
            folder: The folder that callgrind writes to.
        """
        with self._region():
            return instructions_of(self._timer.timeit, folder)


def stopwatch(
    statement: str | Callable[[], Any],
    names: Mapping[str, Any],
    settings: Settings,
    region: Callable[[], AbstractContextManager[Any]] = nullcontext,
    setup: str = "pass",
) -> Stopwatch:
    """Returns a stopwatch for a statement.

    Args:
        statement: The statement, as source or as a function. Source does not include the cost of a function call.
        names: The names that the source can use.
        settings: The device, and the length of a slice.
        region: Makes the region around a slice. The time does not include entering it.
        setup: Source that runs in the region before the statement. Its variables live as long as the slice.
    """
    timer = timeit.Timer(statement, setup, timer=_clock(settings), globals=dict(names))
    return Stopwatch(timer, settings.slice_seconds, region)


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
