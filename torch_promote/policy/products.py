"""Which matrix products compute another one and add a tensor to it."""

from __future__ import annotations

import functools
import re

from torch_promote.policy.op_table import rows_by_name

__all__ = ["with_addend"]

#: The names of products that add: `addmm` is `mm` and an addition, `baddbmm` is `bmm` and one.
_WITH_ADDEND = re.compile(r"aten::b?add(?P<product>\w+)")


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def with_addend(op: str) -> tuple[str, ...]:
    """Returns the rows of the op table that compute what another row computes, and add a tensor.

    Args:
        op: The full name of an op, without an overload.

    Example:
        >>> with_addend("aten::mm"), with_addend("aten::bmm"), with_addend("aten::softmax")
        (('aten::addmm',), ('aten::addbmm', 'aten::baddbmm'), ())

    Source: aten/src/ATen/native/LinearAlgebra.cpp, addmm, baddbmm, addbmm; Blas.cpp, addmv (v2.13).
    """
    found = ((name, _WITH_ADDEND.fullmatch(name.partition(".")[0])) for name in rows_by_name())
    return tuple(name for name, match in found if match and f"aten::{match['product']}" == op)
