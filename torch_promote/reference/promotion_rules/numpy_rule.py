"""NumPy 2's rule (NEP 50): a table for tensors of any number of dimensions. Only Python numbers are weak."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torch_promote.reference.dtypes import dtype_name, is_complex, is_floating, kind
from torch_promote.reference.promotion_rules.operands import NUMBER_TYPES, fits, words_of_table
from torch_promote.reference.promotion_rules.rule import PromotionRule
from torch_promote.reference.promotion_rules.text_table import CODES, read_table

__all__ = ["NUMPY_TABLE", "numpy_rule"]

#: The dtype of arithmetic on two arrays, with ml_dtypes' bfloat16. NumPy's own table is in
#: numpy/_core/src/multiarray/common_dtype.c and in its casting tables.
NUMPY_TABLE = """
     b1 u1 u2 u4 u8 i1 i2 i4 i8 bf f2 f4 f8 c4 c8
b1   b1 u1 u2 u4 u8 i1 i2 i4 i8 bf f2 f4 f8 c4 c8
u1   u1 u1 u2 u4 u8 i2 i2 i4 i8 bf f2 f4 f8 c4 c8
u2   u2 u2 u2 u4 u8 i4 i4 i4 i8 f4 f4 f4 f8 c4 c8
u4   u4 u4 u4 u4 u8 i8 i8 i8 i8 f8 f8 f8 f8 c8 c8
u8   u8 u8 u8 u8 u8 f8 f8 f8 f8 f8 f8 f8 f8 c8 c8
i1   i1 i2 i4 i8 f8 i1 i2 i4 i8 bf f2 f4 f8 c4 c8
i2   i2 i2 i4 i8 f8 i2 i2 i4 i8 f4 f4 f4 f8 c4 c8
i4   i4 i4 i4 i8 f8 i4 i4 i4 i8 f8 f8 f8 f8 c8 c8
i8   i8 i8 i8 i8 f8 i8 i8 i8 i8 f8 f8 f8 f8 c8 c8
bf   bf bf f4 f8 f8 bf f4 f8 f8 bf f4 f4 f8 c4 c8
f2   f2 f2 f4 f8 f8 f2 f4 f8 f8 f4 f2 f4 f8 c4 c8
f4   f4 f4 f4 f8 f8 f4 f4 f8 f8 f4 f4 f4 f8 c4 c8
f8   f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 c8 c8
c4   c4 c4 c4 c8 c8 c4 c4 c8 c8 c4 c4 c4 c8 c4 c8
c8   c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8
"""

_TABLE = read_table(NUMPY_TABLE)

#: NumPy's types, sorted by their numbers. Of several, the last one is promoted with each of the others.
_TYPE_NUMBERS = "b1 i1 u1 i2 u2 i4 u4 i8 u8 f4 f8 c4 c8 f2"
_RANK = {CODES[code]: rank for rank, code in enumerate(_TYPE_NUMBERS.split())}

#: The dtypes whose values bfloat16 can represent.
_IN_BFLOAT16 = (torch.bool, torch.int8, torch.uint8)


@functools.cache
def numpy_rule(default_dtype: torch.dtype) -> PromotionRule:
    """Returns NumPy 2's rule. It does not depend on PyTorch's default dtype, since NumPy's is float64.

    Args:
        default_dtype: The default dtype.

    Example:
        >>> rule = numpy_rule(torch.float32)
        >>> rule.tensors[torch.int32, torch.float32], rule.numbers[float, torch.int8]
        (torch.float64, torch.float64)
        >>> rule.common([torch.int16, torch.uint16, torch.float32])
        torch.float32

    Source: numpy/_core/src/multiarray/common_dtype.c, PyArray_PromoteDTypeSequence (v2.4).
    """
    dtypes = list(dict.fromkeys(dtype for dtype, _ in _TABLE))
    return PromotionRule(
        name="numpy",
        tensors=_TABLE,
        numbers={(number, dtype): _with_number(number, dtype) for number in NUMBER_TYPES for dtype in dtypes},
        floats={dtype: dtype if is_floating(dtype) or is_complex(dtype) else torch.float64 for dtype in dtypes},
        associative=False,
        default_dtype=default_dtype,
        reason=_reason,
        words=_words,
        many=_of_many,
        build=numpy_rule,
    )


def _with_number(number: type, dtype: torch.dtype) -> torch.dtype:
    """A number of a higher kind than the array has NumPy's default precision; others have the array's dtype."""
    if fits(number, dtype):
        return dtype
    if number is complex and is_floating(dtype):
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return {int: torch.int64, float: torch.float64, complex: torch.complex128}[number]


def _of_many(dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """Like PyArray_PromoteDTypeSequence: promotes one dtype with each of the others, and folds the results.

    Thus int16, uint16 and float32 give float32, without int32 as an intermediate step. NumPy uses ml_dtypes only for
    pairs; among more dtypes, bfloat16 stands for float32 unless it represents the values of all others.
    """
    found = set(dtypes)
    if torch.bfloat16 in found:
        found.remove(torch.bfloat16)
        if found <= set(_IN_BFLOAT16):
            return torch.bfloat16
        found.add(torch.float32)
    if not found <= _RANK.keys():
        return None
    main, *others = sorted(found, key=_RANK.__getitem__, reverse=True)
    return functools.reduce(_met, (_met(main, other) for other in others), main)


def _met(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    found = _TABLE[a, b]
    assert found is not None, "NumPy's table is complete"
    return found


def _words(a: torch.dtype | type, b: torch.dtype, common: torch.dtype) -> str:
    told = words_of_table("NumPy's table", a, b, common)
    return f"{told[:-1]}, NumPy's default." if isinstance(a, type) and common is not b and not is_floating(b) else told


def _reason(a: torch.dtype | type, b: torch.dtype) -> str:
    unknown = next((x for x in (a, b) if isinstance(x, torch.dtype) and x not in {d for d, _ in _TABLE}), None)
    assert unknown is not None, (a, b)
    if isinstance(a, type):
        return f"NumPy has no {dtype_name(b)}, and a Python {a.__name__} is of a higher kind ({kind(b).name.lower()})"
    return f"NumPy has no {dtype_name(unknown)}"
