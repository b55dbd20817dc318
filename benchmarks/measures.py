"""Counts of a run that need no repetition: casts, peak memory, kernels, and what torch.compile generates."""

from __future__ import annotations

import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])

_BEGIN = "torch_promote: the step begins"


# Casts


class _CastCounter(TorchDispatchMode):
    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        # By storage: a cast of `weight.t()` is a cast of the weight.
        self._weights = {_storage_address(weight) for weight in weights}
        self.casts = {"weights": 0, "activations": 0, "gradients": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            in_backward = torch._C._current_autograd_node() is not None
            is_weight = _storage_address(args[0]) in self._weights
            self.casts["weights" if is_weight else "gradients" if in_backward else "activations"] += 1
        return result


def _storage_address(tensor: Tensor) -> int:
    # `untyped_storage()` would end the tensor's persistent casts.
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def count_casts(step: Callable[[], Any], weights: Iterable[Tensor]) -> dict[str, int]:
    """Runs a step and counts its copies to another dtype: of weights, of other tensors in the backward, of all others.

    Example:
        >>> weight = torch.ones(2, 2)
        >>> count_casts(lambda: (weight.t().half(), torch.ones(2).half(), weight.float()), [weight])
        {'weights': 1, 'activations': 1, 'gradients': 0}
    """
    with _CastCounter(weights) as counter:
        step()
    return counter.casts


# Memory


def peak_bytes(step: Callable[[], Any], device: str, *, warm: bool = True) -> int:
    """Runs a step twice and returns the peak memory of the second run, in bytes above the memory held before it.

    It does not use a dispatch mode or hooks, under which casts would take another path. The first run creates objects
    that outlive a step, such as cached casts, because the profiler misses releases of memory allocated before it
    started.

    Example:
        >>> def step():
        ...     a = torch.empty(256)
        ...     b = torch.empty(256)
        ...     del a
        ...     return torch.empty(256)
        >>> peak_bytes(step, "cpu")
        2048
    """
    if device == "cuda":
        if warm:
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Not torch.profiler.profile, which builds the tree of all events, in a hundred times the time of a small step.
    profiler = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
    quiet = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}  # it writes to stderr when it starts
    with mock.patch.dict(os.environ, quiet), profiler:
        if warm:
            step()
        with torch.autograd.profiler.record_function(_BEGIN):
            pass
        step()
    results: Any = profiler.kineto_results
    events = results.events()
    begin = next(event.start_ns() for event in events if event.name() == _BEGIN)
    changes: list[int] = [
        event.nbytes() for event in events if event.name() == "[memory]" and event.start_ns() >= begin
    ]
    return max(itertools.accumulate(changes, initial=0))


# Kernels


def count_kernels(run: Callable[[], Any]) -> int:
    """Runs a function on a GPU and returns the number of its kernels, without copies and fills of memory."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    # acc_events has no effect with one cycle; without it, some releases of PyTorch warn.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    results: Any = profiler.profiler
    return sum(
        event.device_type() == DeviceType.CUDA and not event.name().startswith(("Memcpy", "Memset"))
        for event in results.kineto_results.events()
    )


def count_on_stand_in(run: Callable[[], Any], weights: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Runs a function on the stand-in device, and counts its kernels and casts. Uses no dispatch mode."""
    stand_in: Any = sys.modules["cuda_stand_in"]
    addresses = {_storage_address(weight) for weight in weights}
    with stand_in.counting() as counts:
        run()
    kinds = {"weights": 0, "activations": 0, "gradients": 0}
    for cast in counts.casts:
        is_weight = cast.of_leaf or cast.address in addresses
        kinds["weights" if is_weight else "gradients" if cast.backward else "activations"] += 1
    moved = sum(cast.read + cast.written for cast in counts.casts)
    return {"kernels": counts.total, "casts": kinds, "moved_bytes": moved}


# torch.compile


def count_compiled(step: Callable[[], Any]) -> dict[str, int]:
    """Discards all compiled code, runs a step that calls compiled functions, and counts the results of compilation.

    Example:
        >>> double = torch.compile(lambda x: x * 2, backend="eager")
        >>> counts = count_compiled(lambda: (double(torch.ones(2)), double(torch.ones(2, dtype=torch.float64))))
        >>> counts["kernels"], counts["graphs"], counts["graph_breaks"], counts["frames"]
        (0, 2, 0, 2)
    """
    import torch._inductor.config  # here, because the imports take a second
    from torch._dynamo import utils
    from torch._functorch import config as functorch_config
    from torch._inductor import metrics

    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    metrics.reset()
    # Without Inductor's disk caches, so that it generates its code again.
    with torch._inductor.config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        step()
    metrics_of_all: Any = utils.get_compilation_metrics()
    guards = [frame.guard_count for frame in metrics_of_all if frame.guard_count is not None]
    return {
        "kernels": metrics.generated_kernel_count,
        "graphs": utils.counters["stats"]["unique_graphs"],
        "graph_breaks": sum(utils.counters["graph_break"].values()),
        "frames": len(guards),
        "guards": sum(guards),
    }


def on_its_own(function: _Function) -> _Function:
    """Returns a copy of a function that does not share compiled code with it.

    Dynamo stores compiled code at the code object, and checks the guards of all versions in turn. So functions with the
    same code object, such as closures made in a loop, would slow each other down.
    """
    return types.FunctionType(  # type: ignore[return-value]
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
