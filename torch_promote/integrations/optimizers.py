"""Hooks that invalidate cached casts: after steps of optimizers, and in modes that replay ops.

Fused optimizers, PyTorch's and others', write weights through kernels that do not increase the version, so the cache
cannot detect these writes by itself (csrc/cache/write_log.h; docs/casts.md). The other writers of this kind are in
unversioned_writes.py.
"""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torch_promote import _C
from torch_promote.integrations.compile import translator

__all__ = ["forget_after_steps", "keep_from_replaying_modes"]


def keep_from_replaying_modes() -> None:
    """Makes selective checkpointing see the same casts as under stock.

    Its modes number the ops of a block, and match the numbers in the recomputation. A cast that came from the cache in
    the forward but is made in the recomputation would shift the numbers.
    """
    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    modes = (getattr(torch.utils.checkpoint, name, None) for name in names)
    _C.set_replaying_modes([mode for mode in modes if mode is not None])


def forget_after_steps() -> None:
    """Makes each `step` of an optimizer, on any thread, drop the casts of its parameters.

    The hook is installed when the package is imported, because it must also see steps that are compiled, or captured in
    a CUDA graph, before the first region.
    """
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        _note_step(optimizer)
    elif not _is_exporting():  # pragma: no cover: Dynamo traces it, and nothing calls it
        # See NOTE [ After a compiled frame ]. In this frame, `stored` reads as the earlier steps.
        _after_frame.stored = (optimizer, _after_frame.stored)


def _is_exporting() -> bool:
    tracing = translator()
    return torch.compiler.is_exporting() or (tracing is not None and tracing.output.export)


# Dynamo calls it during tracing. Before 2.12, Dynamo replaces `torch.compiler.is_exporting()` itself with True.
_is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _note_step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        weights = group.get("params")
        if isinstance(weights, (list, tuple)):  # some optimizers store other types here
            _C.note_step(weights)


def _note_steps(steps: tuple[Optimizer, Any] | None) -> None:
    while steps is not None:
        optimizer, steps = steps
        _note_step(optimizer)


_after_frame = _C.CallOnStore(_note_steps)
