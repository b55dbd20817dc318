"""A call of an op: its arguments by name, including the schema's defaults, and the tensors among them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_promote.reference.promotion import Number, Operand
from torch_promote.reference.strides import contiguous_strides
from torch_promote.reference.tensor_iterator import wrap_number

#: A tensor, or the description of one.
TensorLike = torch.Tensor | Operand

_TENSOR = ("Tensor", "Optional[Tensor]")
_TENSORS = ("List[Tensor]", "Optional[List[Tensor]]", "List[Optional[Tensor]]")


@dataclass(frozen=True)
class Argument:
    """One argument of a schema."""

    # Source: aten/src/ATen/core/function_schema.h, Argument (v2.13).

    name: str
    type: str  # as the schema prints it, such as `Optional[Tensor]`
    default: Any
    alias: frozenset[str]  # the names of its alias sets; empty for most arguments
    written: bool  # whether the op writes to it
    is_out: bool  # whether it only receives the result, like `out`

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor or an optional tensor."""
        return self.type in _TENSOR

    @property
    def is_list(self) -> bool:
        """Whether it is a list of tensors."""
        return self.type in _TENSORS


@dataclass(frozen=True)
class Signature:
    """The schema of an overload."""

    # Source: aten/src/ATen/core/function_schema.h, FunctionSchema (v2.13).

    name: str  # such as `aten::add.Tensor`, or `aten::mm` for the default overload
    arguments: tuple[Argument, ...]
    # each result's type, and the name of the written argument that is returned, if any
    returns: tuple[tuple[str, str | None], ...]


def _argument(argument: Any) -> Argument:
    alias = argument.alias_info
    return Argument(
        name=argument.name,
        type=str(argument.real_type),
        default=argument.default_value if argument.has_default_value() else None,
        alias=frozenset(alias.before_set) if alias is not None else frozenset(),
        written=alias is not None and bool(alias.is_write),
        is_out=bool(argument.is_out),
    )


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def signature_of(op: torch._ops.OpOverload) -> Signature:
    """Returns the schema of an overload."""
    schema = op._schema
    arguments = tuple(_argument(argument) for argument in schema.arguments)
    returns = []
    for returned in schema.returns:
        alias = set(returned.alias_info.before_set) if returned.alias_info is not None else set()
        written = [a.name for a in arguments if a.written and alias & a.alias]
        returns.append((str(returned.real_type), written[0] if written else None))
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    return Signature(name, arguments, tuple(returns))


def described(tensor: TensorLike) -> Operand:
    """Returns the description of a tensor. One without strides, such as a sparse tensor, counts as contiguous."""
    if isinstance(tensor, Operand):
        return tensor
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return Operand(tensor.dtype, tuple(tensor.shape), strides, tensor.device.type)


def strides_of(tensor: TensorLike) -> tuple[int, ...]:
    """Returns the strides of a tensor or its description."""
    strides = tensor.strides if isinstance(tensor, Operand) else tensor.stride()
    return contiguous_strides(tensor.shape) if strides is None else tuple(strides)


@dataclass(frozen=True)
class Call(Mapping[str, Any]):
    """A call of an op, as a mapping of argument names to values."""

    signature: Signature
    bound: dict[str, Any] = field(repr=False)  # includes the schema's defaults
    default_dtype: torch.dtype

    @classmethod
    def of(
        cls, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], default_dtype: torch.dtype
    ) -> Call:
        """Binds arguments as the dispatcher does: by position, by name, then by default."""
        # Source: torch/csrc/jit/python/pybind_utils.h, createStackForSchema (v2.13).
        signature = signature_of(op)
        values = {argument.name: argument.default for argument in signature.arguments}
        values.update(zip(values, args, strict=False))
        values.update(kwargs)
        return cls(signature, values, default_dtype)

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.bound)

    def __len__(self) -> int:
        return len(self.bound)

    def operands(self, *names: str) -> Iterator[TensorLike | Number]:
        """Yields the tensors of the named arguments, or of all but `out`; those of lists one by one."""
        # Absent tensors are skipped. A Python number may be passed for a tensor: PyTorch's wrapped number.
        chosen = names or tuple(a.name for a in self.signature.arguments if (a.is_tensor or a.is_list) and not a.is_out)
        for name in chosen:
            value = self.bound[name]
            is_list = isinstance(value, list | tuple) and not isinstance(value, Operand)
            for operand in value if is_list else (value,):
                if operand is not None:
                    yield operand

    def tensor(self, name: str | None = None) -> TensorLike:
        """Returns the named tensor (the first of a list), or the call's first; a number as its 0-dim operand."""
        operand = next(self.operands(*(() if name is None else (name,))))
        return operand if isinstance(operand, TensorLike) else wrap_number(operand)

    def without_layout(self) -> Call | None:
        """Returns the call with descriptions of its tensors without strides, such as sparse ones. None: it has none."""
        odd = {
            name: described(value)
            for name, value in self.bound.items()
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided
        }
        return replace(self, bound=self.bound | odd) if odd else None
