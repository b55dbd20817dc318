"""What `why` says about a number or a 0-dim tensor whose value may not fit the dtype that an op computes in."""

from __future__ import annotations

import math

import torch

from torch_promote.reference.derivation.operators import wrapped_value
from torch_promote.reference.dtypes import Kind, dtype_name, kind, to_real
from torch_promote.reference.promotion import Number

__all__ = ["overflow_of_number", "overflow_of_tensor"]

#: The dtypes in which PyTorch's kernels compute in float32.
_ROUNDED = (torch.float16, torch.bfloat16)
#: The ops whose kernels for these dtypes read numbers and 0-dim CPU tensors in float32, too.
_READ_IN_FLOAT32 = ("mul", "true_divide", "div")
#: The ops that convert a number or a 0-dim tensor to the dtype that they compute in, and return inf for inf.
_CONVERT = ("add", "sub", "rsub")
_FINITE = {
    torch.float16: 65504.0,
    torch.bfloat16: float(2**128 - 2**120),
    torch.float32: float(2**128 - 2**104),
    torch.float64: math.inf,
}
_CLAMPS = ("clamp", "clamp_min", "clamp_max", "clip")
#: The least number that rounds to infinity.
_TO_INFINITY = {torch.float16: 65520.0, torch.bfloat16: float(2**128 - 2**119), torch.float32: float(2**128 - 2**103)}


def overflow_of_number(number: Number, computed: torch.dtype, op: str = "", compares: bool = False) -> str:
    """Returns what happens to a number that does not fit the dtype that an op computes in, with a leading space.

    Args:
        number: The number.
        computed: The dtype.
        op: The op's name, without a namespace and an overload: "mul".
        compares: Whether the op compares.

    Returns:
        One or two sentences; "" if the number fits.

    Example:
        >>> overflow_of_number(1000, torch.uint8)
        ' 1000 does not fit uint8 and wraps to 232.'
        >>> overflow_of_number(1e39, torch.float32)
        ' 1e+39 does not fit float32, whose largest value is 3.40282e+38, and becomes inf.'
        >>> overflow_of_number(1e4, torch.float16)
        ''

    Source: aten/src/ATen/native/cpu/BinaryOpsKernel.cpp, binary_kernel_reduced_floating_vec_opmath_support (v2.13).
    """
    name = dtype_name(computed)
    wrapped = wrapped_value(number, computed)
    if isinstance(number, int) and wrapped != number and op in _CLAMPS:  # others than these raise
        return f" {number} does not fit {name}, so it bounds nothing."
    if isinstance(number, int) and wrapped != number:
        return f" {number} does not fit {name} and wraps to {wrapped}."
    real = to_real(computed)
    limit = _TO_INFINITY.get(real)
    if limit is None or kind(computed) < Kind.FLOATING:
        return ""
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    if not any(math.isfinite(part) and abs(part) >= limit for part in parts):
        return ""
    largest = f"{_FINITE[real]:g}" if real is not torch.float16 else "65504"
    if compares:
        return f" {number} does not fit {name}, whose largest value is {largest}, and is compared as inf."
    beyond_float32 = any(abs(part) >= _TO_INFINITY[torch.float32] for part in parts)
    if computed in _ROUNDED and not beyond_float32 and op in _READ_IN_FLOAT32:
        return (
            f" {number} does not fit {name}, whose largest value is {largest}. PyTorch computes with the number in "
            f"float32 and rounds the result to {name}: a result beyond {largest} is inf."
        )
    becomes = "may become" if computed in _ROUNDED and not beyond_float32 and op not in _CONVERT else "becomes"
    return f" {number} does not fit {name}, whose largest value is {largest}, and {becomes} inf."


def overflow_of_tensor(
    name: str, dtype: torch.dtype, computed: torch.dtype, op: str = "", compares: bool = False
) -> str:
    """Returns what may happen to the value of a 0-dim tensor in the dtype that an op computes in, with a leading space.

    Args:
        name: The tensor as the expression spells it.
        dtype: Its dtype.
        computed: The dtype that the op computes in.
        op: The op's name, without a namespace and an overload.
        compares: Whether the op compares.

    Returns:
        A sentence; "" if each value fits.

    Example:
        >>> overflow_of_tensor("int64[]", torch.int64, torch.int8)
        ' A value of int64[] that does not fit int8 wraps around.'
        >>> overflow_of_tensor("int64[]", torch.int64, torch.float16)
        ' A value of int64[] beyond 65504 does not fit float16, and may become inf.'

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_types (v2.13).
    """
    target = dtype_name(computed)
    if kind(dtype) is Kind.INTEGRAL and kind(computed) is Kind.INTEGRAL:
        own, theirs = torch.iinfo(dtype), torch.iinfo(computed)
        if own.min >= theirs.min and own.max <= theirs.max:
            return ""
        return f" A value of {name} that does not fit {target} wraps around."
    real = to_real(computed)
    if real not in _TO_INFINITY or kind(dtype) < Kind.INTEGRAL:
        return ""
    source = to_real(dtype)
    largest = torch.iinfo(dtype).max if kind(dtype) is Kind.INTEGRAL else _FINITE.get(source, 0.0)
    if largest < 2 * _TO_INFINITY[real] or source is real:  # float32's values exceed bfloat16's by less than 1%
        return ""
    limit = "65504" if real is torch.float16 else f"{_FINITE[real]:g}"
    if compares:
        return ""
    text = f" A value of {name} beyond {limit} does not fit {target}"
    if computed in _ROUNDED and op in _READ_IN_FLOAT32 and largest <= _FINITE[torch.float32]:
        return f"{text}. PyTorch may compute with it in float32: then only a result beyond {limit} is inf."
    return f"{text}, and {'becomes' if op in _CONVERT else 'may become'} inf."
