"""Counts the ops that pass PyTorch's dispatch key Python, with a mode, for comparison with a trace."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from torch_promote import _C
from torch_promote.reading.trace import trace
from torch_promote.reading.trace_report import TraceReport

_KEY = torch._C.DispatchKey
_OBSERVER = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY))
#: Ops that record what runs, for the profiler.
_IGNORED = ("profiler::", "prim::")


class CountingMode(TorchDispatchMode):
    """Counts the calls that returned, by overload.

    Attributes:
        counts: The number of calls of each overload.
        casts: The number of conversions that neither the program nor a backward formula asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.casts = 0
        self.asked = _Asked()
        self.again = _Again(self)

    def __enter__(self) -> Any:
        self.asked.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.asked.__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts a call."""
        kwargs = kwargs or {}
        name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
        if name == "aten::detach" and not excluded(_KEY.ADInplaceOrView):
            # Nothing was dispatched: where PyTorch saves a result for a backward, it asks a mode for the copy.
            with torch._C._ExcludeDispatchKeyGuard(_OBSERVER):
                return op(*args, **kwargs)
        if _is_composite(name):  # in inference mode, PyTorch does not take it apart before it asks the mode
            with torch._C.DisableTorchFunction(), self.again:
                return op._op_dk(_KEY.CompositeImplicitAutograd, *args, **kwargs)
        result = op(*args, **kwargs)
        if not name.startswith(_IGNORED):
            self.counts[name] += 1
            self.casts += name == "aten::_to_copy" and not self.asked.inside and not _is_in_backward()
        return result


class _Again(TorchDispatchMode):
    def __init__(self, mode: CountingMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, *call: Any) -> Any:
        return self.mode.__torch_dispatch__(*call)


class _Asked(TorchFunctionMode):
    """Tracks whether the program is in a conversion that it asked for."""

    inside = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = getattr(function, "__name__", "") in _CONVERSIONS
        self.inside += asks
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.inside -= asks


_CONVERSIONS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")


def _is_in_backward() -> bool:
    """Whether a formula of a backward runs, which may convert; what a checkpoint runs again does not count."""
    frame = sys._getframe(1) if torch._C._current_graph_task_id() != -1 else None
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        code = frame.f_code
        if code.co_filename == checkpoint.__file__ and code.co_name in ("recompute_fn", "backward"):
            return False
        frame = frame.f_back
    return frame is not None


@functools.cache
def _is_composite(name: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def counts_of(report: TraceReport) -> Counter[str]:
    """Returns the counts that a mode would have for a trace's calls: those of non-composite ops that returned."""
    # A checkpoint stops its recomputation in a call, which then has no results.
    ended = (call for call in report.calls if call.outputs or call.phase != "recompute")
    return Counter(call.name for call in ended if not call.composite and not call.error)


def count_both_ways(program: Callable[[], Any], *arguments: Any) -> tuple[TraceReport, CountingMode]:
    """Runs a program under a trace and a mode at once."""
    with trace(*arguments) as report, CountingMode() as mode:
        program()
    return report, mode
