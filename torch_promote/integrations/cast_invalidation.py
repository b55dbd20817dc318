"""Hooks that end cached casts: with PyTorch's own cache, and after writes that do not increase a tensor's version.

NOTE [ Where unversioned writes are detected ]

- Steps of optimizers, with any kernels, also compiled: a hook of torch.optim.
- FSDP2 gathers shards under a context manager that restores the versions: a hook at its end.
- Replays of CUDA graphs, only if a region keeps casts longer than stock.

The C++ side sees a tensor that is made over a weight's memory, such as `weight.data`: NOTE [ Persistent casts ] in
csrc/cache/persistent_casts.h. Other writes are listed as limits in docs/casts.md.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from torch_promote import _C
from torch_promote.integrations.compile import run_after_import, translator


def install() -> None:
    """Installs the hooks that every cache mode needs. Called when the package is imported."""
    _end_casts_with_stocks()
    _keep_from_replaying_modes()
    register_optimizer_step_post_hook(_after_step)
    run_after_import("torch.distributed.fsdp._fully_shard._fsdp_collectives", _watch_preserved_versions)
    # Until the first capture in which the cache keeps a cast, torch.cuda.CUDAGraph is not modified.
    _C.set_capture_functions(getattr(torch._C, "_cuda_isCurrentStreamCapturing", None), _count_captures)


def watch() -> None:
    """Installs the hooks that only the cache modes beyond stock's need. Called before the first such region."""
    if sys.meta_path is None:  # Python ends, and imports nothing any more
        return  # pragma: no cover: coverage.py has written its counts
    _watch()


# Dynamo calls it during tracing.
watch._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _watch() -> None:
    _watch_preserved_versions()
    _watch_replays()
    # A mode would return other tensors, and a default device, which is a mode too, those of another device. A trace
    # would count the calls as the program's.
    observers = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY))
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch._C._ExcludeDispatchKeyGuard(observers):
        storage = torch.UntypedStorage(2)
        _C.recognize_slices(*(torch.empty(0, dtype=torch.uint8).set_(part) for part in (storage, storage[:1])))


def _end_casts_with_stocks() -> None:
    """Makes `torch.clear_autocast_cache` end our casts too; torch.autocast's outermost region calls it at its end."""
    # Source: torch/amp/autocast_mode.py, autocast.__exit__ (v2.13).
    clear: Any = torch.clear_autocast_cache

    @functools.wraps(clear)
    def clear_autocast_cache() -> None:
        clear()
        _C.end_casts()

    torch.clear_autocast_cache = clear_autocast_cache


def _keep_from_replaying_modes() -> None:
    """Makes selective checkpointing see the same casts as under stock."""
    # Its modes number the ops of a block, and match the numbers in the recomputation. A cast that came from the cache
    # in the forward but is made in the recomputation would shift the numbers.
    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    modes = (getattr(torch.utils.checkpoint, name, None) for name in names)
    _C.set_replaying_modes([mode for mode in modes if mode is not None])


# --- Steps of optimizers


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        _forget_weights(optimizer)
    elif not _is_exporting():  # pragma: no cover: Dynamo traces it, and nothing calls it
        # See NOTE [ After a compiled frame ]. In this frame, `stored` reads as the earlier steps.
        _after_frame.stored = (optimizer, _after_frame.stored)


def _is_exporting() -> bool:
    tracing = translator()
    return torch.compiler.is_exporting() or (tracing is not None and tracing.output.export)


# Dynamo calls it during tracing. Before 2.12, Dynamo replaces `torch.compiler.is_exporting()` itself with True.
_is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forget_weights(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        weights = group.get("params")
        if isinstance(weights, (list, tuple)):  # some optimizers store other types here
            _C.forget_casts(weights)


def _forget_weights_of_steps(steps: tuple[Optimizer, Any] | None) -> None:
    while steps is not None:
        optimizer, steps = steps
        _forget_weights(optimizer)


_after_frame = _C.CallOnStore(_forget_weights_of_steps)


# --- FSDP2


@functools.cache
def _watch_preserved_versions() -> None:
    """Makes the end of `_unsafe_preserve_version_counter` report its tensors as written."""
    context = torch.autograd.grad_mode._unsafe_preserve_version_counter
    end = context.__exit__

    @functools.wraps(end)
    def end_and_report(self: Any, *error: Any) -> None:
        end(self, *error)
        _C.forget_casts(self.tensors)

    context.__exit__ = end_and_report  # type: ignore[method-assign]


# --- CUDA graphs: NOTE [ Casts and CUDA graphs ] in csrc/cache/capture.h


def _count_captures() -> None:
    graph: Any = torch.cuda.CUDAGraph
    capture_begin = graph.capture_begin

    @functools.wraps(capture_begin)
    def count_and_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _C.note_capture()
        return capture_begin(self, *args, **kwargs)

    graph.capture_begin = count_and_begin


def _watch_replays() -> None:
    """Makes each replay drop all casts beyond stock's, because the graph may write to any weight."""
    graph: Any = torch.cuda.CUDAGraph
    replay = graph.replay

    @functools.wraps(replay)
    def replay_and_forget(self: Any) -> None:
        replay(self)
        _C.forget_beyond_stock()

    graph.replay = replay_and_forget
