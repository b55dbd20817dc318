"""Compares two results that should be equal: structure, dtype, shape, strides, bits. Copies keep all of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from torch_promote.observe.ops import is_fake

#: Attributes, and the methods for the flags that say how to read the data.
_ATTRIBUTES = ("dtype", "shape", "device", "layout", "requires_grad", "is_conj", "is_neg")
#: The methods for the parts of a sparse tensor, by layout.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs."""

    kind: str  # "structure", "value", "strides", "bits", or an attribute of a tensor such as "dtype"
    where: str  # which leaf of the result, such as "result[1]"
    ours: str
    stock: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} {self.ours} against {self.stock}"


def compare(ours: Any, stock: Any, where: str = "result") -> list[Difference]:
    """Returns the differences between two results; for each tensor, the first one. `where` names the result in them.

    Equal results have the same structure, dtypes, shapes, devices, layouts, requires_grad, strides and bits. NaNs are
    equal if their bits are. Fake tensors have no bits; everything else is compared.
    """
    if _is_flat(ours) and _is_flat(stock) and len(ours) == len(stock):
        ours_leaves, stock_leaves = ours, stock
    else:
        ours_leaves, ours_tree = tree_flatten(ours)
        stock_leaves, stock_tree = tree_flatten(stock)
        if ours_tree != stock_tree:
            return [Difference("structure", where, str(ours_tree), str(stock_tree))]
    found = []
    for index, (a, b) in enumerate(zip(ours_leaves, stock_leaves, strict=True)):
        label = f"{where}[{index}]"
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            # A NaN is not equal to itself, and 1 is equal to True.
            if type(a) is not type(b) or not (a == b or repr(a) == repr(b)):
                found.append(Difference("value", label, repr(a), repr(b)))
            continue
        difference = _compare_tensors(a, b, label)
        if difference is not None:
            found.append(difference)
    return found


def _is_flat(value: Any) -> bool:
    """Whether a value is a flat list, as most ops' results are. Saves tree_flatten, which creates reference cycles."""
    return type(value) is list and not any(isinstance(leaf, tuple | list | dict) for leaf in value)


def _compare_tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> Difference | None:
    for attribute in _ATTRIBUTES:
        if attribute == "shape" and a.is_nested:  # nested tensors have no shape; their elements have
            continue
        x, y = (value() if callable(value) else value for value in (getattr(a, attribute), getattr(b, attribute)))
        if x != y:
            return Difference(attribute, where, str(x), str(y))
    if b.layout is torch.strided and not b.is_nested and a.stride() != b.stride():
        return Difference("strides", where, str(a.stride()), str(b.stride()))
    if is_fake(a) or is_fake(b) or same_bits(a, b):
        return None
    return Difference("bits", where, *_first_bits(a.detach(), b.detach()))


def _first_bits(a: torch.Tensor, b: torch.Tensor) -> tuple[str, str]:
    """The first elements that differ; for layouts without elements to index, the whole tensors."""
    if a.layout is not torch.strided or a.is_nested or a.is_quantized or a.numel() == 0:
        return str(a), str(b)
    count, index = unequal_elements(a, b)
    return f"{count} of {a.numel()} elements, the first at {list(index)}: {_value(a[index])}", _value(b[index])


def unequal_elements(a: torch.Tensor, b: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Returns how many elements of two tensors of one shape and dtype differ in bits, and the index of the first."""
    unequal = (_as_bytes(a) != _as_bytes(b)).reshape(a.numel(), -1).any(1).nonzero().flatten()
    return len(unequal), tuple(int(i) for i in torch.unravel_index(unequal[0], a.shape))


def _value(element: torch.Tensor) -> str:
    try:
        return str(element.item())
    except NotImplementedError:  # a dtype without a Python number, which print does not show either
        return f"bytes {_as_bytes(element).tolist()}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits; quantized ones are compared by torch.equal."""
    if a.layout in _PARTS and not a.is_nested:
        return all(_same_parts(getattr(a, part)(), getattr(b, part)()) for part in _PARTS[a.layout])
    if a.is_nested:
        ours, stock = a.detach().unbind(), b.detach().unbind()
        return len(ours) == len(stock) and all(map(_same_parts, ours, stock))
    if a.layout is not torch.strided or a.is_quantized:
        return torch.equal(a, b)
    if a.numel() == 0:
        return True
    return torch.equal(_as_bytes(a), _as_bytes(b))


def _same_parts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and same_bits(a, b)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    resolved = tensor.detach().resolve_conj().resolve_neg()
    flat = resolved.contiguous().reshape(-1)
    # A single element is contiguous with any stride, but view(uint8) needs stride 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def copy_with_strides(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a detached copy with the same strides, gaps and overlaps included."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if is_strided and is_fake(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=tensor.device)
    tensor = tensor.detach()
    if not is_strided:
        return tensor.clone() if dtype is None else tensor.to(dtype, copy=True)
    if tensor.is_conj():
        return copy_with_strides(tensor.conj(), dtype).conj()
    if tensor.is_neg():
        return torch._neg_view(copy_with_strides(torch._neg_view(tensor), dtype))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((extent if tensor.numel() else 0,), (1,)).to(dtype or tensor.dtype, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride())
