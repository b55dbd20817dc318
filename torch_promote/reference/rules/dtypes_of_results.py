"""The rules that say the dtype of one result, by the names that the `.rules` files use.

Each is a function of the call, and of the names that stand in parentheses after it: `same(weight)` is the dtype of the
argument `weight`, plain `same` that of the call's first tensor. A rule for a list of tensors returns a tuple.
"""

from __future__ import annotations

from collections.abc import Callable

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
from torch_promote.reference.promotion import PromotionError, number_dtype, result_type
from torch_promote.reference.rules.call import Call, TensorLike

__all__ = ["DTYPE_RULES", "DtypeRule"]

#: The dtype of a result, None for a result that is undefined, a tuple for a list of tensors.
DtypeRule = Callable[..., "torch.dtype | tuple[torch.dtype, ...] | None"]


def _given(call: Call, argument: str = "dtype") -> torch.dtype | None:
    """A dtype argument's value; None if it is absent or left out."""
    dtype = call.get(argument)
    return dtype if isinstance(dtype, torch.dtype) else None


def same(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype of the named argument, or of the call's first tensor."""
    return call.tensor(name).dtype


def one_dtype(call: Call, *names: str) -> torch.dtype:
    """The one dtype of the named tensors, or of all: a product promotes nothing.

    Source: aten/src/ATen/native/Blas.cpp, dot_check, and LinearAlgebra.cpp, addmm (v2.13).
    """
    dtypes = [operand.dtype for operand in call.operands(*names) if isinstance(operand, TensorLike)]
    for dtype in dtypes:
        if dtype is not dtypes[0]:
            raise PromotionError(
                f"{call.signature.name} takes tensors of one dtype, got {dtype_name(dtypes[0])} and "
                f"{dtype_name(dtype)}. Convert one of the two first."
            )
    return dtypes[0]


def promoted(call: Call, *names: str) -> torch.dtype:
    """What the named arguments promote to, or all tensors of the call."""
    return result_type(*call.operands(*names), default_dtype=call.default_dtype)


def floating(call: Call, name: str | None = None) -> torch.dtype:
    """The default dtype in place of integers and bools."""
    dtype = same(call, name)
    return call.default_dtype if is_integral(dtype, include_bool=True) else dtype


def real(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype of a complex tensor's parts; real dtypes stay."""
    return to_real(same(call, name))


def complex(call: Call, name: str | None = None) -> torch.dtype | None:  # noqa: A001 # the rule's name
    """The complex dtype whose parts have the tensor's dtype."""
    return to_complex(same(call, name))


def real_of_promoted(call: Call, *names: str) -> torch.dtype:
    """The parts of what the operands promote to: a distance."""
    return to_real(promoted(call, *names))


def accumulate(call: Call, name: str | None = None) -> torch.dtype:
    """The dtype that sums are kept in: float32 for half precision. Source: aten/src/ATen/OpMathType.h (v2.13)."""
    dtype = same(call, name)
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# --- a dtype argument decides where it is given


def dtype_or_same(call: Call, name: str | None = None) -> torch.dtype:
    """Without a dtype argument, the tensor's own."""
    return _given(call) or same(call, name)


def sum(call: Call) -> torch.dtype:  # noqa: A001 # the rule's name
    """Integers and bools add up to int64.

    Source: aten/src/ATen/native/ReduceOpsUtils.h, get_dtype_from_self (v2.13).
    """
    dtype = same(call)
    return _given(call) or (torch.int64 if is_integral(dtype, include_bool=True) else dtype)


def mean(call: Call) -> torch.dtype:
    """A mean is of floating or complex numbers: there is no dtype to fall back on for integers.

    Source: aten/src/ATen/native/ReduceOps.cpp, mean (v2.13).
    """
    return _not_whole(call, _given(call) or same(call))


def deviation(call: Call) -> torch.dtype:
    """Deviations and variances are real, and of floating or complex numbers.

    Source: aten/src/ATen/native/ReduceOps.cpp, std_var_out (v2.13).
    """
    return to_real(_not_whole(call, same(call)))


def norm(call: Call) -> torch.dtype:
    """A norm is real, and of floating or complex numbers, whatever dtype is asked for.

    Source: aten/src/ATen/native/LinearAlgebra.cpp, linalg_vector_norm (v2.13).
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
    """The named dtype argument; without it, the first tensor's dtype."""
    return _given(call, argument) or same(call)


def softmax(call: Call) -> torch.dtype:
    """float32 where the op is told to widen half precision on the way."""
    return torch.float32 if call["half_to_float"] else same(call)


def dtype_or_default(call: Call) -> torch.dtype:
    """Without a dtype argument, the default dtype."""
    return _given(call) or call.default_dtype


def dtype_or_int64(call: Call) -> torch.dtype:
    """Without a dtype argument, int64; the schema's own default spells it as a number."""
    return _given(call) or torch.int64


def dtype_or_number(call: Call, name: str) -> torch.dtype:
    """Without a dtype argument, what the number counts as."""
    return _given(call) or number_dtype(call[name], call.default_dtype)


def dtype_or_range(call: Call, *names: str) -> torch.dtype:
    """Without a dtype argument: int64 if every bound is an integer, else the default dtype."""
    whole = all(isinstance(call[name], int) for name in names)
    return _given(call) or (torch.int64 if whole else call.default_dtype)


def dtype_or_points(call: Call, *names: str) -> torch.dtype:
    """Without a dtype argument: the default dtype, complex if an end point is."""
    ends = (result_type(call[name], default_dtype=call.default_dtype) for name in names)
    return _given(call) or (default_complex(call.default_dtype) if any(map(is_complex, ends)) else call.default_dtype)


# --- lowest dtypes of their own


def truth(call: Call) -> torch.dtype:
    """bool, but uint8 stays. Source: aten/src/ATen/native/ReduceOps.cpp, get_result_or_bytebool_dtype (v2.13)."""
    return torch.uint8 if same(call) is torch.uint8 else torch.bool


def position(call: Call) -> torch.dtype:
    """int64, or int32 if asked for."""
    return torch.int32 if call["out_int32"] else torch.int64


def bin_counts(call: Call) -> torch.dtype:
    """Counts are int64; sums of weights are float32 for float32 weights and float64 for all others."""
    if call["weights"] is None:
        return torch.int64
    return torch.float32 if same(call, "weights") is torch.float32 else torch.float64


def statistics(call: Call, name: str | None = None) -> torch.dtype:
    """A mean or deviation that the backward needs: float32 where half precision meets float32 parameters."""
    dtype = same(call, name)
    names = {"weight", "bias", "running_mean", "running_var"} & set(call)
    parameters = [x.dtype for x in call.operands(*names) if isinstance(x, TensorLike)]
    return torch.float32 if torch.float32 in parameters else dtype


def wanted(call: Call, position: str, *names: str) -> torch.dtype | None:
    """A gradient that the output mask asks for has the dtype of the first named argument that is there."""
    if not call["output_mask"][int(position)]:
        return None
    there = [name for name in names if call[name] is not None]
    return same(call, there[0]) if there else None


# --- lists


def pieces(call: Call) -> tuple[torch.dtype, ...]:
    """Pieces of one size along a dimension, the last one maybe smaller."""
    tensor, size = call.tensor(), call["split_size"]
    count = max(1, -(-tensor.shape[call["dim"]] // size)) if size else 1
    return (tensor.dtype,) * count


def pieces_of_sizes(call: Call) -> tuple[torch.dtype, ...]:
    """Pieces of the sizes given."""
    return (same(call),) * len(call["split_sizes"])


def slices(call: Call) -> tuple[torch.dtype, ...]:
    """One slice for each index of a dimension."""
    count: int = call.tensor().shape[call["dim"]]
    return (same(call),) * count


def for_each(call: Call, name: str) -> tuple[torch.dtype, ...]:
    """As many results as the named list has elements."""
    return (same(call),) * len(call[name])


DTYPE_RULES: dict[str, DtypeRule] = {
    rule.__name__: rule
    for rule in (
        same,
        one_dtype,
        promoted,
        floating,
        real,
        complex,
        real_of_promoted,
        accumulate,
        dtype_or_same,
        sum,
        mean,
        deviation,
        norm,
        output_dtype,
        softmax,
        dtype_or_default,
        dtype_or_int64,
        dtype_or_number,
        dtype_or_range,
        dtype_or_points,
        truth,
        position,
        bin_counts,
        statistics,
        wanted,
        pieces,
        pieces_of_sizes,
        slices,
        for_each,
    )
}
