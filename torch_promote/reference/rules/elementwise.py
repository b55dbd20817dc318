"""The rules of elementwise ops, by the names that the `.rules` files use: TensorIterator under one configuration each.

A rule is a function of the call, the names of its operands (all tensors of the call where none are named) and `out`, the
tensor that an out= op writes to. It returns dtype, shape and strides together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from torch_promote.reference.dtypes import is_complex, to_complex, to_real
from torch_promote.reference.memory_format import contiguous_strides
from torch_promote.reference.promotion import Operand, result_type
from torch_promote.reference.rules.call import Call, TensorLike, strides_of
from torch_promote.reference.strides import Sizes, temporary_strides
from torch_promote.reference.tensor_iterator import PRESETS, ElementwiseResult, infer_elementwise, infer_where

__all__ = ["ELEMENTWISE_RULES", "ElementwiseRule"]

#: The result of an elementwise op.
ElementwiseRule = Callable[..., ElementwiseResult]


def _preset(preset: str, call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    operands = tuple(call.operands(*names))
    return infer_elementwise(*operands, preset=preset, out=out, default_dtype=call.default_dtype)


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
    """The angle of complex numbers is real and contiguous, that of integers floating. Source: UnaryOps.cpp, angle (v2.13)."""
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
    """The numbers have a say in the dtype, and are no operands of the iteration. Source: Pow.cpp, pow.Tensor_Scalar (v2.13)."""
    dtype = result_type(*call.operands(*names), default_dtype=call.default_dtype)
    tensor = call.tensor()
    strides = strides_of(tensor)
    if tensor.dtype is not dtype:
        strides = temporary_strides(tuple(tensor.shape), strides)
    return infer_elementwise(
        Operand(dtype, tuple(tensor.shape), strides, None if isinstance(tensor, Operand) else tensor.device.type),
        preset="ternary",
        out=out,
    )


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
    """Two floating tensors of one dtype make a complex one. Source: aten/src/ATen/native/TensorFactories.cpp, complex (v2.13)."""
    operands = tuple(call.operands(*names))
    config = replace(PRESETS["unary"], static_dtype=to_complex(call.tensor().dtype), check_all_same_dtype=False)
    return infer_elementwise(*operands, preset=config, out=out)


def times_power(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """`self * 2.0 ** other`, of which the power is a tensor of its own. Source: aten/src/ATen/native/BinaryOps.cpp, ldexp (v2.13)."""
    power = infer_elementwise(2.0, call["other"], default_dtype=call.default_dtype)
    factor = Operand(power.dtype, power.shape, power.strides)
    return infer_elementwise(call["self"], factor, out=out, default_dtype=call.default_dtype)


ELEMENTWISE_RULES: dict[str, ElementwiseRule] = {
    preset: functools.partial(_preset, preset)
    for preset in ("unary", "unary_float", "binary", "binary_float", "comparison", "ternary")
} | {
    rule.__name__: rule
    for rule in (modulus, angle, with_numbers, power_of_number, product, quotient, where, complex_of, times_power)
}
