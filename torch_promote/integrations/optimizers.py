"""Whom kept casts have to be told of, or kept from: optimizers that write unseen, and modes that replay what they saw.

What the cast cache keeps beyond stock's is good as long as every change of its source can be seen (csrc/cache/weight.h,
csrc/cache/persistent_cache.h; docs/casts.md). Two things in PyTorch need a word from here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.utils.checkpoint
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torch_promote import _C

__all__ = ["forget_after_steps", "keep_from_replaying_modes"]


def keep_from_replaying_modes() -> None:
    """Has selective checkpointing see each cast that it would see under stock.

    Its modes store the results of ops by their count, and count again when the block is recomputed: a cast that was
    served from the cache the first time and made the second is an op too many.
    """
    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    modes = (getattr(torch.utils.checkpoint, name, None) for name in names)
    _C.set_replaying_modes([mode for mode in modes if mode is not None])


def forget_after_steps() -> None:
    """Has each `step` of an optimizer drop the persistent casts of its parameters.

    Fused optimizers, PyTorch's and others', write through kernels that leave the version of a tensor as it was.
    """
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_post_hook(_forget)


# Dynamo calls it while it traces.
forget_after_steps._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forget(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # what a compiled step writes has its version counted
    _C.forget_persistent([weight for group in optimizer.param_groups for weight in group["params"]])
