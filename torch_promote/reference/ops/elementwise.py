"""The rules for elementwise ops, by their names in the `.rules` files. Each is a configuration of TensorIterator.

A rule is a function of the call, the names of its operands (default: all tensors) and `out`, the tensor that an out= op
writes to. It returns dtype, shape and strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch_promote.reference.elementwise.tensor_iterator import ElementwiseResult
from torch_promote.reference.ops import elementwise_allocated as allocated
from torch_promote.reference.ops import elementwise_iterated as iterated

__all__ = ["ELEMENTWISE_RULES", "ElementwiseRule"]

#: Returns the result of an elementwise op.
ElementwiseRule = Callable[..., ElementwiseResult]

ELEMENTWISE_RULES: dict[str, ElementwiseRule] = {
    preset: functools.partial(iterated.with_preset, preset)
    for preset in ("unary", "unary_float", "binary", "binary_float", "comparison", "ternary")
} | {
    rule.__name__: rule
    for rule in (
        iterated.threshold,
        iterated.in_dtype_of,
        iterated.product,
        iterated.quotient,
        iterated.where,
        iterated.complex_of,
        allocated.modulus,
        allocated.angle,
        allocated.like,
        allocated.like_float,
        allocated.into_like,
        allocated.is_infinite,
        allocated.with_numbers,
        allocated.power_of_number,
        allocated.times_power,
    )
}
