"""The policies that have a name, each made from the op table as the running PyTorch registers it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch

from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_table import DEVICE_TYPES, op_table, schema_of

__all__ = ["MEANINGS", "Change", "Value", "named_changes", "stock_policy"]

#: What an op may be given: a cast policy, or a floating dtype to run in.
Value = CastPolicy | torch.dtype
#: An overload's full name, a device type, and what the overload is given there.
Change = tuple[str, str, Value]

#: What each name means, in a sentence.
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "stock": "What PyTorch's autocast does.",
        "cpu": "What PyTorch's autocast does on the CPU, on every device type.",
        "cuda": "What PyTorch's autocast does on CUDA, on every device type.",
        "fp32_safe": "Stock, and float32 on every device type for an op that runs in float32 on one of them.",
        "off": "No op of the table is cast, and none that was registered with `register_policy`.",
    }
)

#: The policies that make the results float32.
_SAFE = (CastPolicy.fp32, CastPolicy.fp32_set_opt_dtype, CastPolicy.fp32_append_dtype)


def stock_policy(overload: str, device: str) -> CastPolicy | None:
    """Returns what stock autocast does with an overload in the running PyTorch.

    Args:
        overload: Its full name.
        device: "cpu" or "cuda".

    Returns:
        The policy of its row; `fallthrough` where the row has none or PyTorch does not register it. None where the
        table has no say: for an overload without a row, and for one of a row that PyTorch, or a library, registers
        where the table has no policy.

    Example:
        >>> stock_policy("aten::mm", "cpu"), stock_policy("aten::relu", "cpu")
        (<CastPolicy.lower_precision_fp: 'lower_precision_fp'>, None)
    """
    return _column(device).get(overload)


@functools.cache
def _column(device: str) -> Mapping[str, CastPolicy | None]:
    """What stock does with each row that the running PyTorch has."""
    key = f"Autocast{device.upper()}"
    column: dict[str, CastPolicy | None] = {}
    for row in op_table():
        if schema_of(row) is None:
            continue
        listed = row.policy(device) is not CastPolicy.fallthrough
        is_registered = torch._C._dispatch_has_kernel_for_dispatch_key(row.name, key)
        column[row.name] = row.policy(device) if listed and is_registered else CastPolicy.fallthrough
        if is_registered and not listed:
            column[row.name] = None
    return MappingProxyType(column)


def named_changes(name: str, registered: Iterable[tuple[str, str]] = ()) -> Iterator[Change]:
    """Yields what a named policy says about ops; some of it may be what stock says too.

    Args:
        name: One of `MEANINGS`.
        registered: The ops that `register_policy` was called for, with their device types, for `off`.

    Example:
        >>> ("aten::exp", "cpu", CastPolicy.fp32) in named_changes("cuda")
        True
        >>> list(named_changes("stock"))
        []
    """
    if name in DEVICE_TYPES:
        yield from _list_of(name)
    elif name == "fp32_safe":
        yield from _fp32_safe()
    elif name == "off":
        yield from _off(registered)


def _list_of(listed: str) -> Iterator[Change]:
    others = [device for device in DEVICE_TYPES if device != listed]
    for op, policy in _column(listed).items():
        for device in others:
            yield op, device, policy or CastPolicy.fallthrough


def _fp32_safe() -> Iterator[Change]:
    """Each device keeps its own way to float32; a device that has none gets the other's."""
    for op in _column(DEVICE_TYPES[0]):
        safe = [policy for device in DEVICE_TYPES if (policy := stock_policy(op, device)) in _SAFE]
        for device in DEVICE_TYPES:
            if safe and stock_policy(op, device) not in _SAFE:
                assert safe[0] is not None
                yield op, device, safe[0]


def _off(registered: Iterable[tuple[str, str]]) -> Iterator[Change]:
    for op in _column(DEVICE_TYPES[0]):
        for device in DEVICE_TYPES:
            yield op, device, CastPolicy.fallthrough
    for op, device in registered:
        yield op, device, CastPolicy.fallthrough
