"""Rules for a result's dtype that depends on an optional argument, usually `dtype`.

dtypes_of_results.py describes the arguments and results of these functions.
"""

from __future__ import annotations

import torch

from torch_promote.reference.dtypes import default_complex, dtype_name, is_complex, is_floating, is_integral, to_real
from torch_promote.reference.ops.call import Call
from torch_promote.reference.ops.dtypes_from_operands import same
from torch_promote.reference.promotion.states import number_dtype, result_type
from torch_promote.reference.promotion.table import PromotionError

__all__ = [
    "deviation",
    "dtype_or_default",
    "dtype_or_int64",
    "dtype_or_number",
    "dtype_or_points",
    "dtype_or_range",
    "dtype_or_same",
    "dtype_or_whole",
    "mean",
    "norm",
    "output_dtype",
    "position",
    "softmax",
    "sum",
]


def _given(call: Call, argument: str = "dtype") -> torch.dtype | None:
    """The value of a dtype argument. None: the schema has none, or the call omits it."""
    dtype = call.get(argument)
    return dtype if isinstance(dtype, torch.dtype) else None


def dtype_or_same(call: Call, name: str | None = None) -> torch.dtype:
    """Without a dtype argument, the tensor's dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.zeros_like.default, [torch.ones(2).half()]).dtypes
        (torch.float16,)

    Source: aten/src/ATen/native/TensorFactories.cpp, empty_like (v2.13).
    """
    return _given(call) or same(call, name)


def sum(call: Call) -> torch.dtype:  # noqa: A001 # the rule's name
    """Sums of integers and bools are int64.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.sum.default, [torch.ones(2).char()]).dtypes
        (torch.int64,)
        >>> infer(torch.ops.aten.sum.default, [torch.ones(2).char()], {"dtype": torch.int8}).dtypes
        (torch.int8,)

    Source: aten/src/ATen/native/ReduceOpsUtils.h, get_dtype_from_self (v2.13).
    """
    dtype = same(call)
    return _given(call) or (torch.int64 if is_integral(dtype, include_bool=True) else dtype)


def mean(call: Call) -> torch.dtype:
    """A mean requires a floating or complex dtype; for integers, there is no default.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.mean.default, [torch.ones(2).int()])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.reference.promotion.table.PromotionError: aten::mean is defined for floating and complex dtypes...

    Source: aten/src/ATen/native/ReduceOps.cpp, TORCH_META_FUNC2(mean, dim) (v2.13).
    """
    return _not_whole(call, _given(call) or same(call))


def deviation(call: Call) -> torch.dtype:
    """Deviations and variances are real, and require a floating or complex dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.var_mean.correction, [torch.ones(2).cfloat()]).dtypes
        (torch.float32, torch.complex64)

    Source: aten/src/ATen/native/ReduceOps.cpp, std_var_out (v2.13).
    """
    return to_real(_not_whole(call, same(call)))


def norm(call: Call) -> torch.dtype:
    """A norm is real, even if `dtype` is complex, and requires a floating or complex dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.linalg_vector_norm.default, [torch.ones(2).cfloat()]).dtypes
        (torch.float32,)

    Source: aten/src/ATen/native/LinearAlgebra.cpp, TORCH_META_FUNC(linalg_vector_norm) (v2.13).
    """
    _not_whole(call, same(call))
    return to_real(_given(call) or same(call))


def _not_whole(call: Call, dtype: torch.dtype) -> torch.dtype:
    if is_floating(dtype) or is_complex(dtype):
        return dtype
    raise PromotionError(
        f"{call.signature.name} is defined for floating and complex dtypes, got {dtype_name(dtype)}. "
        "Convert the tensor first."
    )


def output_dtype(call: Call, argument: str = "dtype") -> torch.dtype:
    """The named dtype argument. Without it, the first tensor's dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.view.dtype, [torch.ones(2), torch.int32]).dtypes
        (torch.int32,)

    Source: aten/src/ATen/native/TensorConversions.cpp, view_dtype (v2.13).
    """
    return _given(call, argument) or same(call)


def softmax(call: Call) -> torch.dtype:
    """float32 if `half_to_float` is set, otherwise the tensor's dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten._softmax.default, [torch.ones(2).half(), 0, True]).dtypes
        (torch.float32,)

    Source: aten/src/ATen/native/SoftMax.cpp, TORCH_META_FUNC(_softmax) (v2.13).
    """
    return torch.float32 if call["half_to_float"] else same(call)


def position(call: Call) -> torch.dtype:
    """int64, or int32 if `out_int32` is set.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.searchsorted.Tensor, [torch.ones(2), torch.ones(2)], {"out_int32": True}).dtypes
        (torch.int32,)

    Source: aten/src/ATen/native/Bucketization.cpp, searchsorted_cpu (v2.13).
    """
    return torch.int32 if call["out_int32"] else torch.int64


def dtype_or_default(call: Call) -> torch.dtype:
    """Without a dtype argument, the default dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.zeros.default, [[2]], default_dtype=torch.float64).dtypes
        (torch.float64,)

    Source: c10/core/TensorOptions.h, dtype_or_default (v2.13).
    """
    return _given(call) or call.default_dtype


def dtype_or_int64(call: Call) -> torch.dtype:
    """Without a dtype argument, int64.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.randperm.default, [10]).dtypes
        (torch.int64,)

    Source: aten/src/ATen/native/TensorFactories.cpp, randperm (v2.13).
    """
    return _given(call) or torch.int64


def dtype_or_whole(call: Call) -> torch.dtype:
    """Without a dtype argument, int64. If the argument is None, the default dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> randint = torch.ops.aten.randint.default
        >>> infer(randint, [10, [2]]).dtypes, infer(randint, [10, [2]], {"dtype": None}).dtypes
        ((torch.int64,), (torch.float32,))

    Source: aten/src/ATen/native/TensorFactories.cpp, randint (v2.13).
    """
    # The schema's default is int64, given as a number.
    return _given(call) or (call.default_dtype if call["dtype"] is None else torch.int64)


def dtype_or_number(call: Call, name: str) -> torch.dtype:
    """Without a dtype argument, the dtype of the number.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.full.default, [[2], True]).dtypes, infer(torch.ops.aten.full.default, [[2], 1]).dtypes
        ((torch.bool,), (torch.int64,))

    Source: aten/src/ATen/native/TensorFactories.cpp, infer_full_options (v2.13).
    """
    return _given(call) or number_dtype(call[name], call.default_dtype)


def dtype_or_range(call: Call, *names: str) -> torch.dtype:
    """Without a dtype argument, int64 if every bound is an integer, else the default dtype.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.arange.start, [0, 5]).dtypes
        (torch.int64,)
        >>> infer(torch.ops.aten.arange.start, [0, 5.0], default_dtype=torch.float64).dtypes
        (torch.float64,)

    Source: aten/src/ATen/native/TensorFactories.cpp, arange (v2.13).
    """
    whole = all(isinstance(call[name], int) for name in names)
    return _given(call) or (torch.int64 if whole else call.default_dtype)


def dtype_or_points(call: Call, *names: str) -> torch.dtype:
    """Without a dtype argument, the default dtype, or its complex dtype if an end point is complex.

    Example:
        >>> from torch_promote.reference import infer
        >>> infer(torch.ops.aten.linspace.default, [0, 1j, 5], default_dtype=torch.float64).dtypes
        (torch.complex128,)

    Source: aten/src/ATen/native/TensorFactories.cpp, linspace_logspace_infer_options (v2.13).
    """
    ends = (result_type(call[name], default_dtype=call.default_dtype) for name in names)
    return _given(call) or (default_complex(call.default_dtype) if any(map(is_complex, ends)) else call.default_dtype)
