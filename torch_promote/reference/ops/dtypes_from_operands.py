"""Rules for a result's dtype that depends on the operands.

dtypes_of_results.py describes the arguments and results of these functions.
"""

from __future__ import annotations

import torch

from torch_promote.reference.dtypes import dtype_name, is_integral, to_complex, to_real
from torch_promote.reference.ops.call import Call, TensorLike, described
from torch_promote.reference.promotion.states import result_type
from torch_promote.reference.promotion.table import PromotionError

__all__ = [
    "accumulate",
    "bin_counts",
    "complex",
    "floating",
    "for_each",
    "one_dtype",
    "pieces",
    "pieces_of_sizes",
    "promoted",
    "real",
    "real_of_promoted",
    "same",
    "slices",
    "statistics",
    "truth",
    "wanted",
]


def same(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype of the named argument, or of the first tensor.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.sort.default, [torch.ones(2).half()]).dtypes
        (torch.float16, torch.int64)

    Source: aten/src/ATen/core/TensorBase.h, options (v2.13).
    """
    return call.tensor(name).dtype


def one_dtype(call: Call, *names: str) -> torch.dtype:
    """The dtype that the named tensors, or all, have in common. Matrix products do not promote.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.mm.default, [torch.ones(2, 2), torch.ones(2, 2).half()])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.reference.promotion.table.PromotionError: aten::mm takes tensors of one dtype, got float32 and ...

    Source: aten/src/ATen/native/Blas.cpp, dot_check (v2.13); aten/src/ATen/native/LinearAlgebra.cpp,
    TORCH_META_FUNC(addmm) (v2.13).
    """
    dtypes = [operand.dtype for operand in call.operands(*names) if isinstance(operand, TensorLike)]
    for dtype in dtypes:
        if dtype is not dtypes[0]:
            raise PromotionError(
                f"{call.signature.name} takes tensors of one dtype, got {dtype_name(dtypes[0])} and "
                f"{dtype_name(dtype)}. Convert one of them first."
            )
    return dtypes[0]


def promoted(call: Call, *names: str) -> torch.dtype:
    """The dtype that the named arguments, or all tensors, promote to.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.cat.default, [[torch.ones(2).half(), torch.ones(2).bfloat16()]]).dtypes
        (torch.float32,)

    Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
    """
    return result_type(*call.operands(*names), default_dtype=call.default_dtype)


def floating(call: Call, name: str | None = None) -> torch.dtype:
    """The tensor's dtype, or the default dtype for integers and bools.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.logsumexp.default, [torch.ones(2).char(), [0]], default_dtype=torch.float64).dtypes
        (torch.float64,)

    Source: aten/src/ATen/native/ReduceOps.cpp, logsumexp (v2.13).
    """
    dtype = same(call, name)
    return call.default_dtype if is_integral(dtype, include_bool=True) else dtype


def real(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype of a complex tensor's parts, or a real tensor's dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten._linalg_svd.default, [torch.ones(2, 2).cfloat()]).dtypes
        (torch.complex64, torch.float32, torch.complex64)

    Source: c10/core/ScalarType.h, toRealValueType (v2.13).
    """
    return to_real(same(call, name))


def complex(call: Call, name: str | None = None) -> torch.dtype | None:  # noqa: A001 # the rule's name
    """The complex dtype whose parts have the tensor's dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.linalg_eigvals.default, [torch.ones(2, 2)]).dtypes
        (torch.complex64,)

    Source: c10/core/ScalarType.h, toComplexType (v2.13).
    """
    return to_complex(same(call, name))


def real_of_promoted(call: Call, *names: str) -> torch.dtype:
    """The real dtype of what the operands promote to, as for a distance.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.dist.default, [torch.ones(2).cfloat(), torch.ones(2).double()]).dtypes
        (torch.float64,)

    Source: aten/src/ATen/native/ReduceOps.cpp, dist (v2.13).
    """
    return to_real(promoted(call, *names))


def accumulate(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype in which sums are accumulated: float32 for half precision.

    Example:
        >>> from torch_promote.reference import infer
        >>> attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        >>> infer(attention, [torch.ones(1, 1, 2, 2).half()] * 3).dtypes
        (torch.float16, torch.float32)

    Source: aten/src/ATen/OpMathType.h, toOpMathType (v2.13).
    """
    dtype = same(call, name)
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def truth(call: Call) -> torch.dtype:
    """bool, or uint8 for a uint8 tensor.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.any.default, [torch.ones(2)]).dtypes
        (torch.bool,)
        >>> infer(torch.ops.aten.any.default, [torch.ones(2).byte()]).dtypes
        (torch.uint8,)

    Source: aten/src/ATen/native/ReduceOps.cpp, get_result_or_bytebool_dtype (v2.13).
    """
    return torch.uint8 if same(call) is torch.uint8 else torch.bool


def bin_counts(call: Call) -> torch.dtype:
    """Counts are int64; sums of weights are float32 for float32 weights and float64 for all others.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.bincount.default, [torch.ones(2).int(), torch.ones(2).half()]).dtypes
        (torch.float64,)

    Source: aten/src/ATen/native/SummaryOps.cpp, _bincount_cpu (v2.13).
    """
    if call["weights"] is None:
        return torch.int64
    return torch.float32 if same(call, "weights") is torch.float32 else torch.float64


def statistics(call: Call, name: str | None = None) -> torch.dtype:
    """A mean or deviation that is saved for the backward: float32 if the input is half and a parameter is float32.

    On CUDA, batch and layer norm always use float32 for half-precision inputs.

    Example:
        >>> from torch_promote.reference import infer
        >>> arguments = [torch.ones(2, 4).half(), [4], torch.ones(4), torch.ones(4), 1e-5]
        >>> infer(torch.ops.aten.native_layer_norm.default, arguments).dtypes
        (torch.float16, torch.float32, torch.float32)
        >>> on_cuda = described(torch.ones(2, 4).half())._replace(device="cuda")
        >>> infer(torch.ops.aten.native_batch_norm.default, [on_cuda, None, None, None, None, True, 0.1, 1e-5]).dtypes
        (torch.float16, torch.float32, torch.float32)

    Source: aten/src/ATen/native/cpu/mixed_data_type.h, param_scalar_type (v2.13);
    aten/src/ATen/native/cuda/Normalization.cu, batch_norm_cuda (v2.13);
    aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda (v2.13).
    """
    dtype = same(call, name)
    on_cuda = described(call.tensor(name)).device == "cuda" and call.signature.name != "aten::native_group_norm"
    if on_cuda and dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    names = {"weight", "bias", "running_mean", "running_var"} & set(call)
    parameters = [x.dtype for x in call.operands(*names) if isinstance(x, TensorLike)]
    return torch.float32 if torch.float32 in parameters else dtype


def wanted(call: Call, position: str, *names: str) -> torch.dtype | None:
    """A gradient selected by the output mask: the dtype of the first named argument that is not None.

    `position` is the gradient's index in the mask. A gradient that is not selected is undefined, None.

    Example:
        >>> from torch_promote.reference import infer
        >>> x, mask = torch.ones(4), [True, False, True]
        >>> infer(torch.ops.aten.native_layer_norm_backward.default, [x, x, [4], x, x, x, x, mask]).dtypes
        (torch.float32, None, torch.float32)

    Source: aten/src/ATen/native/layer_norm.cpp, layer_norm_backward_cpu (v2.13).
    """
    if not call["output_mask"][int(position)]:
        return None
    there = [name for name in names if call[name] is not None]
    return same(call, there[0]) if there else None


def pieces(call: Call) -> tuple[torch.dtype, ...]:
    """One dtype for each piece of a given size along a dimension.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.split.Tensor, [torch.ones(5), 2]).dtypes
        (torch.float32, torch.float32, torch.float32)

    Source: aten/src/ATen/native/TensorShape.h, get_num_splits (v2.13).
    """
    tensor, size = call.tensor(), call["split_size"]
    count = max(1, -(-tensor.shape[call["dim"]] // size)) if size else 1
    return (tensor.dtype,) * count


def pieces_of_sizes(call: Call) -> tuple[torch.dtype, ...]:
    """One dtype for each of the given sizes.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.split_with_sizes.default, [torch.ones(5), [1, 4]]).dtypes
        (torch.float32, torch.float32)

    Source: aten/src/ATen/native/TensorShape.cpp, split_with_sizes (v2.13).
    """
    return (same(call),) * len(call["split_sizes"])


def slices(call: Call) -> tuple[torch.dtype, ...]:
    """One dtype for each index of a dimension.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.unbind.int, [torch.ones(2, 3), 1]).dtypes
        (torch.float32, torch.float32, torch.float32)

    Source: aten/src/ATen/native/TensorShape.cpp, unbind (v2.13).
    """
    count: int = call.tensor().shape[call["dim"]]
    return (same(call),) * count


def for_each(call: Call, name: str) -> tuple[torch.dtype, ...]:
    """One dtype for each element of the named list.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten._histogramdd_bin_edges.default, [torch.ones(3, 2), [4, 4]]).dtypes
        (torch.float32, torch.float32)

    Source: aten/src/ATen/native/Histogram.cpp, histogramdd_bin_edges (v2.13).
    """
    return (same(call),) * len(call[name])
