"""The named policies, derived from the rows of the op table that the running PyTorch registers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch

from torch_promote.policy.legality import why_illegal
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, op_table, schema_of

__all__ = [
    "EVERY_OP",
    "MEANINGS",
    "Change",
    "Value",
    "named_changes",
    "registered_ops",
    "replace_registered_ops",
    "stock_policy",
]


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
        "fp32_safe": "Stock, but an op that runs in float32 on one device type does so on every device type.",
        "fp32": "Runs every op of the table in float32, and every op that was added with `register_policy`.",
        "off": "Casts in no op of the table, and in none that was added with `register_policy`.",
    }
)
#: The named policies that give every op one policy, also those that were added with `register_policy`.
EVERY_OP: Mapping[str, CastPolicy] = MappingProxyType({"fp32": CastPolicy.fp32, "off": CastPolicy.fallthrough})

#: The policies with float32 results.
_SAFE = (CastPolicy.fp32, CastPolicy.fp32_set_opt_dtype, CastPolicy.fp32_append_dtype)
#: Ops outside the table that "fp32" names: their kernels need one dtype, or PyTorch casts inside them, where
#: only its own policies act.
_FP32_TOO = (
    "aten::_cudnn_rnn",
    "aten::_grouped_mm",
    "aten::_sparse_mm",
    "aten::_transformer_encoder_layer_fwd",
    "aten::embedding_bag",
    "aten::embedding_bag.padding_idx",
)


def stock_policy(overload: str, device_type: str) -> CastPolicy | None:
    """Returns the stock policy of an overload in the running PyTorch on "cpu" or "cuda".

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
    """Yields the entries of a named policy. Some may be equal to stock's.

    The policies in EVERY_OP need the ops of `registered_ops`.
    """
    every = EVERY_OP.get(name)
    for op in _column(DEVICE_TYPES[0]):
        stock = {device_type: stock_policy(op, device_type) for device_type in DEVICE_TYPES}
        safe = next((policy for policy in stock.values() if policy in _SAFE), None)
        for device_type in DEVICE_TYPES:
            if every is not None:
                yield op, device_type, every
            elif name in DEVICE_TYPES and device_type != name:
                yield op, device_type, stock[name] or CastPolicy.fallthrough
            elif name == "fp32_safe" and safe is not None and stock[device_type] not in _SAFE:
                yield op, device_type, safe
    if every is not None:
        others = itertools.chain(registered, itertools.product(_FP32_TOO, DEVICE_TYPES) if name == "fp32" else ())
        yield from ((op, device_type, every) for op, device_type in others if why_illegal(op, every) is None)


_ops: tuple[tuple[str, str], ...] = ()


def registered_ops() -> tuple[tuple[str, str], ...]:
    """Returns the ops that were given a policy, as pairs of an overload's full name and a device type, sorted."""
    return _ops


def replace_registered_ops(ops: Iterable[tuple[str, str]]) -> None:
    """Replaces what `registered_ops` returns."""
    global _ops
    _ops = tuple(sorted(ops))
