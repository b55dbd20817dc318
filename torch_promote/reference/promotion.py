"""PyTorch's promotion: of two dtypes (`promote_types`), of operands (`result_type`), and legal casts (`can_cast`).

Each operand of `result_type` has a state: tensor with dimensions, 0-dim tensor or Python number. The table promotes the
dtypes within each state. A weaker state affects the result only if its dtype is of a higher kind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_promote.errors import TorchPromoteError, shown
from torch_promote.policy.dtype_names import operand_of_name, parse_dtype
from torch_promote.reference.dtypes import (
    TYPECODES,
    Family,
    default_complex,
    dtype_name,
    family,
    is_complex,
    is_floating,
    is_integral,
    to_complex,
)

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

#: The typecodes of PyTorch's table, and those of unsigned dtypes without a row in it.
CODES: dict[str, torch.dtype] = TYPECODES | {"u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64}

#: The thirteen dtypes of `PROMOTION_TABLE`, in its order.
TABLE_DTYPES: tuple[torch.dtype, ...] = tuple(TYPECODES[code] for code in PROMOTION_TABLE.split("\n")[1].split())


class PromotionError(TorchPromoteError, TypeError):
    """Operands without a common dtype in PyTorch, or a result that cannot be cast to the dtype of `out`.

    Example:
        >>> issubclass(PromotionError, TypeError)
        True
    """


def read_table(text: str) -> dict[tuple[torch.dtype, torch.dtype], torch.dtype | None]:
    """Returns a table as a mapping of pairs in both orders, without dtypes that the running PyTorch lacks."""
    # `text`: a header of typecodes, and rows that start with theirs. "--" marks a pair without a common dtype.
    header, *rows = (line.split() for line in text.strip().splitlines())
    pairs: dict[tuple[torch.dtype, torch.dtype], torch.dtype | None] = {}
    for row, *codes in rows:
        for column, code in zip(header, codes, strict=True):
            if {row, column, code} <= CODES.keys() | {"--"}:
                pairs[CODES[row], CODES[column]] = pairs[CODES[column], CODES[row]] = CODES.get(code)
    return pairs


_TABLE = read_table(PROMOTION_TABLE) | read_table(BCOMPLEX32_ROW)


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
        torch_promote.reference.promotion.PromotionError: qint8 and int8 have no common dtype: ...

    Source: aten/src/ATen/native/TypeProperties.cpp, promote_types (v2.13); c10/core/ScalarType.cpp, promoteTypes
    (v2.13).
    """
    a, b = parse_dtype(a), parse_dtype(b)
    promoted = _promote(a, b)
    if promoted is None:
        raise _no_common_dtype(a, b, "bits dtypes promote only with themselves")
    return promoted


def _promote(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The promoted dtype. None (Undefined in PyTorch) if exactly one of the dtypes is a bits dtype."""
    # Source: c10/core/ScalarType.cpp, promoteTypes (v2.13).
    if a is b:
        return a
    found = _TABLE.get((a, b))
    if found is not None:
        return found
    # The pair is not in the table. The checks below have PyTorch's order.
    families = (family(a), family(b))
    if Family.QUANTIZED in families:
        raise _no_common_dtype(a, b, "quantized dtypes promote only with themselves")
    if Family.BITS in families:
        return None
    if Family.FLOAT8 in families:
        raise _no_common_dtype(a, b, "float8 dtypes promote only with themselves")
    if Family.BAREBONES_UNSIGNED in families:
        if is_floating(a):
            return a
        if is_floating(b):
            return b
        raise _no_common_dtype(a, b, "uint16, uint32, uint64 and uint1 to uint7 promote only with floating dtypes")
    odd = a if family(a) in (Family.SMALL_SIGNED, Family.FLOAT4) else b
    raise _no_common_dtype(a, b, f"PyTorch's table has no row for {dtype_name(odd)}")


def _no_common_dtype(a: torch.dtype, b: torch.dtype, why: str) -> PromotionError:
    """The error for two dtypes without a common dtype. `why` is a clause."""
    return PromotionError(
        f"{dtype_name(a)} and {dtype_name(b)} have no common dtype: {why}. Convert one of them first."
    )


def _promote_skip_undefined(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    """Promotes two dtypes. If one is undefined (None), the result is the other."""
    # Source: aten/src/ATen/native/TypeProperties.cpp, promote_skip_undefined (v2.13).
    if a is None:
        return b
    if b is None:
        return a
    return _promote(a, b)


# --- result_type: operands of any number of dimensions, and Python numbers


Number = bool | int | float | complex
"""A Python number as an operand. Its dtype is weak: a "wrapped number"."""

_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)


class Operand(NamedTuple):
    """A description of an operand, without a tensor: the properties that promotion and TensorIterator use.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes; `()` is 0-dim.
        strides: Its strides in elements; None means contiguous.
        device: Its device type. None: the device type of the inference.
        wrapped: Whether it is a Python number wrapped in a tensor.

    Example:
        >>> result_type(Operand(torch.int32, (3,)), Operand(torch.int64))
        torch.int32

    Source: aten/src/ATen/TensorIterator.h, OperandInfo (v2.13).
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    device: str | None = None
    wrapped: bool = False


def combine_categories(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Joins the dtype of a state with the dtype of the next weaker one. None: no operand has this state."""
    # The weaker dtype matters only if it is of a higher kind. If only one is a bits dtype, the result is None. A
    # complex dtype raises beside one without a complex counterpart (float8, float4).
    # Source: aten/src/ATen/native/TypeProperties.cpp, combine_categories (v2.13).
    if higher is not None and is_complex(higher):
        return higher
    if lower is not None and is_complex(lower):
        if higher is None or not is_floating(higher):
            return lower
        # The floating operand's precision stays: float16 with a complex number gives complex32.
        both = to_complex(higher)
        if both is None:
            raise _no_common_dtype(
                higher, lower, f"{dtype_name(higher)} would have to become complex, and no complex dtype has such parts"
            )
        return both
    if higher is not None and is_floating(higher):
        return higher
    if higher is torch.bool or (lower is not None and is_floating(lower)):
        return _promote_skip_undefined(higher, lower)
    return lower if higher is None else higher


def number_dtype(number: Number, default_dtype: torch.dtype | None = None) -> torch.dtype:
    """Returns the dtype that promotion uses for a Python number. An int is an int64, or a uint64 if only that fits."""
    # Source: aten/src/ATen/ScalarOps.h, scalar_to_tensor (v2.13); aten/src/ATen/native/TypeProperties.cpp,
    # update_result_type_state (v2.13).
    if isinstance(number, bool | torch.SymBool):
        return torch.bool
    if isinstance(number, int | torch.SymInt):
        if isinstance(number, torch.SymInt) or number in _INT64:
            return torch.int64
        if number in _UINT64:
            return torch.uint64
        raise PromotionError(f"the int {number} fits neither int64 nor uint64, so no tensor can hold it.")
    if isinstance(number, float | torch.SymFloat):
        return default_dtype or torch.get_default_dtype()
    if isinstance(number, complex):
        return default_complex(default_dtype or torch.get_default_dtype())
    raise PromotionError(f"an operand is a tensor, a Python number, a torch.dtype or an Operand, got {shown(number)}.")


def result_type(
    *operands: torch.Tensor | Number | torch.dtype | str | Operand, default_dtype: torch.dtype | None = None
) -> torch.dtype:
    """Returns the dtype that operands promote to. Unlike `torch.result_type`, it takes any number of operands.

    Args:
        operands: Tensors, Python numbers, dtypes or their names (each stands for a tensor with dimensions), Operands.
        default_dtype: The dtype of Python floats. None: the current default dtype.

    Returns:
        The common dtype.

    Raises:
        PromotionError: Two operands have no common dtype, or there are no operands.

    Example:
        >>> result_type(torch.ones(3, dtype=torch.int32), 5.5, default_dtype=torch.float32)
        torch.float32
        >>> result_type(torch.ones(3, dtype=torch.int8), torch.tensor(1), 3), result_type("int8", "float16")
        (torch.int8, torch.float16)

    Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
    """
    states: dict[str, torch.dtype | None] = {"dim": None, "zero": None, "wrapped": None}
    for operand in operands:
        dtype, state = _dtype_and_state(operand_of_name(operand), default_dtype)
        states[state] = _promote_skip_undefined(states[state], dtype)
    found = combine_categories(states["dim"], combine_categories(states["zero"], states["wrapped"]))
    if found is None:
        raise PromotionError(
            "the operands have no common dtype: there are no operands, or bits dtypes are combined with others. "
            "Bits dtypes promote only with themselves. Convert the operands first."
        )
    return found


def _dtype_and_state(
    operand: torch.Tensor | Number | torch.dtype | Operand, default_dtype: torch.dtype | None
) -> tuple[torch.dtype, str]:
    """The dtype that promotion uses for an operand, and the operand's state."""
    # A wrapped number counts as the default dtype, or its complex dtype, whatever its tensor's dtype is.
    # Source: aten/src/ATen/native/TypeProperties.cpp, update_result_type_state (v2.13).
    if isinstance(operand, torch.dtype):
        return operand, "dim"
    if not isinstance(operand, torch.Tensor | Operand):
        return number_dtype(operand, default_dtype), "wrapped"
    if isinstance(operand, torch.Tensor) or not operand.wrapped:
        return operand.dtype, "dim" if len(operand.shape) else "zero"
    kind_of_number = 1j if is_complex(operand.dtype) else 1.0 if is_floating(operand.dtype) else None
    dtype = operand.dtype if kind_of_number is None else number_dtype(kind_of_number, default_dtype)
    return dtype, "dim" if operand.shape else "wrapped"


# --- can_cast: which dtype an output may have


def can_cast(from_: torch.dtype | str, to: torch.dtype | str) -> bool:
    """Whether values of one dtype may be cast to another, which must not be of a lower kind.

    Args:
        from_: The dtype of the values, or its name.
        to: The dtype to cast to, or its name.

    Returns:
        Whether the cast is allowed: not from complex to real, from floating to integer, or from any other kind to bool.

    Raises:
        DtypeError: No dtype has the name.

    Example:
        >>> can_cast(torch.float64, torch.float16), can_cast("float32", "int64")
        (True, False)

    Source: c10/core/ScalarType.h, canCast (v2.13).
    """
    from_, to = parse_dtype(from_), parse_dtype(to)
    if is_complex(from_) and not is_complex(to):
        return False
    if is_floating(from_) and is_integral(to):
        return False
    return from_ is torch.bool or to is not torch.bool
