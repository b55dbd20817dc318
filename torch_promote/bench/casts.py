"""Counts the casts of a step below autograd, where every cast is an aten::_to_copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["count_casts", "memory_of", "no_casts"]


class _Count(TorchDispatchMode):
    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage: a cast of `weight.t()` is a cast of the weight.
        self._weights = {memory_of(weight) for weight in weights}
        self.casts = no_casts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            self.casts[self._kind(args[0])] += 1
        return result

    def _kind(self, source: Tensor) -> str:
        if memory_of(source) in self._weights:
            return "weights"
        return "activations" if torch._C._current_autograd_node() is None else "gradients"


def no_casts() -> dict[str, int]:
    """Returns zero for each kind of cast."""
    return {"weights": 0, "activations": 0, "gradients": 0}


def memory_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage. `untyped_storage()` would end the tensor's persistent casts."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def count_casts(step: Callable[[], Any], weights: Iterable[Tensor]) -> dict[str, int]:
    """Runs a step and counts its copies to another dtype.

    Args:
        step: A forward, with or without a backward.
        weights: The weights. Views of them count as weights.

    Returns:
        The number of casts of `weights`, of `gradients` (of other tensors in the backward, which includes what a
        checkpoint computes again), and of `activations` (all others).

    Example:
        >>> weight = torch.ones(2, 2)
        >>> count_casts(lambda: (weight.t().half(), torch.ones(2).half(), weight.float()), [weight])
        {'weights': 1, 'activations': 1, 'gradients': 0}
    """
    count = _Count(weights)
    with count:
        step()
    return count.casts
