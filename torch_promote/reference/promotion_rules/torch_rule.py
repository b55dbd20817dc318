"""PyTorch's own rule, in which 0-dim tensors and Python numbers are weaker than tensors with dimensions."""

from __future__ import annotations

import functools
import itertools

import torch

from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name, is_integral
from torch_promote.reference.promotion.states import combine_categories, number_dtype, result_type
from torch_promote.reference.promotion.table import PromotionError, promote_types
from torch_promote.reference.promotion_rules.operands import NUMBER_TYPES
from torch_promote.reference.promotion_rules.rule import PromotionRule

__all__ = ["torch_rule"]


@functools.cache
def torch_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns PyTorch's rule for every dtype of the running PyTorch.

    Args:
        default_dtype: The dtype of Python floats, and of integers in true division.

    Example:
        >>> rule = torch_rule(torch.float32)
        >>> rule.tensors[torch.int64, torch.float16], rule.zero_dims[torch.int8, torch.int64]
        (torch.float16, torch.int8)

    Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
    """
    pairs = list(itertools.product(ALL_DTYPES, ALL_DTYPES))
    return PromotionRule(
        name="torch",
        tensors={pair: _or_none(promote_types, *pair) for pair in pairs},
        numbers={
            (number, dtype): _or_none(combine_categories, dtype, number_dtype(number(1), default_dtype))
            for number in NUMBER_TYPES
            for dtype in ALL_DTYPES
        },
        floats={dtype: default_dtype if is_integral(dtype, include_bool=True) else dtype for dtype in ALL_DTYPES},
        zero_dim_is_weak=True,
        zero_dims={pair: _or_none(combine_categories, *pair) for pair in pairs},
        default_dtype=default_dtype,
        reason=lambda a, b: f"PyTorch does not promote {_name(a)} with {_name(b)}",
        whole=lambda operands: result_type(*operands, default_dtype=default_dtype),
        build=torch_rule,
    )


def _name(operand: torch.dtype | type) -> str:
    return dtype_name(operand) if isinstance(operand, torch.dtype) else f"a Python {operand.__name__}"


def _or_none(function: object, *args: torch.dtype) -> torch.dtype | None:
    assert callable(function)
    try:
        found: torch.dtype | None = function(*args)
    except PromotionError:
        return None
    return found
