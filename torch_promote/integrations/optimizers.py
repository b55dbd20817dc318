"""Hooks that invalidate cached casts: after optimizers that write without bumping a version, and in replaying modes.

A cast that the cache keeps longer than stock does is valid as long as the cache detects every change of its source
(csrc/cache/weight.h, csrc/cache/persistent_cache.h; docs/casts.md). Two parts of PyTorch need a hook for that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.utils.checkpoint
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torch_promote import _C

__all__ = ["forget_after_steps", "keep_from_replaying_modes"]


def keep_from_replaying_modes() -> None:
    """Makes selective checkpointing see each cast that it would see under stock.

    Its modes store the results of ops by their count, and count again when the block is recomputed. A cast that came
    from the cache in the forward and is made in the recomputation would be one op too many.
    """
    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    modes = (getattr(torch.utils.checkpoint, name, None) for name in names)
    _C.set_replaying_modes([mode for mode in modes if mode is not None])


def forget_after_steps() -> None:
    """Makes each `step` of an optimizer drop the persistent casts of its parameters.

    Fused optimizers, PyTorch's and others', write through kernels that do not bump the version of a tensor.
    """
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_post_hook(_forget)


# Dynamo calls it while it traces.
forget_after_steps._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forget(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # a compiled step bumps the versions of what it writes
    _C.forget_casts([weight for group in optimizer.param_groups for weight in group["params"]])
