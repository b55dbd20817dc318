"""`promote_types`: the 13x13 table of promotions, and the rules for dtypes without a row."""

from __future__ import annotations

import torch

from torch_promote.errors import TorchPromoteError
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.reference.dtypes import TYPECODES, Family, dtype_name, family, is_floating

__all__ = [
    "PROMOTION_TABLE",
    "TABLE_DTYPES",
    "PromotionError",
    "no_common_dtype",
    "promote_skip_undefined",
    "promote_types",
    "promotion_table",
]

#: The dtype that two dtypes promote to. Source: c10/core/ScalarType.cpp, _promoteTypesLookup (v2.13).
PROMOTION_TABLE = """
     b1 u1 i1 i2 i4 i8 bf f2 f4 f8 c2 c4 c8
b1   b1 u1 i1 i2 i4 i8 bf f2 f4 f8 c2 c4 c8
u1   u1 u1 i2 i2 i4 i8 bf f2 f4 f8 c2 c4 c8
i1   i1 i2 i1 i2 i4 i8 bf f2 f4 f8 c2 c4 c8
i2   i2 i2 i2 i2 i4 i8 bf f2 f4 f8 c2 c4 c8
i4   i4 i4 i4 i4 i4 i8 bf f2 f4 f8 c2 c4 c8
i8   i8 i8 i8 i8 i8 i8 bf f2 f4 f8 c2 c4 c8
bf   bf bf bf bf bf bf bf f4 f4 f8 c4 c4 c8
f2   f2 f2 f2 f2 f2 f2 f4 f2 f4 f8 c2 c4 c8
f4   f4 f4 f4 f4 f4 f4 f4 f4 f4 f8 c4 c4 c8
f8   f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 c8 c8 c8
c2   c2 c2 c2 c2 c2 c2 c4 c2 c4 c8 c2 c4 c8
c4   c4 c4 c4 c4 c4 c4 c4 c4 c4 c8 c4 c4 c8
c8   c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8 c8
"""

#: The row, and by symmetry the column, of torch.bcomplex32, whose real and imaginary parts are bfloat16.
BCOMPLEX32_ROW = """
     b1 u1 i1 i2 i4 i8 bf f2 f4 f8 c2 c4 c8 bc
bc   bc bc bc bc bc bc bc c4 c4 c8 c4 c4 c8 bc
"""

#: The thirteen dtypes of `PROMOTION_TABLE`, in its order.
TABLE_DTYPES: tuple[torch.dtype, ...] = tuple(TYPECODES[code] for code in PROMOTION_TABLE.split("\n")[1].split())


class PromotionError(TorchPromoteError, TypeError):
    """Operands without a common dtype in PyTorch, or a result that cannot be cast to the dtype of `out`.

    Example:
        >>> issubclass(PromotionError, TypeError)
        True
    """


def promotion_table() -> dict[tuple[torch.dtype, torch.dtype], torch.dtype]:
    """Returns the table as a mapping of ordered pairs, with bcomplex32 if the running PyTorch has it.

    Returns:
        Maps pairs of dtypes to the dtype that they promote to.

    Raises:
        ValueError: A row of the table has the wrong length.

    Example:
        >>> promotion_table()[torch.bfloat16, torch.float16]
        torch.float32

    Source: c10/core/ScalarType.cpp, _promoteTypesLookup (v2.13).
    """
    pairs: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {}
    for text in (PROMOTION_TABLE, BCOMPLEX32_ROW):
        header, *rows = (line.split() for line in text.strip().splitlines())
        for row_code, *results in rows:
            for column_code, result in zip(header, results, strict=True):
                if {row_code, column_code, result} <= TYPECODES.keys():
                    pairs[TYPECODES[row_code], TYPECODES[column_code]] = TYPECODES[result]
                    pairs[TYPECODES[column_code], TYPECODES[row_code]] = TYPECODES[result]
    return pairs


_TABLE = promotion_table()


def promote_types(a: torch.dtype | str, b: torch.dtype | str) -> torch.dtype:
    """Returns the dtype that two dtypes promote to.

    Args:
        a: A dtype, or its name.
        b: Another.

    Returns:
        Their common dtype.

    Raises:
        PromotionError: PyTorch defines no promotion for the two dtypes. The message names the rule.
        DtypeError: No dtype has the name.

    Example:
        >>> promote_types(torch.uint8, torch.int8), promote_types("half", "bf16")
        (torch.int16, torch.float32)
        >>> promote_types(torch.uint16, torch.float32)
        torch.float32
        >>> promote_types(torch.qint8, torch.int8)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.reference.promotion.table.PromotionError: qint8 and int8 have no common dtype: ...

    Source: aten/src/ATen/native/TypeProperties.cpp, promote_types (v2.13); c10/core/ScalarType.cpp, promoteTypes
    (v2.13).
    """
    a, b = parse_dtype(a), parse_dtype(b)
    promoted = _promote(a, b)
    if promoted is None:
        raise no_common_dtype(a, b, "bits dtypes promote only with themselves")
    return promoted


def _promote(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The promoted dtype. None (Undefined in PyTorch) if exactly one of the dtypes is a bits dtype.

    Source: c10/core/ScalarType.cpp, promoteTypes (v2.13).
    """
    if a is b:
        return a
    found = _TABLE.get((a, b))
    if found is not None:
        return found
    # The pair is not in the table. The checks below have PyTorch's order.
    families = (family(a), family(b))
    if Family.QUANTIZED in families:
        raise no_common_dtype(a, b, "quantized dtypes promote only with themselves")
    if Family.BITS in families:
        return None
    if Family.FLOAT8 in families:
        raise no_common_dtype(a, b, "float8 dtypes promote only with themselves")
    if Family.BAREBONES_UNSIGNED in families:
        if is_floating(a):
            return a
        if is_floating(b):
            return b
        raise no_common_dtype(a, b, "uint16, uint32, uint64 and uint1 to uint7 promote only with floating dtypes")
    odd = a if family(a) in (Family.SMALL_SIGNED, Family.FLOAT4) else b
    raise no_common_dtype(a, b, f"PyTorch's table has no row for {dtype_name(odd)}")


def no_common_dtype(a: torch.dtype, b: torch.dtype, why: str) -> PromotionError:
    """Returns the error for two dtypes without a common dtype.

    Args:
        a: A dtype.
        b: Another.
        why: The reason, as a clause.

    Example:
        >>> print(no_common_dtype(torch.bits8, torch.int8, "bits dtypes promote only with themselves"))
        bits8 and int8 have no common dtype: bits dtypes promote only with themselves. Convert one of them first.
    """
    return PromotionError(
        f"{dtype_name(a)} and {dtype_name(b)} have no common dtype: {why}. Convert one of them first."
    )


def promote_skip_undefined(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    """Promotes two dtypes. If one is undefined (None), the result is the other.

    Raises:
        PromotionError: As `promote_types`, except that bits dtypes give None.

    Example:
        >>> promote_skip_undefined(None, torch.int8)
        torch.int8

    Source: aten/src/ATen/native/TypeProperties.cpp, promote_skip_undefined (v2.13).
    """
    if a is None:
        return b
    if b is None:
        return a
    return _promote(a, b)
