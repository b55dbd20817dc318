"""The peak memory of a step, from the allocator."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["peak_bytes"]

_BEGIN = "torch_promote: the step begins"


def peak_bytes(step: Callable[[], Any], device: str, *, warm: bool = True) -> int:
    """Runs a step twice and returns the peak memory of the second run, in bytes above the memory held before it.

    It does not use a dispatch mode or hooks, under which casts would take another path. The first run creates objects
    that outlive a step, such as cached casts, because the profiler misses releases of memory allocated before it
    started.

    Args:
        step: A forward, with or without a backward.
        device: The device of the memory, "cpu" or "cuda".
        warm: False: run the step once and return the peak of that run, which includes objects that outlive a step.

    Example:
        >>> def step():
        ...     a = torch.empty(256)
        ...     b = torch.empty(256)
        ...     del a
        ...     return torch.empty(256)
        >>> peak_bytes(step, "cpu")
        2048
    """
    return _on_cuda(step, warm) if device == "cuda" else _on_cpu(step, warm)


def _on_cuda(step: Callable[[], Any], warm: bool) -> int:
    if warm:
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _on_cpu(step: Callable[[], Any], warm: bool) -> int:
    from torch.autograd.profiler import profile, record_function  # here, because the import is slow

    # Not torch.profiler.profile: some of its releases warn without acc_events, and with it, each run would also build
    # the tree of all events, which takes a hundred times as long as a small step.
    profiler = profile(profile_memory=True, use_kineto=True)
    with _quiet_profiler(), profiler:
        if warm:
            step()
        with record_function(_BEGIN):
            pass
        step()
    results: Any = profiler.kineto_results
    events = results.events()
    begin = next(event.start_ns() for event in events if event.name() == _BEGIN)
    changes: list[int] = [
        event.nbytes() for event in events if event.name() == "[memory]" and event.start_ns() >= begin
    ]
    return max(itertools.accumulate(changes, initial=0))


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Silences the profiler, which otherwise writes to stderr when it starts and stops."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
