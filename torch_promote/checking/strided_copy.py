"""Copies of tensors with the strides of the original."""

from __future__ import annotations

import torch

from torch_promote.observe.ops import is_fake

__all__ = ["copy_with_strides"]


def copy_with_strides(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a detached copy with the same strides, gaps and overlaps included.

    Args:
        tensor: The tensor, of any layout.
        dtype: The dtype of the copy; None keeps the tensor's.

    Example:
        >>> copy_with_strides(torch.ones(4)[::2], torch.float64).stride()
        (2,)
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return tensor.clone() if dtype is None else tensor.to(dtype, copy=True)
    if is_fake(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=tensor.device)
    if tensor.is_conj():
        return copy_with_strides(tensor.conj(), dtype).conj()
    if tensor.is_neg():
        return torch._neg_view(copy_with_strides(torch._neg_view(tensor), dtype))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((extent if tensor.numel() else 0,), (1,)).to(dtype or tensor.dtype, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride())
