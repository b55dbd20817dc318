"""Rules for elementwise ops whose results TensorIterator allocates.

elementwise.py describes the arguments and results of these functions.
"""

from __future__ import annotations

from dataclasses import replace

from torch_promote.reference.dtypes import to_complex
from torch_promote.reference.elementwise.config import PRESETS
from torch_promote.reference.elementwise.tensor_iterator import ElementwiseResult, infer_elementwise, infer_where
from torch_promote.reference.ops.call import Call, TensorLike, described
from torch_promote.reference.promotion.states import Operand

__all__ = ["complex_of", "in_dtype_of", "product", "quotient", "threshold", "where", "with_preset"]


def with_preset(preset: str, call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """A TensorIterator with one of the `PRESETS`.

    Example:
        >>> import torch
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.eq.Tensor, [torch.ones(2, 1), torch.ones(3).double()])
        Inference(rule='comparison', dtypes=(torch.bool,), shape=(2, 3), strides=(3, 1))

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::build (v2.13).
    """
    operands = tuple(call.operands(*names))
    return infer_elementwise(*operands, preset=preset, out=out, default_dtype=call.default_dtype)


def threshold(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """Promotes like binary ops, but allows an output with overlaps.

    Example:
        >>> import torch
        >>> from torch_promote.reference import infer
        >>> out = torch.ones(1).expand(3)
        >>> infer(torch.ops.aten.threshold.out, [torch.ones(3), 0, 1], {"out": out}).strides
        (0,)

    Source: aten/src/ATen/native/Activation.cpp, TORCH_META_FUNC(threshold) (v2.13).
    """
    config = replace(PRESETS["binary"], check_mem_overlap=False)
    return infer_elementwise(*call.operands(*names), preset=config, out=out, default_dtype=call.default_dtype)


def product(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The operands are multiplied one after another.

    Example:
        >>> import torch
        >>> from torch_promote.reference import infer
        >>> half, mask = torch.ones(3).half(), torch.ones(3).bool()
        >>> infer(torch.ops.aten.native_dropout_backward.default, [half, mask, 2.0]).dtypes
        (torch.float16,)

    Source: aten/src/ATen/native/Dropout.cpp, native_dropout_backward (v2.13).
    """
    first, *rest = call.operands(*names)
    device = described(call.tensor()).device
    for factor in rest:
        result = infer_elementwise(first, factor, default_dtype=call.default_dtype)
        first = Operand(result.dtype, result.shape, result.strides, device)
    return result


def quotient(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """With a rounding mode, integers stay integers.

    Example:
        >>> import torch
        >>> from torch_promote.reference import infer
        >>> whole = torch.ones(3).int()
        >>> infer(torch.ops.aten.div.Tensor_mode, [whole, whole], {"rounding_mode": "floor"}).dtypes
        (torch.int32,)
        >>> infer(torch.ops.aten.div.Tensor_mode, [whole, whole], {"rounding_mode": None}).dtypes
        (torch.float32,)

    Source: aten/src/ATen/native/BinaryOps.cpp, TORCH_META_FUNC2(div, Tensor_mode) (v2.13).
    """
    return with_preset("binary_float" if call["rounding_mode"] is None else "binary", call, *names, out=out)


def where(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The condition affects the shape and strides, not the dtype.

    Example:
        >>> import torch
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.where.self, [torch.ones(2, 1).bool(), torch.ones(3).char(), torch.ones(3).char()])
        Inference(rule='where', dtypes=(torch.int8,), shape=(2, 3), strides=(3, 1))

    Source: aten/src/ATen/native/TensorCompare.cpp, where_self_out (v2.13).
    """
    result = infer_where(call["condition"], call["self"], call["other"], call.default_dtype)
    if out is None:
        return result
    config = replace(PRESETS["nullary"], resize_outputs=True)
    return infer_elementwise(*call.operands("condition", "self", "other"), preset=config, out=out)


def complex_of(call: Call, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """Two floating tensors of one dtype give a complex tensor.

    Example:
        >>> import torch
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.complex.default, [torch.ones(3), torch.ones(2, 1)])
        Inference(rule='complex_of', dtypes=(torch.complex64,), shape=(2, 3), strides=(3, 1))

    Source: aten/src/ATen/native/TensorFactories.cpp, complex (v2.13).
    """
    operands = tuple(call.operands(*names))
    config = replace(PRESETS["unary"], static_dtype=to_complex(call.tensor().dtype), check_all_same_dtype=False)
    return infer_elementwise(*operands, preset=config, out=out)


def in_dtype_of(call: Call, name: str, *names: str, out: TensorLike | None = None) -> ElementwiseResult:
    """The first name gives the result's dtype, the others are the operands.

    Example:
        >>> import torch
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.mish_backward.default, [torch.ones(3), torch.ones(3).half()]).dtypes
        (torch.float16,)

    Source: aten/src/ATen/native/Activation.cpp, mish_backward (v2.13).
    """
    config = replace(PRESETS["binary"], static_dtype=call.tensor(name).dtype)
    return infer_elementwise(*call.operands(*names), preset=config, out=out)
