"""How much memory a step takes at its peak, as the allocator tells it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["peak_bytes"]

_BEGIN = "torch_promote: the step begins"


def peak_bytes(step: Callable[[], Any], device: str) -> int:
    """Runs a step twice and returns the most bytes that the second held at a time, beyond what was held before it.

    No dispatch mode and no hook is used, which casts would take another path for. The first run leaves what a step
    leaves, such as cached casts: the allocator of the CPU tells of no release of what it has not seen allocated.

    Args:
        step: A forward, with or without a backward.
        device: "cpu" or "cuda": whose memory.

    Example:
        >>> def step():
        ...     a = torch.empty(256)
        ...     b = torch.empty(256)
        ...     del a
        ...     return torch.empty(256)
        >>> peak_bytes(step, "cpu")
        2048
    """
    return _on_cuda(step) if device == "cuda" else _on_cpu(step)


def _on_cuda(step: Callable[[], Any]) -> int:
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _on_cpu(step: Callable[[], Any]) -> int:
    from torch.profiler import ProfilerActivity, profile, record_function  # here: it takes a while to import

    # acc_events changes nothing here, where there is one cycle; without it, some releases warn.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _quiet_profiler(), profiler:
        step()
        with record_function(_BEGIN):
            pass
        step()
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == _BEGIN)
    changes: list[int] = [
        event.nbytes() for event in events if event.name() == "[memory]" and event.start_ns() >= begin
    ]
    return max(itertools.accumulate(changes, initial=0))


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler writes about its start and stop to stderr, unless told otherwise when it begins."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
