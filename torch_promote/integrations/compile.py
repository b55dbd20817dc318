"""Regions under torch.compile.

Inside a compiled function, a region is two calls in the graph, `graph_enter` and `graph_exit`. Dynamo runs them while
it traces, to see the dtypes of ops inside. AOTAutograd runs them while it traces the aten graph, to record the casts.
The compiled code contains only the casts. The two have to be plain functions that Dynamo allows in the graph: if they
were ops of torch.library, the dispatcher would undo their changes of the dispatch state when they return.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_promote import _C
from torch_promote.integrations.after_import import run_after_import
from torch_promote.integrations.compare_ranks import compare_ranks
from torch_promote.integrations.export import record_enter, record_exit
from torch_promote.native.module_tables import is_marker, tables_in_force

__all__ = [
    "DYNAMO",
    "digests",
    "graph_enter",
    "graph_exit",
    "graphs_open_regions",
    "install",
    "policy_digest",
    "skip_frames",
    "translator",
]

# The owner of regions that a graph opens. A graph that raises does not end its regions; the extension ends those of
# this owner together with the region around them.
_GRAPH = None


#: Not empty once a graph has opened a region in any thread.
_opened: list[bool] = []


def graphs_open_regions() -> bool:
    """Whether a compiled function, or one during compilation, has opened a region in this process."""
    return bool(_opened)


def graph_enter(packed: str) -> None:
    """Opens a region from a graph. `packed` is the packed spec of the region."""
    if not _opened:
        _opened.append(True)
    base = _C.depth()
    surroundings = _C.enter_region(_GRAPH, packed)
    try:
        _unwind_after_tracing(base)
        if surroundings & _C.UNCHECKED_RANKS:
            compare_ranks()
        if surroundings & _C.TORCH_FUNCTION_MODE:
            record_enter(packed)
    except BaseException:
        _C.exit_region(_GRAPH)
        raise


def graph_exit(packed: str) -> None:
    """Ends the innermost region that `graph_enter` opened."""
    if _C.exit_region(_GRAPH) & _C.TORCH_FUNCTION_MODE:
        record_exit(packed)


def translator() -> Any:
    """Returns Dynamo's bytecode translator if it is tracing in this thread, or None."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    if module is None:
        return None
    try:
        return module.InstructionTranslator.current_tx()
    except (AttributeError, LookupError):
        return None


def _unwind_after_tracing(base: int) -> None:
    """Makes Dynamo, if it is tracing, end the region when it aborts the trace."""
    tracing = translator()
    if tracing is None:
        return  # not Dynamo: a backend runs the graph

    def unwind() -> None:
        if _C.depth() > base:
            _C.suspend_regions(base)

    tracing.output.add_cleanup_hook(unwind)


def skip_frames(*functions: Any) -> None:
    """Keeps Dynamo from compiling frames of these functions and of the functions that they call.

    After a graph break, Dynamo compiles each function that the broken one calls separately.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame  # exists even before torch._dynamo is imported
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)


def _autocast_state() -> dict[str, torch.dtype]:  # pragma: no cover: PyTorch whose keys lack the dtypes
    """Returns the autocast dtypes of the device types on which autocast is enabled."""
    return {
        device_type: torch.get_autocast_dtype(device_type)
        for device_type in torch._C._autocast_supported_devices()
        if torch.is_autocast_enabled(device_type)
    }


def _complete_disk_cache_keys() -> None:
    """Adds the current policy, and autocast dtypes where they are missing, to the keys of AOTAutograd's cache on disk.

    Newer releases of PyTorch put the autocast dtypes into the key (torch/_functorch/_aot_autograd/autograd_cache.py,
    autocast_state), and with them our policy fingerprints. Under older releases, a process in a region of one dtype
    could load code that another process had compiled in a region of another dtype. A fingerprint has 25 bits, so two
    processes with different policies may have equal ones; the digest distinguishes them. See
    NOTE [ Policy fingerprint ].
    """
    details = sys.modules[_DISK_CACHE].AOTAutogradCacheDetails
    has_dtypes = "autocast_state" in inspect.getsource(details)
    original = details.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Under the stock policy, add nothing: processes with and without this package then share entries.
        if digest := "/".join(filter(None, (part() for part in digests))):
            self.torch_promote_policy = digest
        if not has_dtypes and (state := _autocast_state()):
            self.autocast_state = state  # pragma: no cover: as _autocast_state

    details.__init__ = init


def policy_digest() -> str:
    """Returns a digest of this thread's current policy, the same in every process; "" for stock's."""
    if _C.policy_is_stock():
        return ""
    ops = sorted(item for item in _C.current_policy().items() if not is_marker(item[0]))
    policy = (ops, _C.promotion_content(), *tables_in_force())
    return hashlib.sha256(repr(policy).encode()).hexdigest()


#: The parts that the disk cache's key gets: the current policy, and the `install` settings for regions in graphs.
digests: list[Callable[[], str]] = [lambda: policy_digest()]


DYNAMO = "torch._dynamo"
_DISK_CACHE = "torch._functorch._aot_autograd.autograd_cache"


def install() -> None:
    """Completes the keys of AOTAutograd's cache on disk, now or when AOTAutograd is imported."""
    run_after_import(_DISK_CACHE, _complete_disk_cache_keys)
