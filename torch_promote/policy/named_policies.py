"""The named policies, derived from the rows of the op table that the running PyTorch registers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch

from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, op_table, schema_of

__all__ = ["MEANINGS", "Change", "Value", "named_changes", "registered_ops", "replace_registered_ops", "stock_policy"]


#: The policy of an op: a cast policy, or a floating dtype to run in.
Value = CastPolicy | torch.dtype
#: An overload's full name, a device type, and the overload's policy there.
Change = tuple[str, str, Value]

#: What each named policy does, in a sentence.
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "stock": "What PyTorch's autocast does.",
        "cpu": "What PyTorch's autocast does on the CPU, on every device type.",
        "cuda": "What PyTorch's autocast does on CUDA, on every device type.",
        "xpu": "What PyTorch's autocast does on XPU, on every device type.",
        "mps": "What PyTorch's autocast does on MPS, on every device type.",
        "fp32_safe": "Stock, but an op that runs in float32 on one device type does so on every device type.",
        "off": "Casts in no op of the table, and in none that was added with `register_policy`.",
    }
)

#: The policies with float32 results.
_SAFE = (CastPolicy.fp32, CastPolicy.fp32_set_opt_dtype, CastPolicy.fp32_append_dtype)


def stock_policy(overload: str, device_type: str) -> CastPolicy | None:
    """Returns the stock policy of an overload in the running PyTorch on one of `DEVICE_TYPES`.

    That is the policy of its row, or `fallthrough` if the row has none for the device type, or PyTorch does not
    register it. None: the table does not know, because the overload has no row, or because PyTorch or a library
    registers it on a device type for which its row has no policy.
    """
    return _column(device_type).get(overload)


@functools.cache
def _column(device_type: str) -> Mapping[str, CastPolicy | None]:
    """The stock policy of each row that exists in the running PyTorch."""
    key = f"Autocast{device_type.upper()}"
    column: dict[str, CastPolicy | None] = {}
    for row in op_table():
        if schema_of(row) is None:
            continue
        listed = row.policy(device_type) is not CastPolicy.fallthrough
        is_registered = torch._C._dispatch_has_kernel_for_dispatch_key(row.name, key)
        column[row.name] = row.policy(device_type) if listed and is_registered else CastPolicy.fallthrough
        if is_registered and not listed:
            column[row.name] = None
    return MappingProxyType(column)


def named_changes(name: str, registered: Iterable[tuple[str, str]] = ()) -> Iterator[Change]:
    """Yields the entries of a named policy. Some may be equal to stock's. `off` needs the ops of `registered_ops`."""
    for op in _column(DEVICE_TYPES[0]):
        stock = {device_type: stock_policy(op, device_type) for device_type in DEVICE_TYPES}
        safe = next((policy for policy in stock.values() if policy in _SAFE), None)
        for device_type in DEVICE_TYPES:
            if name == "off":
                yield op, device_type, CastPolicy.fallthrough
            elif name in DEVICE_TYPES and device_type != name:
                yield op, device_type, stock[name] or CastPolicy.fallthrough
            elif name == "fp32_safe" and safe is not None and stock[device_type] not in _SAFE:
                yield op, device_type, safe
    if name == "off":
        yield from ((op, device_type, CastPolicy.fallthrough) for op, device_type in registered)


_ops: tuple[tuple[str, str], ...] = ()


def registered_ops() -> tuple[tuple[str, str], ...]:
    """Returns the ops that were given a policy, as pairs of an overload's full name and a device type, sorted."""
    return _ops


def replace_registered_ops(ops: Iterable[tuple[str, str]]) -> None:
    """Replaces what `registered_ops` returns."""
    global _ops
    _ops = tuple(sorted(ops))
