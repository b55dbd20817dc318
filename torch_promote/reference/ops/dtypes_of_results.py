"""The rules for the dtype of one result, by their names in the `.rules` files.

A rule is a function of the call and of the names in parentheses after it: `same(weight)` is the dtype of the argument
`weight`, `same` that of the call's first tensor. A rule for a list of tensors returns a tuple.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_promote.reference.ops import dtypes_from_arguments as from_arguments
from torch_promote.reference.ops import dtypes_from_branches as from_branches
from torch_promote.reference.ops import dtypes_from_operands as from_operands

__all__ = ["DTYPE_RULES", "DtypeRule"]

#: Returns the dtype of a result, None for an undefined result, or a tuple for a list of tensors.
DtypeRule = Callable[..., "torch.dtype | tuple[torch.dtype, ...] | None"]

DTYPE_RULES: dict[str, DtypeRule] = {
    rule.__name__: rule
    for rule in (
        from_operands.same,
        from_operands.one_dtype,
        from_operands.promoted,
        from_operands.floating,
        from_operands.real,
        from_operands.complex,
        from_operands.real_of_promoted,
        from_operands.accumulate,
        from_operands.truth,
        from_operands.bin_counts,
        from_operands.statistics,
        from_operands.wanted,
        from_operands.pieces,
        from_operands.pieces_of_sizes,
        from_operands.slices,
        from_operands.for_each,
        from_arguments.dtype_or_same,
        from_arguments.sum,
        from_arguments.mean,
        from_arguments.deviation,
        from_arguments.norm,
        from_arguments.output_dtype,
        from_arguments.softmax,
        from_arguments.dtype_or_default,
        from_arguments.dtype_or_int64,
        from_arguments.dtype_or_number,
        from_arguments.dtype_or_range,
        from_arguments.dtype_or_points,
        from_arguments.position,
        from_arguments.dtype_or_whole,
        from_branches.put,
        from_branches.rectified_gradient,
        from_branches.softmax_gradient,
        from_branches.workspace,
    )
}
