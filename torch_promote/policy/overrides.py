"""Overrides: what a user writes, checked, as a policy for each overload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_promote.errors import DeviceTypeError, PolicyError, UnsupportedDeviceError, did_you_mean
from torch_promote.policy.cast_policy import POLICY_ALIASES, CastPolicy, spell_policy
from torch_promote.policy.legality import check_legal, legal_policies, legal_text, why_illegal
from torch_promote.policy.op_names import find_overloads, in_order, spell_key
from torch_promote.policy.op_table import DEVICE_TYPES

__all__ = ["LEGAL_DEVICES", "check_device_types", "parse_overrides", "parse_policy", "select"]

_NAMES = [*(policy.value for policy in CastPolicy), *POLICY_ALIASES]
_LEGAL_VALUES = f"Legal: {', '.join(_NAMES)} or a floating dtype."
#: The end of errors about device types.
LEGAL_DEVICES = f" Legal: {', '.join(map(repr, DEVICE_TYPES))}."
#: How many overloads an error names for each reason.
_SHOWN = 3


def parse_overrides(overrides: Mapping[Any, Any]) -> tuple[tuple[str, CastPolicy | torch.dtype], ...]:
    """Checks overrides, and returns the policy of each overload that they select.

    Args:
        overrides: Maps ops, named as in `find_overloads`, to policies: the name of a cast policy, a `CastPolicy`, a
            floating `torch.dtype` or its name. If a key selects several overloads, those for which the
            policy is legal get it.

    Returns:
        Pairs of an overload's full name and its policy, in the order of `in_order`.

    Raises:
        PolicyError: An op or a policy does not exist, a policy is not legal for an op, or two keys give the same
            overload different policies.

    Example:
        >>> [(name, policy.value) for name, policy in parse_overrides({"mm.out": "match_self", "mm.default": "fp16"})]
        [('aten::mm', 'lower_precision_fp'), ('aten::mm.out', 'match_self')]
    """
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"overrides must be a mapping of ops to policies, got {type(overrides).__name__}.")
    chosen: dict[str, tuple[CastPolicy | torch.dtype, object]] = {}
    for key, value in overrides.items():
        policy, names = select(key, value)
        for name in names:
            known = chosen.setdefault(name, (policy, key))
            if known[0] != policy:
                raise PolicyError(
                    f"{name} gets two policies, {spell_policy(known[0])!r} from {known[1]!r} and "
                    f"{spell_policy(policy)!r} from {key!r}. Name each overload once."
                )
    return tuple((name, chosen[name][0]) for name in in_order(chosen))


def select(key: object, value: object) -> tuple[CastPolicy | torch.dtype, tuple[str, ...]]:
    """Returns a policy, and the overloads that a key selects and for which the policy is legal.

    Args:
        key: An op, named as in `find_overloads`.
        value: A policy, written as in `parse_overrides`.

    Returns:
        The policy, and one or more full names.

    Raises:
        PolicyError: The op or the policy does not exist, or the policy is legal for none of the overloads.

    Example:
        >>> policy, overloads = select("softmax", "fp32")
        >>> policy, "aten::softmax.int" in overloads, "aten::softmax.int_out" in overloads
        (<CastPolicy.fp32: 'fp32'>, True, False)
    """
    names = find_overloads(key)
    policy = parse_policy(value, names[0] if len(names) == 1 else repr(spell_key(key)))
    if len(names) == 1:
        check_legal(names[0], policy)
        return policy, names
    reasons = {name: why_illegal(name, policy) for name in names}
    legal = tuple(name for name, why in reasons.items() if why is None)
    if not legal:
        raise PolicyError(_illegal_for_all(spell_key(key), policy, reasons))
    return policy, legal


def _illegal_for_all(key: str, policy: CastPolicy | torch.dtype, reasons: Mapping[str, str | None]) -> str:
    by_reason: dict[str | None, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    text = "; ".join(f"{why} ({_some(names)})" for why, names in by_reason.items())
    legal = {policy for name in reasons for policy in legal_policies(name)}
    for_some = legal_text(policy for policy in CastPolicy if policy in legal).replace(" Legal:", " Legal for some:")
    return f"none of the {len(reasons)} overloads of {key!r} can use {spell_policy(policy)!r}: {text}.{for_some}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def parse_policy(value: object, op: str = "") -> CastPolicy | torch.dtype:
    """Returns the policy that a user's value stands for.

    Args:
        value: A `CastPolicy` or its name, a floating `torch.dtype` or its name.
        op: The op that the policy is for, which starts the error text. Empty: errors name no op.

    Raises:
        PolicyError: The value is none of these.

    Example:
        >>> parse_policy("fp16", "mm"), parse_policy("torch.bfloat16", "mm")
        (<CastPolicy.lower_precision_fp: 'lower_precision_fp'>, torch.bfloat16)
    """
    where = f"{op}: " if op else ""
    if isinstance(value, CastPolicy):
        return value
    if isinstance(value, torch.dtype):
        if value.is_floating_point:
            return value
        raise PolicyError(f"{where}{value} is not a floating dtype. {_LEGAL_VALUES}")
    if not isinstance(value, str):
        raise PolicyError(f"{where}a policy is a str, a CastPolicy or a torch.dtype, got {value!r}. {_LEGAL_VALUES}")
    try:
        return CastPolicy(value)
    except ValueError:
        pass
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return parse_policy(dtype, op)
    raise PolicyError(f"{where}no cast policy is called {value!r}.{did_you_mean(value, _NAMES)} {_LEGAL_VALUES}")


def check_device_types(device: object) -> tuple[str, ...]:
    """Returns the device types that a user names: one, a sequence of them, or None for all.

    Raises:
        DeviceTypeError: A device type is not a str, or a sequence is empty or has duplicates.
        UnsupportedDeviceError: This package has no policies for a device type.
    """
    names = DEVICE_TYPES if device is None else (device,) if isinstance(device, str) else device
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise DeviceTypeError(f"device is a device type, a sequence of them or None, got {device!r}.{LEGAL_DEVICES}")
    for name in names:
        if name not in DEVICE_TYPES:
            raise UnsupportedDeviceError(f"a policy has no device type {name!r}.{LEGAL_DEVICES}")
    if len(set(names)) < len(names):
        raise DeviceTypeError(f"device {list(names)!r} contains a duplicate. Name each device type once.")
    return tuple(names)
