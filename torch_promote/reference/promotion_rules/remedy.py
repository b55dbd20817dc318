"""The cast that an error proposes for operands without a common dtype."""

from __future__ import annotations

import torch

from torch_promote.reference.dtypes import Kind, default_complex, dtype_name, is_floating, kind
from torch_promote.reference.promotion.table import PromotionError, promote_types

__all__ = ["remedy"]


def remedy(dtype: torch.dtype, other: torch.dtype | type) -> str:
    """Returns a sentence with a cast that gives two operands the same dtype.

    Args:
        dtype: The dtype of a tensor.
        other: The dtype of another tensor, or the type of a Python number.

    Example:
        >>> remedy(torch.int32, torch.float32)
        'Write x.to(torch.float32) for the int32 tensor.'
        >>> remedy(torch.bool, int)
        'Write x.to(torch.int64) for the bool tensor.'
    """
    if other is bool:
        return "Write int(x) for the Python bool."
    if isinstance(other, type):
        return _write(_for_number(other, dtype), dtype)
    target = _meeting(dtype, other)
    if target is None:
        return f"Cast one of the two: x.to(torch.{dtype_name(dtype)}) or x.to(torch.{dtype_name(other)})."
    return _write(target, *(operand for operand in (dtype, other) if operand is not target))


def _write(target: torch.dtype, *sources: torch.dtype) -> str:
    tensors = " and the ".join(f"{dtype_name(source)} tensor" for source in dict.fromkeys(sources))
    return f"Write x.to(torch.{dtype_name(target)}) for the {tensors}."


def _for_number(number: type, dtype: torch.dtype) -> torch.dtype:
    default = torch.get_default_dtype()
    if number is complex:
        return torch.complex128 if dtype is torch.float64 else default_complex(default)
    return default if number is float else torch.int64


def _meeting(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The dtype to cast to: PyTorch's common dtype, else the wider of two floating dtypes. None: neither exists."""
    try:
        return promote_types(a, b)
    except PromotionError:
        pass
    if kind(a) is kind(b) is Kind.INTEGRAL or Kind.OPAQUE in (kind(a), kind(b)):
        return None
    if is_floating(a) and is_floating(b) and a.itemsize != b.itemsize:
        return a if a.itemsize > b.itemsize else b
    return None
