"""The number of CUDA kernels that a run starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_promote.checking.pretend_cuda import stand_in

__all__ = ["count_kernels"]

# Names of what CUDA does to memory without a kernel, such as "Memcpy HtoD (Pageable -> Device)".
_NO_KERNELS = ("Memcpy", "Memset")


def count_kernels(run: Callable[[], Any]) -> int:
    """Runs a function and returns how many CUDA kernels it started, without copies and fills of memory.

    On the tests' stand-in device, a kernel is a call of an op that computes.

    Args:
        run: The function.
    """
    device = stand_in()
    if device is None:
        return _count_profiled(run)
    before = device.kernels().total()
    run()
    return int(device.kernels().total() - before)


def _count_profiled(run: Callable[[], Any]) -> int:
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile  # here, because the import is slow

    torch.cuda.synchronize()
    # acc_events has no effect with one cycle; without it, some releases of PyTorch warn.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    results: Any = profiler.profiler
    return sum(
        event.device_type() == DeviceType.CUDA and not event.name().startswith(_NO_KERNELS)
        for event in results.kineto_results.events()
    )
