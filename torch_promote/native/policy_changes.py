"""Converts policies for the extension and back: registers changes under numbers, and reads the current policy."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from torch_promote import _C
from torch_promote.errors import PolicyError
from torch_promote.native.module_tables import is_marker
from torch_promote.native.region_spec import DTYPE_NUMBERS
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy

__all__ = ["Named", "policies_beyond_stock", "policy_byte", "register_change"]

#: The policy bytes of an op that stock's policy does not list.
_UNLISTED = (0,) * len(DEVICE_TYPES)


class Named(NamedTuple):
    """An op that overrides name without a pattern. Regions of the change note whether a call reaches it.

    Attributes:
        overloads: The full names of the overloads that get the policy.
        fused: The rows of the op table that compute the same and more.
        policy: The policy.
    """

    overloads: tuple[str, ...]
    fused: tuple[str, ...]
    policy: CastPolicy | torch.dtype


def register_change(
    changes: Iterable[tuple[str, str, CastPolicy | torch.dtype]],
    replaces: bool = False,
    named: Iterable[Named] = (),
) -> int:
    """Returns the number of a change of policy in the extension. An op without a row gets a kernel on the autocast key.

    Args:
        changes: Full names of overloads, device types, and policies that are legal for them.
        replaces: Whether the change starts from stock's policy and what `register_policy` added, and not from the
            policy of the region around.
        named: The ops that the changes name; see NOTE [ Unused overrides ] in csrc/region/named_use.h.

    Raises:
        PolicyError: The extension cannot give one of the ops a kernel.
    """
    coded = [
        (_op_number(name), DEVICE_TYPES.index(device_type), policy_byte(policy))
        for name, device_type, policy in changes
    ]
    noted = [
        (
            [_op_number(name) for name in one.overloads],
            [_op_number(name) for name in one.fused],
            policy_byte(one.policy),
        )
        for one in named
    ]
    return _C.register_change(coded, replaces, noted)


def _op_number(name: str) -> int:
    namespace, colons, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    try:
        return _C.register_op(namespace + colons + op, overload)
    except (RuntimeError, ValueError) as error:
        raise PolicyError(str(error).partition("\n")[0]) from error


def policy_byte(policy: CastPolicy | torch.dtype) -> int:
    """Returns the byte of a policy in the extension's tables."""
    if isinstance(policy, CastPolicy):
        return _C.POLICY_BYTES[policy.value]
    return _C.POLICY_BYTES["run_in"] + DTYPE_NUMBERS[policy]


def policies_beyond_stock() -> dict[str, dict[str, CastPolicy | torch.dtype]]:
    """Returns this thread's current policies that differ from stock, by overload and device type."""
    found = {}
    for name, bytes_ in _C.current_policy().items():
        if is_marker(name):
            continue
        changed = zip(DEVICE_TYPES, bytes_, _stock_bytes().get(name, _UNLISTED), strict=True)
        found[name] = {device: _policy(byte) for device, byte, stock in changed if byte != stock}
    return found


@functools.cache
def _stock_bytes() -> dict[str, tuple[int, ...]]:
    return dict(zip(_C.OP_ENTRY_NAMES, zip(*_C.stock_policy_bytes(), strict=True), strict=True))


def _policy(byte: int) -> CastPolicy | torch.dtype:
    run_in = _C.POLICY_BYTES["run_in"]
    return _dtypes()[byte - run_in] if byte >= run_in else CastPolicy(_names()[byte])


@functools.cache
def _names() -> dict[int, str]:
    return {byte: name for name, byte in _C.POLICY_BYTES.items()}


@functools.cache
def _dtypes() -> dict[int, torch.dtype]:
    return {_C.scalar_type(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
