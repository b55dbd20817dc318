"""The tensors of a call that autocast may cast, those whose dtypes `promote` considers, and the call's device types.

A tensor is identified by a path: `mat2`, `tensors[1]`, `inputs[key]`, `pairs[0][1]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_promote.reference.ops.call import Argument, Call

__all__ = ["Candidate", "candidates", "devices_of", "replace_tensors", "tensors_in", "written_tensors"]


class Candidate(NamedTuple):
    """A tensor that autocast may cast.

    Attributes:
        path: Its path.
        tensor: The tensor.
        asked: Whether `promote` considers its dtype.

    Example:
        >>> Candidate("mat2", torch.ones(1), asked=True).path
        'mat2'
    """

    path: str
    tensor: torch.Tensor
    asked: bool


def candidates(call: Call, *, in_table: bool) -> Iterator[Candidate]:
    """Yields the tensors of a call that may be cast, in schema order, without the arguments that the op writes to.

    Args:
        call: The call.
        in_table: Whether the op has a row in the op table. Its candidates are then tensors, optional tensors and lists
            of tensors; as in PyTorch, lists of optional tensors such as index_put's indices are not. For any other op,
            every tensor in any argument is a candidate.

    Example:
        >>> call = Call.of(torch.ops.aten.mm.out, [torch.ones(1, 1)] * 2, {"out": torch.ones(1, 1)}, torch.float32)
        >>> [candidate.path for candidate in candidates(call, in_table=False)]
        ['self', 'mat2']

    Source: aten/src/ATen/autocast_mode.h, cached_cast (v2.13).
    """
    for argument in call.signature.arguments:
        if argument.written or (in_table and not (argument.is_tensor or argument.type == "List[Tensor]")):
            continue
        asked = _is_asked(argument)
        for path, tensor in tensors_in(argument.name, call[argument.name]):
            yield Candidate(path, tensor, asked)


def _is_asked(argument: Argument) -> bool:
    """`promote` casts optional tensors without considering their dtypes."""
    return not argument.type.startswith(("Optional[", "List[Optional["))


def written_tensors(call: Call) -> Iterator[torch.Tensor]:
    """Yields the tensors that the op writes to, in schema order.

    Example:
        >>> x, out = torch.ones(1, 1), torch.zeros(1, 1)
        >>> call = Call.of(torch.ops.aten.mm.out, (x, x), {"out": out}, torch.float32)
        >>> [tensor is out for tensor in written_tensors(call)]
        [True]
    """
    for argument in call.signature.arguments:
        if argument.written:
            yield from (tensor for _, tensor in tensors_in(argument.name, call[argument.name]))


def tensors_in(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in a value with their paths: the value itself, or tensors in lists, tuples and dicts.

    Example:
        >>> [path for path, _ in tensors_in("x", (torch.ones(1), [None, {"k": torch.ones(1)}]))]
        ['x[0]', 'x[1][1][k]']
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(f"{path}[{key}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(f"{path}[{index}]", item)


def replace_tensors(path: str, value: Any, chosen: Mapping[str, Any]) -> Any:
    """Returns a value with the tensors at some paths replaced.

    Args:
        path: The value's own path, such as an argument's name.
        value: A tensor, a container, or anything else.
        chosen: The replacement for each path.

    Example:
        >>> replace_tensors("x", [torch.ones(1), {"k": 2}], {"x[0]": 1, "y": 3})
        [1, {'k': 2}]
    """
    if path in chosen:
        return chosen[path]
    if isinstance(value, Mapping):
        return {key: replace_tensors(f"{path}[{key}]", item, chosen) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [replace_tensors(f"{path}[{index}]", item, chosen) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def devices_of(call: Call) -> set[str]:
    """Returns the device types that take part in dispatch. A Python number passed for a tensor is on the CPU.

    MKLDNN tensors do not take part: their dispatch keys include no backend, and backends determine the Autocast keys.

    Example:
        >>> call = Call.of(torch.ops.aten.add.Tensor, (torch.ones(1, device="meta"), 2), {}, torch.float32)
        >>> sorted(devices_of(call))
        ['cpu', 'meta']

    Source: c10/core/DispatchKeySet.h, getAutocastRelatedKeySetFromBackend (v2.13).
    """
    found = set()
    for argument in call.signature.arguments:
        value = call[argument.name]
        if argument.is_tensor and value is not None and not isinstance(value, torch.Tensor):
            found.add("cpu")
        found |= {tensor.device.type for _, tensor in tensors_in(argument.name, value) if not tensor.is_mkldnn}
    return found
