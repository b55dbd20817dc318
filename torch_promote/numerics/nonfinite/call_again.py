"""Repeats a call in another dtype, without side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_promote.checking.overloads import leaves
from torch_promote.numerics.ranges.unnoticed import unnoticed

__all__ = ["BETWEEN_PROCESSES", "call_again"]

_LOWER = (torch.float16, torch.bfloat16)
#: Namespaces of ops that every process must call equally often.
BETWEEN_PROCESSES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def call_again(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    dtype: torch.dtype,
    before: Mapping[int, torch.Tensor] | None = None,
) -> list[torch.Tensor] | None:
    """Repeats a call on copies of its arguments in another dtype, without autocast.

    Random numbers are drawn from the current state of the generators, which is restored.

    Args:
        op: The overload.
        args: All its arguments, in the schema's order.
        dtype: The dtype of the copies of floating point tensors. It also replaces narrower dtypes among the arguments.
        before: Copies of arguments that the original call has overwritten, keyed by the id of the tensor.

    Returns:
        The tensors among the results; None if the call fails in this dtype, or communicates between processes.

    Example:
        >>> call_again(torch.ops.aten.exp.default, [torch.tensor([12.0], dtype=torch.float16)], torch.float32)
        [tensor([162754.7969])]
    """
    if op.namespace in BETWEEN_PROCESSES:
        return None

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = value if before is None else before.get(id(value), value)
            if tensor.is_floating_point():
                return tensor.to(dtype, copy=True)
            return tensor.to(_COMPLEX[dtype], copy=True) if tensor.is_complex() else tensor.clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, torch.dtype):
            return dtype if value in _LOWER or value is torch.float32 else value
        if isinstance(value, list | tuple):
            return [convert(one) for one in value]
        return value

    random = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        with unnoticed():
            converted = list(zip(op._schema.arguments, (convert(value) for value in args), strict=True))
            positional = [value for argument, value in converted if not argument.kwarg_only]
            named = {argument.name: value for argument, value in converted if argument.kwarg_only}
            results = op(*positional, **named)
    except Exception:  # an op may refuse the dtype, or the changed arguments
        return None
    finally:
        torch.set_rng_state(random)
        if on_gpu is not None:
            torch.cuda.set_rng_state_all(on_gpu)
    return [
        tensor for tensor in leaves(results if isinstance(results, list | tuple) else [results]) if tensor is not None
    ]
