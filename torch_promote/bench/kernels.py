"""Counts the kernels of a run on a CUDA device and, on the tests' stand-in device, its casts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_promote.bench.cases import Copies
from torch_promote.bench.casts import memory_of, no_casts
from torch_promote.checking.autocast_in_force import stand_in

__all__ = ["count_copies", "count_kernels"]

# Prefixes of CUDA's memory operations without a kernel, such as "Memcpy HtoD (Pageable -> Device)".
_NO_KERNELS = ("Memcpy", "Memset")

# The kernels of the stand-in that copy.
_COPIES = ("aten::copy_", "aten::_foreach_copy_")


def count_kernels(run: Callable[[], Any]) -> int:
    """Runs a function and returns the number of CUDA kernels that it launched, without copies and fills of memory.

    On the tests' stand-in device, a kernel is a call of an op that computes; `cuda_stand_in.kernels` describes how ops
    of lists count.

    Args:
        run: The function.
    """
    if stand_in() is None:
        return _count_profiled(run)
    kernels, _, _ = count_copies(run)
    return kernels


def count_copies(run: Callable[[], Any], weights: Iterable[Tensor] = ()) -> tuple[int, dict[str, int], Copies]:
    """Runs a function on the stand-in device, and counts its kernels and casts. Uses no dispatch mode.

    Args:
        run: The function.
        weights: The weights. Leaves that require a gradient, and views of both, count as weights too.

    Returns:
        The number of kernels, the casts by what they cast (as `count_casts` returns them), and more about the casts.
    """
    addresses = {memory_of(weight) for weight in weights}
    with stand_in().counting() as counts:
        run()
    kinds = no_casts()
    directions = {phase: {"narrowing": 0, "widening": 0} for phase in ("forward", "backward")}
    for cast in counts.casts:
        is_weight = cast.of_leaf or cast.address in addresses
        kinds["weights" if is_weight else "gradients" if cast.backward else "activations"] += 1
        directions["backward" if cast.backward else "forward"]["widening" if cast.widens else "narrowing"] += 1
    copies = Copies(
        **directions,
        kernels=sum(counts.kernels[name] for name in _COPIES),
        cast_kernels=len({cast.launch for cast in counts.casts}),
        moved_bytes=sum(cast.read + cast.written for cast in counts.casts),
        allocated_bytes=counts.allocated_bytes,
    )
    return counts.total, kinds, copies


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
