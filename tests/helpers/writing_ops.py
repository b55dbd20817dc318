"""Custom ops that return nothing, or not all that they write."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("writes::two_of_three", mutates_args=("product", "copy"))
def two_of_three(x: Tensor, product: Tensor, copy: Tensor, factor: float) -> None:
    """Writes to two of its three tensors."""
    product.copy_(x * factor)
    copy.copy_(x)


@torch.library.custom_op("writes::scale", mutates_args=("tensors", "count"))
def scale(tensors: list[Tensor], factor: float, count: Tensor | None = None) -> Tensor:
    """Writes to the tensors of a list and to an optional tensor, and returns another one."""
    for tensor in tensors:
        tensor.mul_(factor)
    if count is not None:
        count.add_(1)
    return torch.stack([tensor.float().sum() for tensor in tensors]).nan_to_num(posinf=0.0)


@torch.library.custom_op("writes::store", mutates_args=("cache",))
def store(x: Tensor, cache: Tensor, row: int) -> None:
    """Writes to one row of a cache, of which the rest may be uninitialized."""
    cache[row] = x
