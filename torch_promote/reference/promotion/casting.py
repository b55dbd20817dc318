"""`can_cast`: PyTorch's casting rule for `out=` and in-place ops, and the five of NumPy."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

import torch

from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.reference.dtypes import Kind, dtype_name, is_complex, is_floating, is_integral, kind, to_real

__all__ = ["Casting", "can_cast"]

Casting = Literal["torch", "no", "equiv", "safe", "same_kind", "unsafe"]
"""PyTorch's rule, or one of NumPy's."""


class _FloatFormat(NamedTuple):
    precision: int  # bits of the significand, including the hidden bit
    lowest: int  # the exponent of the smallest positive value, including subnormals
    highest: int  # the exponent of the largest value
    signed: bool = True


#: The format of each floating dtype. One represents all values of another if no column is worse.
_FLOATS = {
    "bfloat16": _FloatFormat(8, -133, 127),
    "float16": _FloatFormat(11, -24, 15),
    "float32": _FloatFormat(24, -149, 127),
    "float64": _FloatFormat(53, -1074, 1023),
    "float8_e4m3fn": _FloatFormat(4, -9, 8),
    "float8_e4m3fnuz": _FloatFormat(4, -10, 7),
    "float8_e5m2": _FloatFormat(3, -16, 15),
    "float8_e5m2fnuz": _FloatFormat(3, -17, 15),
    "float8_e8m0fnu": _FloatFormat(1, -127, 127, signed=False),
}


def can_cast(from_: torch.dtype | str, to: torch.dtype | str, casting: Casting = "torch") -> bool:
    """Whether values of one dtype may be cast to another.

    Args:
        from_: The dtype of the values, or its name.
        to: The dtype to cast to, or its name.
        casting: "torch" forbids casts to a lower kind: complex to real, floating to integer, any other kind to bool.
            The others are those of numpy.can_cast: "no" and "equiv" allow only the same dtype, "safe" casts that
            preserve every value, "same_kind" also casts that narrow within a kind, "unsafe" all casts. As in NumPy,
            casting int64 to float64 counts as safe.

    Returns:
        Whether the cast is allowed.

    Raises:
        ValueError: `casting` is unknown.
        DtypeError: No dtype has the name.

    Example:
        >>> can_cast(torch.float64, torch.float16), can_cast("float32", "int64")
        (True, False)
        >>> can_cast(torch.float64, torch.float16, casting="safe")
        False

    Source: c10/core/ScalarType.h, canCast (v2.13).
    """
    from_, to = parse_dtype(from_), parse_dtype(to)
    if casting == "torch":
        if is_complex(from_) and not is_complex(to):
            return False
        if is_floating(from_) and is_integral(to):
            return False
        return from_ is torch.bool or to is not torch.bool
    if casting == "unsafe":
        return True
    if casting in ("no", "equiv"):  # these two differ in byte order, which a torch.dtype does not have
        return from_ is to
    if casting == "safe":
        return _is_safe(from_, to)
    if casting == "same_kind":
        return _is_safe(from_, to) or _rank(from_) <= _rank(to)
    raise ValueError(f"no casting rule is called {casting!r}. Legal: {', '.join(get_args(Casting))}.")


def _rank(dtype: torch.dtype) -> float:
    """NumPy's order of kinds, with unsigned integers below signed ones. Opaque dtypes do not compare."""
    if kind(dtype) is Kind.OPAQUE:
        return float("nan")
    return kind(dtype) + (0.5 if kind(dtype) is Kind.INTEGRAL and not dtype_name(dtype).startswith("uint") else 0.0)


def _is_safe(from_: torch.dtype, to: torch.dtype) -> bool:
    if from_ is to:
        return True
    if Kind.OPAQUE in (kind(from_), kind(to)) or to is torch.bool or kind(from_) > kind(to):
        return False
    if from_ is torch.bool:
        return True
    if kind(to) is Kind.INTEGRAL:
        return _integer_fits(from_, to)
    held, holder = _FLOATS.get(dtype_name(to_real(from_))), _FLOATS.get(dtype_name(to_real(to)))
    if holder is None:  # float4 packs two values into one element, so no other dtype casts to it
        return False
    if kind(from_) is Kind.INTEGRAL:
        bits, signed = _integer_format(from_)
        value_bits = bits - signed
        exact = value_bits <= holder.precision and value_bits <= holder.highest and holder.signed
        return exact or (bits == 64 and dtype_name(to_real(to)) == "float64")
    return held is not None and (
        held.precision <= holder.precision
        and held.lowest >= holder.lowest
        and held.highest <= holder.highest
        and held.signed <= holder.signed
    )


def _integer_format(dtype: torch.dtype) -> tuple[int, bool]:
    """The width in bits, and whether there is a sign bit."""
    width = re.search(r"\d+$", dtype_name(dtype))
    assert width is not None, dtype
    return int(width.group()), not dtype_name(dtype).startswith("uint")


def _integer_fits(from_: torch.dtype, to: torch.dtype) -> bool:
    (from_bits, from_signed), (to_bits, to_signed) = _integer_format(from_), _integer_format(to)
    if from_signed and not to_signed:
        return False
    return from_bits - from_signed <= to_bits - to_signed
