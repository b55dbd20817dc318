"""The rules of elementwise ops, by the names that the `.rules` files use: TensorIterator under one configuration each.

A rule is a function of the call, the names of its operands (all tensors of the call where none are named) and `out`,
the tensor that an out= op writes to. It returns dtype, shape and strides together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from torch_promote.reference.dtypes import is_complex, is_floating, is_integral, to_complex, to_real
from torch_promote.reference.memory_format import contiguous_strides
from torch_promote.reference.promotion import Operand, result_type
from torch_promote.reference.rules.call import Call, TensorLike, described, strides_of
from torch_promote.reference.strides import Sizes, temporary_strides
from torch_promote.reference.tensor_iterator import PRESETS, ElementwiseResult, infer_elementwise, infer_where

__all__ = ["ELEMENTWISE_RULES", "ElementwiseRule"]

#: The result of an elementwise op.
ElementwiseRule = Callable[..., ElementwiseResult]


def _preset(preset: str, call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    operands = tuple(call.operands(*names))
    return infer_elementwise(*operands, preset=preset, out=out, default_dtype=call.default_dtype)


def threshold(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """Promotes as binary ops do; what it writes to may overlap. Source: Activation.cpp, threshold (v2.13)."""
    config = replace(PRESETS["binary"], check_mem_overlap=False)
    return infer_elementwise(*call.operands(*names), preset=config, out=out, default_dtype=call.default_dtype)


def modulus(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """The modulus of complex numbers is real, and lies like its input. Source: UnaryOps.cpp, abs (v2.13)."""
    tensor = call.tensor()
    if is_complex(tensor.dtype) and out is None:
        shape = tuple(tensor.shape)
        return ElementwiseResult(
            to_real(tensor.dtype), shape, temporary_strides(shape, strides_of(tensor)), tensor.dtype
        )
    return _copied_parts("unary", call, out)


def angle(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """The angle of complex numbers is real and contiguous; integers give floating angles.

    Source: aten/src/ATen/native/UnaryOps.cpp, angle (v2.13).
    """
    return _copied_parts("unary_float", call, out)


def _copied_parts(preset: str, call: Call, out: TensorLike | None) -> ElementwiseResult:
    """Of complex numbers, PyTorch computes complex ones first and copies their real parts.

    Source: UnaryOps.cpp, unary_op_impl_with_complex_to_float_out (v2.13).
    """
    tensor = call.tensor()
    if not is_complex(tensor.dtype) or (out is not None and is_complex(out.dtype)):
        return _preset(preset, call, out=out)
    return _resized(to_real(tensor.dtype), tuple(tensor.shape), out, tensor.dtype)


def _resized(dtype: torch.dtype, shape: Sizes, out: TensorLike | None, computed_in: torch.dtype) -> ElementwiseResult:
    """A contiguous result; `out` keeps its strides if it has the shape already."""
    if out is None:
        return ElementwiseResult(dtype, shape, contiguous_strides(shape), computed_in)
    strides = strides_of(out) if tuple(out.shape) == shape else contiguous_strides(shape)
    return ElementwiseResult(out.dtype, shape, strides, computed_in)


def with_numbers(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The numbers have a say in the dtype, and are no operands of the iteration.

    Source: aten/src/ATen/native/Pow.cpp, pow.Tensor_Scalar (v2.13).
    """
    dtype = result_type(*call.operands(*names), default_dtype=call.default_dtype)
    tensor = call.tensor()
    strides = strides_of(tensor)
    if tensor.dtype is not dtype:
        strides = temporary_strides(tuple(tensor.shape), strides)
    return infer_elementwise(described(tensor)._replace(dtype=dtype, strides=strides), preset="ternary", out=out)


def power_of_number(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """A number to the power of a tensor is contiguous. Source: aten/src/ATen/native/Pow.cpp, pow.Scalar (v2.13)."""
    dtype = result_type(*call.operands("self", "exponent"), default_dtype=call.default_dtype)
    return _resized(dtype, tuple(call.tensor().shape), out, dtype)


def product(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The operands multiplied one after the other."""
    first, *rest = call.operands(*names)
    for factor in rest:
        result = infer_elementwise(first, factor, default_dtype=call.default_dtype)
        first = Operand(result.dtype, result.shape, result.strides)
    return result


def quotient(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """A rounding mode keeps integers. Source: aten/src/ATen/native/BinaryOps.cpp, div.Tensor_mode (v2.13)."""
    return _preset("binary_float" if call["rounding_mode"] is None else "binary", call, *names, out=out)


def where(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The condition has a say in the shape and strides, not in the dtype."""
    result = infer_where(call["condition"], call["self"], call["other"], call.default_dtype)
    if out is None:
        return result
    config = replace(PRESETS["nullary"], resize_outputs=True)
    return infer_elementwise(*call.operands("condition", "self", "other"), preset=config, out=out)


def complex_of(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """Two floating tensors of one dtype make a complex one.

    Source: aten/src/ATen/native/TensorFactories.cpp, complex (v2.13).
    """
    operands = tuple(call.operands(*names))
    config = replace(PRESETS["unary"], static_dtype=to_complex(call.tensor().dtype), check_all_same_dtype=False)
    return infer_elementwise(*operands, preset=config, out=out)


def times_power(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """A tensor times a power of two. Whole powers of a floating tensor have a kernel; the others are a product.

    The two is a number beside float32 and integers, and otherwise a 0-dim tensor of the dtype beside it.

    Source: aten/src/ATen/native/BinaryOps.cpp, ldexp (v2.13).
    """
    tensor, exponent = call.tensor("self"), call.tensor("other")
    if is_floating(tensor.dtype) and is_integral(exponent.dtype, include_bool=True):
        return into_like(call, "self", "self", "other", out=out)
    if tensor.dtype is torch.float32 or is_integral(
        tensor.dtype, include_bool=True
    ):  # a number to the power of a tensor
        power = _resized(
            result_type(2.0, exponent, default_dtype=call.default_dtype), tuple(exponent.shape), None, tensor.dtype
        )
    else:
        power = infer_elementwise(Operand(tensor.dtype), exponent, default_dtype=call.default_dtype)
    factor = Operand(power.dtype, power.shape, power.strides)
    return infer_elementwise(tensor, factor, out=out, default_dtype=call.default_dtype)


def like(call: Call, name: str = "self", *, out: TensorLike | None = None) -> ElementwiseResult:
    """Everything as the tensor has it, if it is dense. Source: TensorFactories.cpp, empty_like (v2.13)."""
    return _like(call.tensor(name), call.tensor(name).dtype, out)


def like_float(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """As `like`, with the default dtype in place of integers. Source: UnaryOps.cpp, rad2deg (v2.13)."""
    dtype = call.tensor().dtype
    return _like(call.tensor(), call.default_dtype if is_integral(dtype, include_bool=True) else dtype, out)


def _like(tensor: TensorLike, dtype: torch.dtype, out: TensorLike | None) -> ElementwiseResult:
    shape = tuple(tensor.shape)
    if out is not None and is_integral(dtype, include_bool=True):
        return _resized(dtype, shape, out, dtype)
    if out is not None:
        return infer_elementwise(described(tensor)._replace(dtype=out.dtype), preset="unary", out=out)
    return ElementwiseResult(dtype, shape, temporary_strides(shape, strides_of(tensor)), dtype)


def into_like(call: Call, name: str, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The operands, written into an empty_like of the first name's tensor."""
    tensor = call.tensor(name)
    made = _like(tensor, tensor.dtype, None)
    config = replace(PRESETS["unary"], check_all_same_dtype=False)
    written = Operand(made.dtype, made.shape, made.strides) if out is None else out
    return infer_elementwise(*call.operands(*names), preset=config, out=written)


def is_infinite(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """Integers are never infinite; other tensors' absolute values are compared with infinity, part by part.

    Source: aten/src/ATen/native/TensorCompare.cpp, isinf (v2.13).
    """
    tensor = described(call.tensor())
    if is_integral(tensor.dtype, include_bool=True):
        return _like(tensor, torch.bool, out)
    if not is_complex(tensor.dtype):
        return _equals_infinity(tensor, out)
    strides = tuple(2 * stride for stride in strides_of(tensor))
    # The answer for the imaginary parts is joined to this one in place.
    return _equals_infinity(tensor._replace(dtype=to_real(tensor.dtype), strides=strides), out)


def _equals_infinity(tensor: Operand, out: TensorLike | None) -> ElementwiseResult:
    absolute = infer_elementwise(tensor, preset="unary")
    return infer_elementwise(tensor._replace(strides=absolute.strides), math.inf, preset="comparison", out=out)


def in_dtype_of(call: Call, name: str, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The first name says the dtype of the result, the others are the operands."""
    config = replace(PRESETS["binary"], static_dtype=call.tensor(name).dtype)
    return infer_elementwise(*call.operands(*names), preset=config, out=out)


ELEMENTWISE_RULES: dict[str, ElementwiseRule] = {
    preset: functools.partial(_preset, preset)
    for preset in ("unary", "unary_float", "binary", "binary_float", "comparison", "ternary")
} | {
    rule.__name__: rule
    for rule in (
        threshold,
        modulus,
        angle,
        like,
        like_float,
        into_like,
        is_infinite,
        in_dtype_of,
        with_numbers,
        power_of_number,
        product,
        quotient,
        where,
        complex_of,
        times_power,
    )
}
