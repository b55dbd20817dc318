"""The strict rule: all tensors must have one dtype, and a Python number must not be of a higher kind."""

from __future__ import annotations

import functools

import torch

from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name, is_integral
from torch_promote.reference.promotion_rules.operands import NUMBER_TYPES, fits
from torch_promote.reference.promotion_rules.rule import PromotionRule

__all__ = ["strict_rule"]


@functools.cache
def strict_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns the strict rule for every dtype of the running PyTorch.

    A call whose tensors have one dtype never raises. Integers still divide to the default dtype.

    Args:
        default_dtype: The dtype of integers in true division.

    Example:
        >>> rule = strict_rule(torch.float32)
        >>> rule.tensors[torch.int32, torch.int64], rule.numbers[int, torch.float16], rule.numbers[float, torch.int32]
        (None, torch.float16, None)
    """
    return PromotionRule(
        name="strict",
        tensors={(a, b): a if a is b else None for a in ALL_DTYPES for b in ALL_DTYPES},
        numbers={
            (number, dtype): dtype if fits(number, dtype) else None for number in NUMBER_TYPES for dtype in ALL_DTYPES
        },
        floats={dtype: default_dtype if is_integral(dtype, include_bool=True) else dtype for dtype in ALL_DTYPES},
        default_dtype=default_dtype,
        reason=_reason,
        build=strict_rule,
    )


def _reason(a: torch.dtype | type, b: torch.dtype) -> str:
    if isinstance(a, type):
        return f"a Python {a.__name__} would change the dtype of {dtype_name(b)}"
    return f"{dtype_name(a)} and {dtype_name(b)} differ, and nothing is promoted implicitly"
