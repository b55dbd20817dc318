"""The rules for elementwise ops, by their names in the `.rules` files. Each is a configuration of TensorIterator.

A rule is a function of the call, the names of its operands (default: all tensors) and `out`, the tensor that an out= op
writes to. It returns dtype, shape and strides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from torch_promote.reference.dtypes import is_complex, is_floating, is_integral, to_complex, to_real
from torch_promote.reference.ops.call import Call, TensorLike, described, strides_of
from torch_promote.reference.promotion import Operand, result_type
from torch_promote.reference.strides import Sizes, contiguous_strides, temporary_strides
from torch_promote.reference.tensor_iterator import PRESETS, ElementwiseResult, infer_elementwise, infer_where

#: Returns the result of an elementwise op.
ElementwiseRule = Callable[..., ElementwiseResult]

#: The rules by name.
ELEMENTWISE_RULES: dict[str, ElementwiseRule] = {}

_Rule = TypeVar("_Rule", bound=ElementwiseRule)


def _rule(function: _Rule) -> _Rule:
    """Adds a function to the rules, under its name."""
    ELEMENTWISE_RULES[function.__name__] = function
    return function


def _with_preset(preset: str, call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """A TensorIterator with one of the `PRESETS`."""
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::build (v2.13).
    operands = tuple(call.operands(*names))
    return infer_elementwise(*operands, preset=preset, out=out, default_dtype=call.default_dtype)


for _preset in ("unary", "unary_float", "binary", "binary_float", "comparison", "ternary"):
    ELEMENTWISE_RULES[_preset] = functools.partial(_with_preset, _preset)


@_rule
def threshold(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """Promotes like binary ops, but allows an output with overlaps."""
    # Source: aten/src/ATen/native/Activation.cpp, TORCH_META_FUNC(threshold) (v2.13).
    config = replace(PRESETS["binary"], check_mem_overlap=False)
    return infer_elementwise(*call.operands(*names), preset=config, out=out, default_dtype=call.default_dtype)


@_rule
def product(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The operands are multiplied one after another."""
    # Source: aten/src/ATen/native/Dropout.cpp, native_dropout_backward (v2.13).
    first, *rest = call.operands(*names)
    device = described(call.tensor()).device
    for factor in rest:
        result = infer_elementwise(first, factor, default_dtype=call.default_dtype)
        first = Operand(result.dtype, result.shape, result.strides, device)
    return result


@_rule
def quotient(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """With a rounding mode, integers stay integers."""
    # Source: aten/src/ATen/native/BinaryOps.cpp, TORCH_META_FUNC2(div, Tensor_mode) (v2.13).
    return _with_preset("binary_float" if call["rounding_mode"] is None else "binary", call, *names, out=out)


@_rule
def where(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The condition affects the shape and strides, not the dtype."""
    # Source: aten/src/ATen/native/TensorCompare.cpp, where_self_out (v2.13).
    result = infer_where(call["condition"], call["self"], call["other"], call.default_dtype)
    if out is None:
        return result
    config = replace(PRESETS["nullary"], resize_outputs=True)
    return infer_elementwise(*call.operands("condition", "self", "other"), preset=config, out=out)


@_rule
def complex_of(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """Two floating tensors of one dtype give a complex tensor."""
    # Source: aten/src/ATen/native/TensorFactories.cpp, complex (v2.13).
    operands = tuple(call.operands(*names))
    config = replace(PRESETS["unary"], static_dtype=to_complex(call.tensor().dtype), check_all_same_dtype=False)
    return infer_elementwise(*operands, preset=config, out=out)


@_rule
def in_dtype_of(call: Call, name: str, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The first name gives the result's dtype, the others are the operands."""
    # Source: aten/src/ATen/native/Activation.cpp, mish_backward (v2.13).
    config = replace(PRESETS["binary"], static_dtype=call.tensor(name).dtype)
    return infer_elementwise(*call.operands(*names), preset=config, out=out)


@_rule
def modulus(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """The modulus of complex numbers is real, and keeps the input's strides."""
    # Source: aten/src/ATen/native/UnaryOps.cpp, abs (v2.13).
    tensor = call.tensor()
    if is_complex(tensor.dtype) and out is None:
        shape = tuple(tensor.shape)
        return ElementwiseResult(
            to_real(tensor.dtype), shape, temporary_strides(shape, strides_of(tensor)), tensor.dtype
        )
    return _copied_parts("unary", call, out)


@_rule
def angle(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """The angle of complex numbers is real and contiguous. Angles of integers are floating."""
    # Source: aten/src/ATen/native/UnaryOps.cpp, angle (v2.13).
    return _copied_parts("unary_float", call, out)


def _copied_parts(preset: str, call: Call, out: TensorLike | None) -> ElementwiseResult:
    """For complex inputs, PyTorch computes complex results and copies their real parts."""
    # Source: aten/src/ATen/native/UnaryOps.cpp, unary_op_impl_with_complex_to_float_out (v2.13).
    tensor = call.tensor()
    if not is_complex(tensor.dtype) or (out is not None and is_complex(out.dtype)):
        return _with_preset(preset, call, out=out)
    return _resized(to_real(tensor.dtype), tuple(tensor.shape), out, tensor.dtype)


def _resized(dtype: torch.dtype, shape: Sizes, out: TensorLike | None, computed_in: torch.dtype) -> ElementwiseResult:
    """A contiguous result. `out` keeps its strides if it already has the shape."""
    if out is None:
        return ElementwiseResult(dtype, shape, contiguous_strides(shape), computed_in)
    strides = strides_of(out) if tuple(out.shape) == shape else contiguous_strides(shape)
    return ElementwiseResult(out.dtype, shape, strides, computed_in)


@_rule
def with_numbers(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The numbers affect the dtype, but are not operands of the iteration."""
    # Source: aten/src/ATen/native/Pow.cpp, TORCH_META_FUNC2(pow, Tensor_Scalar) (v2.13).
    dtype = result_type(*call.operands(*names), default_dtype=call.default_dtype)
    tensor = call.tensor()
    strides = strides_of(tensor)
    if tensor.dtype is not dtype:
        strides = temporary_strides(tuple(tensor.shape), strides)
    return infer_elementwise(described(tensor)._replace(dtype=dtype, strides=strides), preset="ternary", out=out)


@_rule
def power_of_number(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """A number to the power of a tensor: the result is contiguous."""
    # Source: aten/src/ATen/native/Pow.cpp, TORCH_META_FUNC2(pow, Scalar) (v2.13).
    dtype = result_type(*call.operands("self", "exponent"), default_dtype=call.default_dtype)
    return _resized(dtype, tuple(call.tensor().shape), out, dtype)


@_rule
def times_power(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """A tensor times a power of two: a kernel for integer exponents of floating tensors, otherwise a product."""
    # The base 2 is a Python number for float32 and integer tensors, and otherwise a 0-dim tensor of the tensor's dtype.
    # Source: aten/src/ATen/native/BinaryOps.cpp, ldexp (v2.13).
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
    factor = Operand(power.dtype, power.shape, power.strides, described(exponent).device)
    return infer_elementwise(tensor, factor, out=out, default_dtype=call.default_dtype)


@_rule
def like(call: Call, name: str = "self", *, out: TensorLike | None = None) -> ElementwiseResult:
    """The tensor's dtype and shape, and its strides if it is dense."""
    # Source: aten/src/ATen/native/TensorFactories.cpp, empty_like (v2.13).
    return _like(call.tensor(name), call.tensor(name).dtype, out)


@_rule
def like_float(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """Like `like`, but the default dtype for integers."""
    # Source: aten/src/ATen/native/UnaryOps.cpp, rad2deg (v2.13).
    dtype = call.tensor().dtype
    return _like(call.tensor(), call.default_dtype if is_integral(dtype, include_bool=True) else dtype, out)


def _like(tensor: TensorLike, dtype: torch.dtype, out: TensorLike | None) -> ElementwiseResult:
    shape = tuple(tensor.shape)
    if out is not None and is_integral(dtype, include_bool=True):
        return _resized(dtype, shape, out, dtype)
    if out is not None:
        return infer_elementwise(described(tensor)._replace(dtype=out.dtype), preset="unary", out=out)
    return ElementwiseResult(dtype, shape, temporary_strides(shape, strides_of(tensor)), dtype)


@_rule
def into_like(call: Call, name: str, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The result is written into an `empty_like` of the first named tensor."""
    # Source: aten/src/ATen/native/Activation.cpp, log_sigmoid_backward_cpu (v2.13).
    tensor = call.tensor(name)
    made = _like(tensor, tensor.dtype, None)
    config = replace(PRESETS["unary"], check_all_same_dtype=False)
    written = Operand(made.dtype, made.shape, made.strides, described(tensor).device) if out is None else out
    return infer_elementwise(*call.operands(*names), preset=config, out=written)


@_rule
def is_infinite(call: Call, *, out: TensorLike | None = None) -> ElementwiseResult:
    """Integers are never infinite. For other dtypes, absolute values are compared with infinity, part by part."""
    # Source: aten/src/ATen/native/TensorCompare.cpp, isinf (v2.13).
    tensor = described(call.tensor())
    if is_integral(tensor.dtype, include_bool=True):
        return _like(tensor, torch.bool, out)
    if not is_complex(tensor.dtype):
        return _equals_infinity(tensor, out)
    strides = tuple(2 * stride for stride in strides_of(tensor))
    # The result for the imaginary parts is combined with this one in place.
    return _equals_infinity(tensor._replace(dtype=to_real(tensor.dtype), strides=strides), out)


def _equals_infinity(tensor: Operand, out: TensorLike | None) -> ElementwiseResult:
    absolute = infer_elementwise(tensor, preset="unary")
    return infer_elementwise(tensor._replace(strides=absolute.strides), math.inf, preset="comparison", out=out)
