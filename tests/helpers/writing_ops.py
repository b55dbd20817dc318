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
def scale(tensors: list[Tensor], count: Tensor, factor: float) -> Tensor:
    """Writes to the tensors of a list and to another tensor, and returns a third one."""
    for tensor in tensors:
        tensor.mul_(factor)
    count.add_(1)
    return torch.stack([tensor.float().sum() for tensor in tensors]).nan_to_num(posinf=0.0)


@torch.library.custom_op("writes::store", mutates_args=("cache",))
def store(x: Tensor, cache: Tensor, row: int) -> None:
    """Writes to one row of a cache, of which the rest may be uninitialized."""
    cache[row] = x


#: PyTorch 2.11's `custom_op` cannot run without an optional argument that it would write to.
_library = torch.library.Library("writes", "FRAGMENT")
_library.define("copy_to(Tensor x, Tensor(a!)? one, Tensor(b!)[]? several) -> ()")


@torch.library.impl(_library, "copy_to", "CompositeExplicitAutograd")
def _copy_to(x: Tensor, one: Tensor | None, several: list[Tensor] | None) -> None:
    for tensor in [*([] if one is None else [one]), *(several or ())]:
        tensor.copy_(x)


#: Copies a tensor to an optional tensor, and to the tensors of an optional list.
copy_to = torch.ops.writes.copy_to.default
