"""The saved state of a tensor, and hashes of tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

__all__ = ["KeptTensor", "add_bytes"]


class KeptTensor:
    """The state of a tensor at construction. The gradient's values are saved together with the gradient."""

    __slots__ = ("_gradient", "_is_leaf", "_memory", "_requires_grad", "_tensor", "_values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._memory = tensor.detach() if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) else None
        self._values = _elements(tensor.detach()).clone()
        self._gradient = tensor.grad if tensor.is_leaf else None

    def restore(self) -> None:
        """Restores the tensor."""
        tensor, memory = self._tensor, self._memory
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            if self._is_leaf and tensor.grad_fn is not None:
                with contextlib.suppress(RuntimeError):  # a view cannot be detached in place
                    tensor.detach_()
            if memory is not None and _place(tensor) != _place(memory):
                tensor.data = memory
            _elements(tensor).copy_(self._values)
        if self._is_leaf:
            if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self._gradient:
                tensor.grad = self._gradient


def add_bytes(found: Any, tensor: torch.Tensor) -> None:
    """Adds a tensor's dtype, shape and bits to a hash."""
    found.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}".encode())
    data = tensor.detach()
    data = data.to_local() if hasattr(data, "to_local") else data
    if data.is_meta:
        return
    if data.layout is torch.sparse_coo:
        data = data.coalesce()
        add_bytes(found, data.indices())
        data = data.values()
    if data.is_quantized:
        data = data.int_repr()
    if data.layout is not torch.strided:
        data = data.to_dense()
    data = data.to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.numel():
        found.update(data.view(torch.uint8).numpy())


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.layout, tensor.dtype, tensor.device, tensor.shape)
    return (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.layout)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each element once: PyTorch does not copy into an expanded tensor."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    repeated = [stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor[tuple(slice(0, 1) if one else slice(None) for one in repeated)] if any(repeated) else tensor
