"""The policy of a module, and a call of a forward under it, which runs in a nested region."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torch_promote._C import HeldChange
from torch_promote.errors import PolicyError, RegionError
from torch_promote.native.region_spec import RegionSpec
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_names import spell_key
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.overrides import advice_for
from torch_promote.policy.policy import Policy
from torch_promote.regions.arguments import check_devices, policy_number
from torch_promote.regions.base import Region

__all__ = ["ModulePolicy", "run_under", "traced_by_fx"]


class ModulePolicy:
    """The policy of a module.

    Args:
        value: As in `set_module_policy`.

    Attributes:
        value: The policy. The ops and cast policies of a mapping are names; a file is replaced by its policy.
        change: The number of the change to the surrounding policy; None: the region disables autocast.

    Raises:
        PolicyError: The policy does not exist, or is not legal.
    """

    __slots__ = ("_held", "change", "value")

    def __init__(self, value: object) -> None:
        self.value: dict[str, str] | Policy | str
        self.change: int | None = None
        if isinstance(value, str) and value in ("fp32", "off"):
            self.value = value
        else:
            self.value = _by_name(value) if isinstance(value, Mapping) else _policy(value)
            self.change = _change_of(self.value)
            self._held = HeldChange(self.change)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModulePolicy) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return ModulePolicy, (self.value,)  # the change is a number that is valid only in this process

    def __deepcopy__(self, memo: object) -> ModulePolicy:
        return self

    @property
    def description(self) -> str:
        """The policy in full, the same in every process."""
        if isinstance(self.value, dict) or self.value in ("fp32", "off"):
            return str(self)
        policy = Policy.of(self.value)
        return f"{policy!r} {policy.to_dict()}"

    def __str__(self) -> str:
        if isinstance(self.value, dict):
            return "{" + ", ".join(f"{op}: {policy}" for op, policy in self.value.items()) + "}"
        return self.value if isinstance(self.value, str) else repr(self.value)


def _by_name(overrides: Mapping[Any, Any]) -> dict[str, str]:
    """Overrides in a form that can be printed, compared and pickled."""

    def policy(value: Any) -> Any:
        if isinstance(value, CastPolicy):
            return value.value
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

    named: dict[str, str] = {}
    for key, value in overrides.items():
        op = spell_key(key)
        if named.setdefault(op, policy(value)) != policy(value):
            raise PolicyError(f"{op!r} gets two policies, {named[op]!r} and {policy(value)!r}. Name it once.")
    return named


def _policy(value: Any) -> Policy | str:
    """A policy in a form that can be pickled: a name stays a name, a file is read now."""
    if isinstance(value, torch.dtype | str) and (advice := advice_for(value)):
        shown = repr(value) if isinstance(value, str) else str(value)
        raise PolicyError(
            f"{shown} is not a policy of a module. Legal: 'fp32', 'off', a policy or a mapping of overrides.{advice}"
        )
    return value if value in Policy.names() else Policy.of(value)


def _change_of(value: dict[str, str] | Policy | str) -> int:
    return policy_number(None, value) if isinstance(value, dict) else policy_number(value, None)


def run_under(
    policies: tuple[ModulePolicy, ...], module: nn.Module, forward: Callable[..., Any] | None, args: Any, kwargs: Any
) -> Any:
    """Runs a forward of a module, by default that of its class, as policies say, of which the first is outermost."""
    if not policies:
        return forward(*args, **kwargs) if forward is not None else type(module).forward(module, *args, **kwargs)
    policy, *inner = policies
    if inner:
        forward = functools.partial(_run_inside, tuple(inner), module, forward)
    elif forward is None:
        forward, args = type(module).forward, (module, *args)
    _check_not_traced(module, (*args, *kwargs.values()))
    devices = _enabled_devices()
    if not devices:
        return forward(*args, **kwargs)
    if policy.value == "fp32":
        args, kwargs = tree_map(functools.partial(_to_float32, devices), (args, kwargs))
    with Region(_packed_inside(policy.change)):
        return forward(*args, **kwargs)


def _run_inside(
    policies: tuple[ModulePolicy, ...],
    module: nn.Module,
    forward: Callable[..., Any] | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return run_under(policies, module, forward, args, kwargs)


def _check_not_traced(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    for value in inputs:
        if isinstance(value, torch.fx.Proxy):
            raise traced_by_fx(module)


def traced_by_fx(module: nn.Module) -> RegionError:
    """The error for a module with a policy that torch.fx traces."""
    return RegionError(
        f"torch.fx traces a {type(module).__name__} with a policy. Its graphs cannot contain regions, so the policy "
        f"would be lost. Call remove_module_policy first, and set policies on modules of the graph."
    )


def _enabled_devices() -> list[str]:
    return [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]


def _to_float32(devices: list[str], value: Any) -> Any:
    """Casts eligible tensors: floating, not float64, on a device type whose autocast is on.

    Source: torch/amp/autocast_mode.py, _cast (v2.13).
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.device.type not in devices:
        return value
    return value if value.dtype is torch.float64 else value.to(torch.float32)


def _packed_inside(policy_change: int | None) -> str:
    """The packed spec of a region that changes only the policy, or, for None, disables autocast."""
    cache_enabled = torch.is_autocast_cache_enabled()
    if policy_change is None:
        return RegionSpec(check_devices(_enabled_devices(), None, False), cache_enabled).pack()
    return RegionSpec(cache_enabled=cache_enabled, policy_change=policy_change).pack()


# Dynamo calls it while tracing. Dynamo guards on the state that it depends on.
_packed_inside._dynamo_marked_constant = True  # type: ignore[attr-defined]
