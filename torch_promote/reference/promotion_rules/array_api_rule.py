"""The array API standard's rule: kinds do not mix, and a Python number must not be of a higher kind than the array."""

from __future__ import annotations

import functools

import torch

from torch_promote.reference.dtypes import ALL_DTYPES, Kind, dtype_name, is_complex, is_floating, kind
from torch_promote.reference.promotion_rules.operands import NUMBER_TYPES, fits, words_of_table
from torch_promote.reference.promotion_rules.rule import PromotionRule
from torch_promote.reference.promotion_rules.text_table import read_table

__all__ = ["ARRAY_API_TABLE", "array_api_rule"]

#: The promotions that the standard defines: among integers, and among real and complex floating dtypes.
ARRAY_API_TABLE = """
     b1 u1 u2 u4 u8 i1 i2 i4 i8 f4 f8 c4 c8
b1   b1 -- -- -- -- -- -- -- -- -- -- -- --
u1   -- u1 u2 u4 u8 i2 i2 i4 i8 -- -- -- --
u2   -- u2 u2 u4 u8 i4 i4 i4 i8 -- -- -- --
u4   -- u4 u4 u4 u8 i8 i8 i8 i8 -- -- -- --
u8   -- u8 u8 u8 u8 -- -- -- -- -- -- -- --
i1   -- i2 i4 i8 -- i1 i2 i4 i8 -- -- -- --
i2   -- i2 i4 i8 -- i2 i2 i4 i8 -- -- -- --
i4   -- i4 i4 i8 -- i4 i4 i4 i8 -- -- -- --
i8   -- i8 i8 i8 -- i8 i8 i8 i8 -- -- -- --
f4   -- -- -- -- -- -- -- -- -- f4 f8 c4 c8
f8   -- -- -- -- -- -- -- -- -- f8 f8 c8 c8
c4   -- -- -- -- -- -- -- -- -- c4 c8 c4 c8
c8   -- -- -- -- -- -- -- -- -- c8 c8 c8 c8
"""

_TABLE = read_table(ARRAY_API_TABLE)
_STANDARD = frozenset(dtype for dtype, _ in _TABLE)
_COMPLEX_OF = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@functools.cache
def array_api_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns the standard's rule. Dtypes outside the standard promote only with themselves and with numbers.

    Args:
        default_dtype: The default dtype. The rule does not depend on it.

    Example:
        >>> rule = array_api_rule(torch.float32)
        >>> rule.tensors[torch.uint8, torch.int8], rule.tensors[torch.int32, torch.float32]
        (torch.int16, None)
        >>> rule.numbers[int, torch.float32], rule.numbers[float, torch.int32], rule.numbers[bool, torch.int32]
        (torch.float32, None, None)

    Source: array_api_strict/_dtypes.py, _result_type (v2.6).
    """
    return PromotionRule(
        name="array_api",
        tensors=_TABLE,
        numbers={(number, dtype): _with_number(number, dtype) for number in NUMBER_TYPES for dtype in ALL_DTYPES},
        floats={dtype: dtype if is_floating(dtype) or is_complex(dtype) else None for dtype in ALL_DTYPES},
        default_dtype=default_dtype,
        reason=_reason,
        words=functools.partial(words_of_table, "The standard's table"),
        build=array_api_rule,
    )


def _with_number(number: type, dtype: torch.dtype) -> torch.dtype | None:
    if number is bool or dtype is torch.bool:
        return dtype if number is bool and dtype is torch.bool else None
    if number is complex and is_floating(dtype):
        return _COMPLEX_OF.get(dtype)
    return dtype if fits(number, dtype) else None


def _reason(a: torch.dtype | type, b: torch.dtype) -> str:
    if isinstance(a, type):
        return f"the standard does not mix a Python {a.__name__} with {_kind(b)} arrays such as {dtype_name(b)}"
    for dtype in (a, b):
        if dtype not in _STANDARD:
            return f"the standard has no {dtype_name(dtype)}"
    if kind(a) is kind(b):
        return "the standard has no dtype for uint64 with signed integers"
    return f"the standard does not mix kinds: {dtype_name(a)} is {_kind(a)}, {dtype_name(b)} is {_kind(b)}"


def _kind(dtype: torch.dtype) -> str:
    return {Kind.BOOL: "bool", Kind.INTEGRAL: "integer", Kind.FLOATING: "floating", Kind.COMPLEX: "complex"}.get(
        kind(dtype), "opaque"
    )
