"""The dtypes: family, kind, short typecode, complex and real counterpart of each.

`torch.dtype` objects serve only as names; none of their attributes is used. `ALL_DTYPES` contains the dtypes of the
running PyTorch.
"""

from __future__ import annotations

import enum
import re

import torch

from torch_promote.policy.dtype_names import TYPECODE_NAMES, dtype_of_name


class Kind(enum.IntEnum):
    """The kinds of dtypes, ranked: an operand of a higher kind takes precedence over one of a lower kind."""

    BOOL = 0
    INTEGRAL = 1
    FLOATING = 2
    COMPLEX = 3
    OPAQUE = 4  # bits and quantized dtypes, which promotion has no rule for


class Family(enum.Enum):
    """The families of dtypes that promotion distinguishes."""

    BOOL = "bool"
    INTEGER = "integer"
    BAREBONES_UNSIGNED = "barebones unsigned"
    SMALL_SIGNED = "small signed"
    FLOAT = "float"
    FLOAT8 = "float8"
    FLOAT4 = "float4"
    COMPLEX = "complex"
    BITS = "bits"
    QUANTIZED = "quantized"


#: Patterns of names, with their family and kind. The first pattern that matches the whole name applies.
_FAMILIES = (
    (r"bool", Family.BOOL, Kind.BOOL),
    (r"uint8|int(8|16|32|64)", Family.INTEGER, Kind.INTEGRAL),
    (r"uint([1-7]|16|32|64)", Family.BAREBONES_UNSIGNED, Kind.INTEGRAL),
    (r"int[1-7]", Family.SMALL_SIGNED, Kind.INTEGRAL),
    (r"bfloat16|float(16|32|64)", Family.FLOAT, Kind.FLOATING),
    (r"float8_\w+", Family.FLOAT8, Kind.FLOATING),
    (r"float4_\w+", Family.FLOAT4, Kind.FLOATING),
    (r"b?complex\d+", Family.COMPLEX, Kind.COMPLEX),
    (r"bits\w+", Family.BITS, Kind.OPAQUE),
    (r"qu?int\w+", Family.QUANTIZED, Kind.OPAQUE),
)

#: The dtypes in which autocast computes.
LOWER_DTYPES = (torch.bfloat16, torch.float16)
#: Pairs of a floating dtype and the complex dtype whose parts have it.
_PARTS = (
    ("bfloat16", "bcomplex32"),
    ("float16", "complex32"),
    ("float32", "complex64"),
    ("float64", "complex128"),
)


def _named(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without its module."""
    # Source: c10/core/ScalarType.cpp, getDtypeNames (v2.13).
    return str(dtype).removeprefix("torch.")


#: Every dtype of the running PyTorch, sorted by name.
ALL_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)

#: Typecode to dtype, for the dtypes of the running PyTorch.
TYPECODES: dict[str, torch.dtype] = {
    code: dtype for code, name in TYPECODE_NAMES.items() for dtype in [_named(name)] if dtype is not None
}

_CODE_OF = {dtype: code for code, dtype in TYPECODES.items()}


def named_dtype(name: str) -> torch.dtype | None:
    """Returns the dtype of a typecode such as "f2", or of a name as in `dtype_of_name`; None if there is none."""
    return TYPECODES.get(name) or dtype_of_name(name)


def _classify(dtype: torch.dtype) -> tuple[Family, Kind]:
    for pattern, the_family, the_kind in _FAMILIES:
        if re.fullmatch(pattern, dtype_name(dtype)):
            return the_family, the_kind
    raise LookupError(f"{dtype} does not belong to a known family of dtypes. Add a pattern for it to _FAMILIES.")


_CLASS = {dtype: _classify(dtype) for dtype in ALL_DTYPES}
_INTEGRAL = frozenset(
    d for d, (f, _) in _CLASS.items() if f is Family.INTEGER or dtype_name(d) in ("uint16", "uint32", "uint64")
)
_FLOATING = frozenset(d for d, (_, k) in _CLASS.items() if k is Kind.FLOATING)
_COMPLEX = frozenset(d for d, (_, k) in _CLASS.items() if k is Kind.COMPLEX)
_TO_REAL = {c: r for r, c in (map(_named, parts) for parts in _PARTS) if r is not None and c is not None}
_TO_COMPLEX = {r: c for c, r in _TO_REAL.items()} | {c: c for c in _COMPLEX}
# Without bcomplex32, PyTorch maps bfloat16 to the complex dtype with the same range.
_TO_COMPLEX.setdefault(torch.bfloat16, torch.complex64)


def typecode(dtype: torch.dtype) -> str | None:
    """Returns a dtype's typecode, or None if the promotion table has no row for it."""
    return _CODE_OF.get(dtype)


def family(dtype: torch.dtype) -> Family:
    """Returns a dtype's family."""
    # Source: torch/headeronly/core/ScalarType.h, isQIntType (v2.13); c10/core/ScalarType.h, isBitsType (v2.13);
    # c10/core/ScalarType.h, isFloat8Type (v2.13); c10/core/ScalarType.h, isBarebonesUnsignedType (v2.13).
    return _CLASS[dtype][0]


def kind(dtype: torch.dtype) -> Kind:
    """Returns a dtype's kind."""
    return _CLASS[dtype][1]


def is_floating(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating. float8 and float4 dtypes are, complex dtypes are not."""
    # Source: c10/core/ScalarType.h, isFloatingType (v2.13).
    return dtype in _FLOATING


def is_complex(dtype: torch.dtype) -> bool:
    """Whether a dtype is complex."""
    # Source: c10/core/ScalarType.h, isComplexType (v2.13).
    return dtype in _COMPLEX


def is_integral(dtype: torch.dtype, include_bool: bool = False) -> bool:
    """Whether a dtype is one of the eight integer dtypes with whole bytes, or bool if `include_bool` is set."""
    # As in PyTorch, int1 to int7 and uint1 to uint7 are not integral.
    # Source: c10/core/ScalarType.h, isIntegralType (v2.13).
    return dtype in _INTEGRAL or (include_bool and dtype is torch.bool)


def to_complex(dtype: torch.dtype) -> torch.dtype | None:
    """Returns the complex dtype whose parts have a floating dtype; itself if complex; None if PyTorch has none."""
    # Source: c10/core/ScalarType.h, toComplexType (v2.13).
    return _TO_COMPLEX.get(dtype)


def to_real(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a complex dtype's parts. Any other dtype is returned unchanged."""
    # Source: c10/core/ScalarType.h, toRealValueType (v2.13).
    return _TO_REAL.get(dtype, dtype)


def default_complex(default_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of complex Python numbers under a default dtype."""
    # Source: c10/core/DefaultDtype.cpp, set_default_dtype (v2.13).
    return {torch.float16: torch.complex32, torch.float64: torch.complex128}.get(default_dtype, torch.complex64)
