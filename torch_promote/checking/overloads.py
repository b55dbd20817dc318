"""Questions about an overload, and the tensors among its arguments and results."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_promote.dispatch_keys import AUTOCAST_KEY
from torch_promote.reference.autocast import tensors_in as tensors_by_path

__all__ = [
    "argument_names",
    "find_overload",
    "has_our_kernel",
    "is_composite",
    "leaves",
    "overload_name",
    "tensor_arguments",
    "tensors_in",
]


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def overload_name(op: torch._ops.OpOverload) -> str:
    """Returns an overload's name as the dispatcher spells it: `aten::add.Tensor`, `aten::mm`.

    Example:
        >>> overload_name(torch.ops.aten.mm.default)
        'aten::mm'
    """
    schema = op._schema
    return schema.name + (f".{schema.overload_name}" if schema.overload_name else "")


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def find_overload(name: str) -> torch._ops.OpOverload:
    """Returns the overload of a name that the dispatcher spells.

    Example:
        >>> find_overload("aten::softmax.int")
        <OpOverload(op='aten.softmax', overload='int')>
    """
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")
    assert isinstance(found, torch._ops.OpOverload), name
    return found


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def is_composite(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether an op has no kernel for a device type, and calls other ops instead, each of which is dispatched.

    Example:
        >>> is_composite(torch.ops.aten.linear.default, "cpu"), is_composite(torch.ops.aten.mm.default, "cpu")
        (True, False)
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = overload_name(op)
    own = torch._C._dispatch_key_for_device(device_type)
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, own)


def has_our_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether `my_autocast` has a kernel for an op, whatever its policy. Not cached: overrides and libraries add some.

    Example:
        >>> has_our_kernel(torch.ops.aten.mm.default)
        True
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload_name(op), AUTOCAST_KEY))


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Returns the names of an overload's arguments, in the schema's order.

    Example:
        >>> argument_names(torch.ops.aten.mm.default)
        ('self', 'mat2')
    """
    return tuple(argument.name for argument in op._schema.arguments)


def tensor_arguments(op: torch._ops.OpOverload, args: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors among a call's arguments, by their paths: `mat2`, `tensors[1]`, `inputs[key]`.

    Example:
        >>> [name for name, _ in tensor_arguments(torch.ops.aten.cat.default, [[torch.ones(1), torch.ones(1)], 0])]
        ['tensors[0]', 'tensors[1]']
    """
    for name, value in zip(argument_names(op), args, strict=False):
        yield from tensors_by_path(name, value)


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments or the results of a call, including those in containers.

    Example:
        >>> len(tensors_in([torch.ones(1), [torch.ones(1), None], 2]))
        2
    """
    return [leaf for leaf in leaves(values) if leaf is not None]


def leaves(values: Sequence[Any]) -> Iterator[torch.Tensor | None]:
    """Yields the tensors and the Nones among arguments or results, containers flattened.

    Example:
        >>> list(leaves([None, [2, None]]))
        [None, None]
    """
    for value in values:
        if value is None or isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from leaves(value)
        elif isinstance(value, Mapping):
            yield from leaves(tuple(value.values()))
