"""Drops casts of weights to which other parts of PyTorch write without increasing the version.

NOTE [ Where unversioned writes are detected ]

- Fused optimizers called as ops (`torch._fused_adamw_`): extra kernels, csrc/dispatch/unversioned_writers.h.
- Steps of optimizers with any kernels: a hook, optimizers.py.
- Code compiled by AOTAutograd, the base of most backends of torch.compile: it writes below autograd, and increases the
  versions that eager code would have increased. If eager code increases none (a fused optimizer), `install` makes the
  compiled function report its writes.
- FSDP2 gathers shards under a context manager that resets the versions, and DDP does so with buffers. A hook at the end
  of the context reports the tensors. It is installed when FSDP2 is imported, at the first region that keeps casts
  longer than stock.
- Collectives, replays of CUDA graphs, and methods that share a weight's memory: `watch`, only if a region keeps casts
  longer than stock. Weights that an optimizer steps during a capture are never persistent, so replays of that graph
  need no detection.

None of these costs anything if no cast exists, and none changes a graph of torch.compile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_promote import _C
from torch_promote.integrations.after_import import run_after_import
from torch_promote.integrations.compile import skip_frames
from torch_promote.integrations.cuda_graphs import watch_replays

__all__ = ["install", "watch", "watch_preserved_versions"]

_AOT_WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


def install() -> None:
    """Detects writes of compiled functions and of FSDP2, from their import on."""
    run_after_import(_AOT_WRAPPERS, _watch_compiled_functions)
    run_after_import(_FSDP, watch_preserved_versions)


def watch() -> None:
    """Detects the writes that affect only the cache modes beyond stock's: see the note above."""
    if sys.meta_path is None:  # Python ends, and imports nothing any more
        return  # pragma: no cover: coverage.py has written its counts
    _watch()
    if not _C.recognizes_slices():
        # A mode would return other tensors, and a default device, which is a mode too, those of another device.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            storage = torch.UntypedStorage(2)
            _C.recognize_slices(*(torch.empty(0, dtype=torch.uint8).set_(part) for part in (storage, storage[:1])))


# Dynamo calls it during tracing.
watch._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _watch() -> None:
    _C.watch_collectives()
    watch_preserved_versions()
    watch_replays()
    _watch_sharing()


def _watch_compiled_functions() -> None:
    """Makes compiled functions report the inputs that they write to without increasing their versions.

    Source: torch/_functorch/_aot_autograd/runtime_wrappers.py, RuntimeWrapper (v2.13).
    """
    wrapper = sys.modules[_AOT_WRAPPERS].RuntimeWrapper
    post_compile = wrapper.post_compile

    @functools.wraps(post_compile)
    def post_compile_and_report(self: Any, *args: Any, runtime_metadata: Any, **kwargs: Any) -> Callable[..., Any]:
        run = post_compile(self, *args, runtime_metadata=runtime_metadata, **kwargs)
        inputs = enumerate(runtime_metadata.input_info)
        written = [at for at, info in inputs if info.mutates_data and info.mutations_hidden_from_autograd]
        return _reporting(run, written) if written else run

    wrapper.post_compile = post_compile_and_report


def _reporting(run: Callable[[list[Any]], Any], written: list[int]) -> Callable[[list[Any]], Any]:
    @functools.wraps(run)
    def run_and_report(args: list[Any]) -> Any:
        tensors = [args[at] for at in written]  # `run` empties the list
        try:
            return run(args)
        finally:
            _C.forget_casts(tensors)

    return run_and_report


@functools.cache
def watch_preserved_versions() -> None:
    """Makes the end of `_unsafe_preserve_version_counter` report its tensors as written."""
    context = torch.autograd.grad_mode._unsafe_preserve_version_counter
    end = context.__exit__

    @functools.wraps(end)
    def end_and_report(self: Any, *error: Any) -> None:
        end(self, *error)
        _C.forget_casts(self.tensors)

    context.__exit__ = end_and_report  # type: ignore[method-assign]


def _watch_sharing() -> None:
    """Makes the methods that share a tensor's memory drop its casts, as `detach` does.

    While a storage has another owner, the cache keeps no cast of it. Without these hooks, a tensor from `set_` or
    DLPack could be created, written to and destroyed between two uses of the weight, and the cache would return a stale
    cast.
    """
    tensor: Any = torch.Tensor
    storage_of, set_storage, export = tensor.untyped_storage, tensor.set_, tensor.__dlpack__

    @functools.wraps(storage_of)
    def untyped_storage(self: Any) -> Any:
        _C.note_alias(self)
        return storage_of(self)

    @functools.wraps(set_storage)
    def set_(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("source")
        if isinstance(source, torch.Tensor):
            _C.note_alias(source)
        return set_storage(self, *args, **kwargs)

    @functools.wraps(export)
    def __dlpack__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # Export a separate tensor, so that the storage has another owner for as long as the export lives. PyTorch
        # refuses to export a tensor that requires a gradient, so those are passed on unchanged.
        exported = self.detach() if _C.has_backend_meta(self) and not self.requires_grad else self
        return export(exported, *args, **kwargs)

    tensor.untyped_storage, tensor.set_, tensor.__dlpack__ = untyped_storage, set_, __dlpack__
    run_after_import("torch._dynamo", functools.partial(skip_frames, untyped_storage, set_, __dlpack__))
