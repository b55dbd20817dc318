"""Counts the kernels, graphs, graph breaks and guards of a compiled step, and the calls that compiling it takes."""

from __future__ import annotations

import contextlib
import cProfile
import gc
import pstats
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

__all__ = ["count_calls_of_compiler", "count_compiled", "on_its_own", "without_disk_caches"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def count_compiled(step: Callable[[], Any]) -> dict[str, int]:
    """Discards all compiled code, runs a step that calls compiled functions, and counts the results of compilation.

    Args:
        step: The step. If it calls its functions several times, recompilations are counted as well.

    Returns:
        The number of `kernels` that Inductor generates, of `graphs`, of `graph_breaks`, of `frames`, that is, of
        compilations by Dynamo, and of the `guards` of all frames.

    Example:
        >>> double = torch.compile(lambda x: x * 2, backend="eager")
        >>> counts = count_compiled(lambda: (double(torch.ones(2)), double(torch.ones(2, dtype=torch.float64))))
        >>> counts["kernels"], counts["graphs"], counts["graph_breaks"], counts["frames"]
        (0, 2, 0, 2)
    """
    from torch._dynamo import utils  # here, because the imports take a second
    from torch._inductor import metrics

    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    metrics.reset()
    with without_disk_caches():
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


def count_calls_of_compiler(step: Callable[[], Any]) -> int:
    """Discards all compiled code, runs a step that calls compiled functions, and counts the calls of Python functions.

    Compilation is Python code, apart from the C++ compiler, so the count stands for its time. It does not depend on the
    load of the machine: in one process, counts of the same step differ by a few calls.

    Args:
        step: The step. It has to have run before, so that nothing is imported or initialized.

    Returns:
        The number of calls in this thread, including calls of functions in C.
    """
    profiler = cProfile.Profile()
    torch._dynamo.reset()
    gc.collect()
    gc.disable()  # finalizers of other objects would be counted
    try:
        with without_disk_caches(), profiler:
            step()
    finally:
        gc.enable()
    return int(pstats.Stats(profiler).total_calls)  # type: ignore[attr-defined]


@contextlib.contextmanager
def without_disk_caches() -> Iterator[None]:
    """Disables Inductor's disk caches in a block, so that it generates its code again.

    The results of the C++ compiler are reused, because autocast does not affect its time.
    """
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def on_its_own(function: _Function) -> _Function:
    """Returns a copy of a function that does not share compiled code with it.

    Dynamo stores compiled code at the code object, and checks the guards of all versions in turn. So functions with the
    same code object, such as closures made in a loop, would slow each other down.

    Args:
        function: A Python function.
    """
    return types.FunctionType(  # type: ignore[return-value]
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
