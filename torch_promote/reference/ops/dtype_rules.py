"""The rules for the dtype of one result, by their names in the `.rules` files.

A rule is a function of the call and of the names in parentheses after it: `same(weight)` is the dtype of the argument
`weight`, `same` that of the call's first tensor. A rule for a list of tensors returns a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from torch_promote.reference.dtypes import (
    default_complex,
    dtype_name,
    is_complex,
    is_floating,
    is_integral,
    to_complex,
    to_real,
)
from torch_promote.reference.ops.call import Call, TensorLike, described
from torch_promote.reference.promotion import PromotionError, number_dtype, result_type
from torch_promote.reference.strides import ShapeError

#: Returns the dtype of a result, None for an undefined result, or a tuple for a list of tensors.
DtypeRule = Callable[..., "torch.dtype | tuple[torch.dtype, ...] | None"]

#: The rules by name.
DTYPE_RULES: dict[str, DtypeRule] = {}

_Rule = TypeVar("_Rule", bound=DtypeRule)


def _rule(function: _Rule) -> _Rule:
    """Adds a function to the rules, under its name."""
    DTYPE_RULES[function.__name__] = function
    return function


@_rule
def same(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype of the named argument, or of the first tensor."""
    # Source: aten/src/ATen/core/TensorBase.h, options (v2.13).
    return call.tensor(name).dtype


@_rule
def one_dtype(call: Call, *names: str) -> torch.dtype:
    """The dtype that the named tensors, or all, have in common. Matrix products do not promote."""
    # Source: aten/src/ATen/native/Blas.cpp, dot_check (v2.13); aten/src/ATen/native/LinearAlgebra.cpp,
    # TORCH_META_FUNC(addmm) (v2.13).
    dtypes = [operand.dtype for operand in call.operands(*names) if isinstance(operand, TensorLike)]
    for dtype in dtypes:
        if dtype is not dtypes[0]:
            raise PromotionError(
                f"{call.signature.name} takes tensors of one dtype, got {dtype_name(dtypes[0])} and "
                f"{dtype_name(dtype)}. Convert one of them first."
            )
    return dtypes[0]


@_rule
def promoted(call: Call, *names: str) -> torch.dtype:
    """The dtype that the named arguments, or all tensors, promote to."""
    # Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13).
    return result_type(*call.operands(*names), default_dtype=call.default_dtype)


@_rule
def floating(call: Call, name: str | None = None) -> torch.dtype:
    """The tensor's dtype, or the default dtype for integers and bools."""
    # Source: aten/src/ATen/native/ReduceOps.cpp, logsumexp (v2.13).
    dtype = same(call, name)
    return call.default_dtype if is_integral(dtype, include_bool=True) else dtype


@_rule
def real(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype of a complex tensor's parts, or a real tensor's dtype."""
    # Source: c10/core/ScalarType.h, toRealValueType (v2.13).
    return to_real(same(call, name))


@_rule
def complex(call: Call, name: str | None = None) -> torch.dtype | None:  # noqa: A001 # the rule's name
    """The complex dtype whose parts have the tensor's dtype."""
    # Source: c10/core/ScalarType.h, toComplexType (v2.13).
    return to_complex(same(call, name))


@_rule
def spectrum(call: Call) -> torch.dtype | None:
    """The complex dtype of a Fourier transform, as `complex`, but on CUDA and XPU complex64 for bfloat16."""
    # Source: torch/_meta_registrations.py, meta_fft_r2c (v2.15).
    widens = same(call) is torch.bfloat16 and described(call.tensor()).device in ("cuda", "xpu")
    return torch.complex64 if widens else complex(call)


@_rule
def real_of_promoted(call: Call, *names: str) -> torch.dtype:
    """The real dtype of what the operands promote to, as for a distance."""
    # Source: aten/src/ATen/native/ReduceOps.cpp, dist (v2.13).
    return to_real(promoted(call, *names))


@_rule
def accumulate(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype in which sums are accumulated: float32 for half precision."""
    # Source: aten/src/ATen/OpMathType.h, toOpMathType (v2.13).
    dtype = same(call, name)
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@_rule
def truth(call: Call) -> torch.dtype:
    """bool, or uint8 for a uint8 tensor."""
    # Source: aten/src/ATen/native/ReduceOps.cpp, get_result_or_bytebool_dtype (v2.13).
    return torch.uint8 if same(call) is torch.uint8 else torch.bool


@_rule
def bin_counts(call: Call) -> torch.dtype:
    """Counts are int64; sums of weights are float32 for float32 weights and float64 for all others."""
    # Source: aten/src/ATen/native/SummaryOps.cpp, _bincount_cpu (v2.13).
    if call["weights"] is None:
        return torch.int64
    return torch.float32 if same(call, "weights") is torch.float32 else torch.float64


@_rule
def statistics(call: Call, name: str | None = None) -> torch.dtype:
    """A mean or deviation that is saved for the backward: float32 if the input is half and a parameter is float32."""
    # On other devices than the CPU, batch and layer norm always use float32 for half-precision inputs.
    # Source: aten/src/ATen/native/cpu/mixed_data_type.h, param_scalar_type (v2.13);
    # aten/src/ATen/native/cuda/Normalization.cu, batch_norm_cuda (v2.13);
    # aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda (v2.13); for fake tensors of other devices
    # torch/_decomp/decompositions.py, native_batch_norm_helper (v2.13).
    dtype = same(call, name)
    on_gpu = described(call.tensor(name)).device != "cpu" and call.signature.name != "aten::native_group_norm"
    if on_gpu and dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    names = {"weight", "bias", "running_mean", "running_var"} & set(call)
    parameters = [x.dtype for x in call.operands(*names) if isinstance(x, TensorLike)]
    return torch.float32 if torch.float32 in parameters else dtype


@_rule
def wanted(call: Call, position: str, *names: str) -> torch.dtype | None:
    """A gradient selected by the output mask at `position`: the dtype of the first named argument that is not None."""
    # A gradient that is not selected is undefined, None.
    # Source: aten/src/ATen/native/layer_norm.cpp, layer_norm_backward_cpu (v2.13).
    if not call["output_mask"][int(position)]:
        return None
    there = [name for name in names if call[name] is not None]
    return same(call, there[0]) if there else None


@_rule
def pieces(call: Call) -> tuple[torch.dtype, ...]:
    """One dtype for each piece of a given size along a dimension."""
    # Source: aten/src/ATen/native/TensorShape.h, get_num_splits (v2.13).
    size = call["split_size"]
    count = max(1, -(-_size(call) // size)) if size else 1
    return (same(call),) * count


@_rule
def pieces_of_sizes(call: Call) -> tuple[torch.dtype, ...]:
    """One dtype for each of the given sizes."""
    # Source: aten/src/ATen/native/TensorShape.cpp, split_with_sizes (v2.13).
    return (same(call),) * len(call["split_sizes"])


@_rule
def slices(call: Call) -> tuple[torch.dtype, ...]:
    """One dtype for each index of a dimension."""
    # Source: aten/src/ATen/native/TensorShape.cpp, unbind (v2.13).
    return (same(call),) * _size(call)


def _size(call: Call) -> int:
    """The size of the dimension along which a call takes a tensor apart."""
    shape, dim = call.tensor().shape, call["dim"]
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"dim is {dim}, and the tensor has {len(shape)} dimensions.")
    return int(shape[dim])


@_rule
def for_each(call: Call, name: str) -> tuple[torch.dtype, ...]:
    """One dtype for each element of the named list."""
    # Source: aten/src/ATen/native/Histogram.cpp, histogramdd_bin_edges (v2.13).
    return (same(call),) * len(call[name])


def _given(call: Call, argument: str = "dtype") -> torch.dtype | None:
    """The value of a dtype argument. None: the schema has none, or the call omits it."""
    dtype = call.get(argument)
    return dtype if isinstance(dtype, torch.dtype) else None


@_rule
def dtype_or_same(call: Call, name: str | None = None) -> torch.dtype:
    """Without a dtype argument, the tensor's dtype."""
    # Source: aten/src/ATen/native/TensorFactories.cpp, empty_like (v2.13).
    return _given(call) or same(call, name)


@_rule
def sum(call: Call) -> torch.dtype:  # noqa: A001 # the rule's name
    """Sums of integers and bools are int64."""
    # Source: aten/src/ATen/native/ReduceOpsUtils.h, get_dtype_from_self (v2.13).
    dtype = same(call)
    return _given(call) or (torch.int64 if is_integral(dtype, include_bool=True) else dtype)


@_rule
def mean(call: Call) -> torch.dtype:
    """A mean requires a floating or complex dtype; for integers, there is no default."""
    # Source: aten/src/ATen/native/ReduceOps.cpp, TORCH_META_FUNC2(mean, dim) (v2.13).
    return _not_whole(call, _given(call) or same(call))


@_rule
def deviation(call: Call) -> torch.dtype:
    """Deviations and variances are real, and require a floating or complex dtype."""
    # Source: aten/src/ATen/native/ReduceOps.cpp, std_var_out (v2.13).
    return to_real(_not_whole(call, same(call)))


@_rule
def norm(call: Call) -> torch.dtype:
    """A norm is real, even if `dtype` is complex, and requires a floating or complex dtype."""
    # Source: aten/src/ATen/native/LinearAlgebra.cpp, TORCH_META_FUNC(linalg_vector_norm) (v2.13).
    _not_whole(call, same(call))
    return to_real(_given(call) or same(call))


def _not_whole(call: Call, dtype: torch.dtype) -> torch.dtype:
    if is_floating(dtype) or is_complex(dtype):
        return dtype
    raise PromotionError(
        f"{call.signature.name} is defined for floating and complex dtypes, got {dtype_name(dtype)}. "
        "Convert the tensor first."
    )


@_rule
def output_dtype(call: Call, argument: str = "dtype") -> torch.dtype:
    """The named dtype argument. Without it, the first tensor's dtype."""
    # Source: aten/src/ATen/native/TensorConversions.cpp, view_dtype (v2.13).
    return _given(call, argument) or same(call)


@_rule
def softmax(call: Call) -> torch.dtype:
    """float32 if `half_to_float` is set, otherwise the tensor's dtype."""
    # Source: aten/src/ATen/native/SoftMax.cpp, TORCH_META_FUNC(_softmax) (v2.13).
    return torch.float32 if call["half_to_float"] else same(call)


@_rule
def position(call: Call) -> torch.dtype:
    """int64, or int32 if `out_int32` is set."""
    # Source: aten/src/ATen/native/Bucketization.cpp, searchsorted_cpu (v2.13).
    return torch.int32 if call["out_int32"] else torch.int64


@_rule
def dtype_or_default(call: Call) -> torch.dtype:
    """Without a dtype argument, the default dtype."""
    # Source: c10/core/TensorOptions.h, dtype_or_default (v2.13).
    return _given(call) or call.default_dtype


@_rule
def dtype_or_int64(call: Call) -> torch.dtype:
    """Without a dtype argument, int64."""
    # Source: aten/src/ATen/native/TensorFactories.cpp, randperm (v2.13).
    return _given(call) or torch.int64


@_rule
def dtype_or_whole(call: Call) -> torch.dtype:
    """Without a dtype argument, int64. If the argument is None, the default dtype."""
    # Source: aten/src/ATen/native/TensorFactories.cpp, randint (v2.13).
    # The schema's default is int64, given as a number.
    return _given(call) or (call.default_dtype if call["dtype"] is None else torch.int64)


@_rule
def dtype_or_number(call: Call, name: str) -> torch.dtype:
    """Without a dtype argument, the dtype of the number."""
    # Source: aten/src/ATen/native/TensorFactories.cpp, infer_full_options (v2.13).
    return _given(call) or number_dtype(call[name], call.default_dtype)


@_rule
def dtype_or_range(call: Call, *names: str) -> torch.dtype:
    """Without a dtype argument, int64 if every bound is an integer, else the default dtype."""
    # Source: aten/src/ATen/native/TensorFactories.cpp, arange (v2.13).
    whole = all(isinstance(call[name], int) for name in names)
    return _given(call) or (torch.int64 if whole else call.default_dtype)


@_rule
def dtype_or_points(call: Call, *names: str) -> torch.dtype:
    """Without a dtype argument, the default dtype, or its complex dtype if an end point is complex."""
    # Source: aten/src/ATen/native/TensorFactories.cpp, linspace_logspace_infer_options (v2.13).
    ends = (result_type(call[name], default_dtype=call.default_dtype) for name in names)
    return _given(call) or (default_complex(call.default_dtype) if any(map(is_complex, ends)) else call.default_dtype)


@_rule
def put(call: Call) -> torch.dtype:
    """The tensor's dtype, which the values must have, except for a single value with a mask, which is filled in."""
    # Source: aten/src/ATen/native/TensorAdvancedIndexingUtils.h, canDispatchToMaskedFill (v2.13);
    # aten/src/ATen/native/TensorAdvancedIndexing.cpp, make_index_put_iterator (v2.13).
    value, indices = call.tensor("values"), tuple(call.operands("indices"))
    one_mask = len(indices) == 1 and getattr(indices[0], "dtype", None) in (torch.bool, torch.uint8)
    if one_mask and all(size == 1 for size in value.shape) and not call["accumulate"]:
        return same(call)
    return one_dtype(call, "self", "values")


@_rule
def rectified_gradient(call: Call) -> torch.dtype:
    """In training, the promoted dtype of gradient and noise; otherwise that of a leaky ReLU's gradient."""
    # Source: aten/src/ATen/native/Activation.cpp, rrelu_with_noise_backward (v2.13).
    return promoted(call, "grad_output", "noise" if call["training"] else "self")


@_rule
def softmax_gradient(call: Call) -> torch.dtype:
    """The gradient's dtype, but float16 if softmax widened a float16 input to float32."""
    # Source: aten/src/ATen/native/SoftMax.cpp, TORCH_META_FUNC(_softmax_backward_data) (v2.13).
    dtype = same(call)
    return torch.float16 if dtype is torch.float32 and call["input_dtype"] is torch.float16 else dtype


@_rule
def workspace(call: Call) -> torch.dtype | None:
    """uint8, for a workspace of the backward. Undefined if no gradient is recorded."""
    # Source: aten/src/ATen/native/mkldnn/RNN.cpp, mkldnn_rnn_layer (v2.13).
    del call
    return torch.uint8 if torch.is_grad_enabled() else None
