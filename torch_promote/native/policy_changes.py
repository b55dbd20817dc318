"""Registers changes of policy with the extension, which gives each a number."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_promote import _C
from torch_promote.errors import PolicyError
from torch_promote.native.region_spec import DTYPE_NUMBERS
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_table import DEVICE_TYPES

__all__ = ["policy_byte", "register_change"]


def register_change(changes: Iterable[tuple[str, str, CastPolicy | torch.dtype]], replaces: bool = False) -> int:
    """Returns the number of a change of policy in the extension. An op without a row gets a kernel on the autocast key.

    Args:
        changes: Full names of overloads, device types, and policies that are legal for them.
        replaces: Whether the change starts from stock's policy and what `register_policy` added, and not from the
            policy of the region around.

    Raises:
        PolicyError: The extension cannot give one of the ops a kernel.
    """
    coded = [
        (_op_number(name), DEVICE_TYPES.index(device_type), policy_byte(policy))
        for name, device_type, policy in changes
    ]
    return _C.register_change(coded, replaces)


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
