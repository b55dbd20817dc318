"""Names of dtypes, wherever a dtype may be written as a str."""

from __future__ import annotations

from typing import Any

import torch

from torch_promote.errors import DtypeError, did_you_mean, shown

#: Short names besides those of PyTorch ("half", "float", "double"). As a policy, "fp16" and "fp32" mean something else:
#: `torch_promote.policy.overrides.parse_policy` tries the names of policies first.
_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

#: The end of errors about dtypes that need a scale.
FLOAT8_REMEDY = "Float8 with scales is a policy of linear: overrides={'linear': 'float8'}."

#: The short names in which docs/promotion.md writes its tables. Older PyTorch versions have no `bc` (torch.bcomplex32).
TYPECODE_NAMES = {
    "b1": "bool",
    "u1": "uint8",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "bf": "bfloat16",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c2": "complex32",
    "c4": "complex64",
    "c8": "complex128",
    "bc": "bcomplex32",
}

#: What dtypes are called elsewhere.
_ELSEWHERE = {**TYPECODE_NAMES, "bfloat": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def close_dtype(name: str) -> str:
    """Returns the name of the dtype that a name means elsewhere; "" if it means none."""
    return _ELSEWHERE.get(name.lower().removeprefix("torch."), "")


def dtype_of_name(name: str) -> torch.dtype | None:
    """Returns the dtype with a name of PyTorch, or one of "bf16", "fp16", "fp32" and "fp64"; None if there is none."""
    short = name.removeprefix("torch.")
    found = _SHORT.get(short) or vars(torch).get(short)
    return found if isinstance(found, torch.dtype) else None


def operand_of_name(operand: Any) -> Any:
    """Returns the dtype that an operand names. Any other operand is returned as it is."""
    return (dtype_of_name(operand) or operand) if isinstance(operand, str) else operand


def why_not_cast(dtype: torch.dtype) -> str | None:
    """Returns why autocast does not cast to a dtype, or None if it does."""
    if not dtype.is_floating_point:
        return f"{dtype} is not a floating dtype"
    if dtype.itemsize < 2:  # float8, float4
        return (
            f"{dtype} needs a scale for each tensor, and autocast casts without one, so values out of its range would "
            f"be lost"
        )
    return None


def parse_dtype(value: object, what: str = "dtype") -> torch.dtype:
    """Returns a dtype that is given as a dtype or by its name. `what` starts the error text."""
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise DtypeError(
            f"{what} is a torch.dtype or the name of one, such as torch.bfloat16 or 'bfloat16'; got {shown(value)} of "
            f"type {type(value).__name__}."
        )
    found = dtype_of_name(value)
    if found is None and value.lower().startswith(("float8", "fp8", "mxfp8")):
        raise DtypeError(f"{what} {value!r} is not the name of a dtype that autocast casts to. {FLOAT8_REMEDY}")
    if found is None:
        meant = close_dtype(value)
        known = [*_SHORT, *(name for name, one in vars(torch).items() if isinstance(one, torch.dtype))]
        close = f" Closest: {meant}." if meant else did_you_mean(value.lower(), known, 1)
        raise DtypeError(
            f"{what} {value!r} is not the name of a dtype.{close} Names are those of "
            f"PyTorch, such as 'bfloat16' or 'torch.bfloat16', and {', '.join(map(repr, _SHORT))}."
        )
    return found
