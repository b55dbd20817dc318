"""Makes calls of promoting ops from their schemas, with operands of given dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_promote.regions.promotion_tables import OPAQUE, PromotingOp, promoting_ops

#: The dtypes that stock promotes, and the unsigned ones that it promotes in part.
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

#: Python numbers of every kind, some of which do not survive rounding or do not fit.
NUMBERS = (True, 3, -1, 300, 2**31, 2.7, 1e6, 1.5 + 0.5j)

#: How a pair of operands lies: dimensions of each, or a Python number on one side.
SHAPES = (((2, 3), (2, 3)), ((2, 3), ()), ((), (2, 3)), ((), ()), ((2, 3), (1,)), ((2, 3), (3,)))

_VALUES = (1.1, 2.7, -3.3, 0.5, 100.3, 1.0)


def operand(dtype: torch.dtype, shape: tuple[int, ...], strided: bool = False) -> torch.Tensor:
    """Values that rounding changes; integers for integer dtypes."""
    count = 1
    for size in shape:
        count *= size
    values = torch.tensor(list(itertools.islice(itertools.cycle(_VALUES), count)), dtype=torch.float64)
    if dtype in (torch.complex32, torch.complex64, torch.complex128):
        values = torch.complex(values, -values / 3)
    tensor = (values.abs() if dtype in (torch.uint8, *UNSIGNED) else values).to(dtype).reshape(shape)
    if strided and len(shape) == 2:
        tensor = tensor.t().contiguous().t()
    return tensor


def overload(op: PromotingOp) -> torch._ops.OpOverload:
    packet, _, name = op.name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), name or "default")


def elementwise_ops() -> list[PromotingOp]:
    """The ops for which the schema is sufficient to make a call of two operands: all but matrix products."""
    return [op for op in promoting_ops() if op.computes != OPAQUE and not op.matmul]


def writes(op: PromotingOp) -> bool:
    return bool(op.functional)


def arguments_of(
    op: PromotingOp, first: Any, second: Any, rounding_mode: str | None = None, out: Any = None
) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of a call with two operands; None if the op takes no such operands in these places."""
    schema = overload(op)._schema
    operands = iter([first, second, *[second] * 4])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        kind = (
            str(argument.type).removeprefix("Optional[").removesuffix("]")
            if "Optional" in str(argument.type)
            else str(argument.type)
        )
        if argument.is_out:
            value = out
        elif place in op.participants:
            value = _as_argument(kind, next(operands), first, second, op)
            if value is NotImplemented:
                return None
        elif argument.name == "rounding_mode":
            value = rounding_mode
        elif kind == "Tensor":
            value = torch.tensor([[True, False, True], [False, True, True]])
        elif kind.startswith("List[Tensor"):
            value = [torch.ones(2, 3)] * 2
        elif argument.has_default_value():
            continue
        elif kind == "List[number]":
            value = [1, 1]
        else:
            value = {"int": 0, "bool": False}.get(kind, 1)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _as_argument(kind: str, value: Any, first: Any, second: Any, op: PromotingOp) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    if kind == "Tensor":
        return value if is_tensor else NotImplemented
    if kind == "number":
        return NotImplemented if is_tensor else value
    if kind == "List[number]":
        return NotImplemented if is_tensor else [value, value]
    if not is_tensor:
        return NotImplemented
    if op.each:
        return [value, value.clone()]
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return NotImplemented
    return [first, second]


Outcome = tuple[str, Any]


def outcome(function: Callable[[], Any]) -> Outcome:
    """The outcome of a call as comparable values: dtypes, strides, bits; or its error."""
    try:
        result = function()
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]
    return "result", described(result)


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().resolve_conj().resolve_neg()
        data = torch.empty(value.numel(), dtype=value.dtype).copy_(dense.reshape(-1))
        return str(value.dtype), tuple(value.shape), value.stride(), bytes(data.view(torch.uint8).tolist())
    if isinstance(value, list | tuple):
        return tuple(map(described, value))
    return value


#: Positional and keyword arguments.
Arguments = tuple[list[Any], dict[str, Any]]


def run(op: PromotingOp, arguments: Arguments, gradients: bool) -> list[Any]:
    """Calls an op on copies; returns its results, the written arguments, and the gradients."""
    args, kwargs = _copy(arguments[0]), {name: _copy(value) for name, value in arguments[1].items()}
    leaves = [leaf for leaf in _tensors(args) if leaf.is_floating_point() or leaf.is_complex()] if gradients else []
    for leaf in leaves:
        leaf.requires_grad_()
    result = overload(op)(*args, **kwargs)
    found = [result, args if writes(op) else None, kwargs.get("out")]
    differentiable = [tensor for tensor in _tensors(result) if tensor.requires_grad]
    if leaves and differentiable:
        total = sum((t.abs() if t.is_complex() else t).double().sum() for t in differentiable)
        found.append(torch.autograd.grad(total, leaves, allow_unused=True))
    return found


def outcome_in(
    region: AbstractContextManager[Any], op: PromotingOp, arguments: Arguments, gradients: bool = False
) -> Outcome:
    def call() -> list[Any]:
        with region:
            return run(op, arguments, gradients)

    return outcome(call)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copy(element) for element in value] if isinstance(value, list) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for element in value for tensor in _tensors(element)] if isinstance(value, list | tuple) else []
