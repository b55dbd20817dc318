"""Gives a module a policy: replaces its class by a subclass whose forward runs in a nested region.

An attribute of the instance, which is not in the state_dict, holds the policy. Each class has one such subclass, with
the same name; if the attribute is missing, it calls the class's forward directly. FSDP2 and parametrizations replace
classes in the same way, and may do so before or after.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from torch_promote.errors import PolicyError, RegionError
from torch_promote.integrations.compile import GraphRegion
from torch_promote.native.region_spec import RegionSpec
from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.policy.op_names import spell_key
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.policy import Policy
from torch_promote.regions.arguments import check_devices, policy_number
from torch_promote.regions.base import Region

__all__ = ["ModulePolicy", "attach", "detach", "policy_class", "policy_of"]

_ATTRIBUTE = "_torch_promote_policy"
_BASE = "_torch_promote_base"  # class attribute of a subclass: the class that it extends


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

    __slots__ = ("change", "value")

    def __init__(self, value: object) -> None:
        self.value: dict[str, str] | Policy | str
        self.change: int | None = None
        if isinstance(value, str) and value in ("fp32", "off"):
            self.value = value
        else:
            self.value = _by_name(value) if isinstance(value, Mapping) else _policy(value)
            self.change = _change_of(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModulePolicy) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return ModulePolicy, (self.value,)  # the change is a number that is valid only in this process

    def __deepcopy__(self, memo: object) -> ModulePolicy:
        return self

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
    if isinstance(value, torch.dtype):
        raise PolicyError(
            f"{value} is not a policy of a module. Legal: 'fp32', 'off', a policy or overrides. To run single ops of "
            f"the module in {value}, use overrides: {{op: {value}}}."
        )
    return value if value in Policy.names() else Policy.of(value)


def _change_of(value: dict[str, str] | Policy | str) -> int:
    return policy_number(None, value) if isinstance(value, dict) else policy_number(value, None)


def _run(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    policy = policy_of(module)
    if policy is None:
        return forward(*args, **kwargs)
    _check_not_traced(module, (*args, *kwargs.values()))
    devices = _enabled_devices()
    if not devices:
        return forward(*args, **kwargs)
    if policy.value == "fp32":
        args, kwargs = tree_map(functools.partial(_to_float32, devices), (args, kwargs))
    packed = _packed_inside(policy.change)
    if torch.compiler.is_dynamo_compiling():
        with GraphRegion(packed):
            return forward(*args, **kwargs)
    with Region(packed):
        return forward(*args, **kwargs)


def _check_not_traced(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    for value in inputs:
        if isinstance(value, torch.fx.Proxy):
            raise RegionError(
                f"torch.fx traces a {type(module).__name__} with a policy. Its graphs cannot contain regions, so the "
                f"policy would be lost. Call remove_module_policy first, and set policies on modules of the graph."
            )


def _enabled_devices() -> list[str]:
    return [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]


def _to_float32(devices: list[str], value: Any) -> Any:
    """Casts eligible tensors: floating, not float64, on a device type whose autocast is on.

    Source: torch/amp/autocast_mode.py, _cast (v2.13).
    """
    if isinstance(value, PackedSequence):
        return value._replace(data=_to_float32(devices, value.data))
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


def policy_of(module: nn.Module) -> ModulePolicy | None:
    """Returns the module's policy, or None."""
    return module.__dict__.get(_ATTRIBUTE)


def attach(module: nn.Module, policy: ModulePolicy) -> None:
    """Sets the module's policy, replacing any previous one."""
    if not any(_BASE in vars(kind) for kind in type(module).__mro__):
        module.__class__ = policy_class(module)
    module.__dict__[_ATTRIBUTE] = policy
    if _no_fast_path not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_no_fast_path)


def detach(module: nn.Module) -> None:
    """Removes the module's policy, if any. If another library extended our subclass, both classes stay."""
    if module.__dict__.pop(_ATTRIBUTE, None) is None:
        return
    for number, hook in list(module._forward_pre_hooks.items()):
        if hook is _no_fast_path:
            del module._forward_pre_hooks[number]
    kind = type(module)
    if _BASE in vars(kind):
        module.__class__ = vars(kind)[_BASE]
    elif _is_parametrized_class(module) and _BASE in vars(kind.__bases__[0]):
        module.__class__ = _on_base(kind, vars(kind.__bases__[0])[_BASE])


def _no_fast_path(module: nn.Module, args: Any) -> None:
    """Does nothing. Without a hook, the fast path of `nn.TransformerEncoderLayer` does not call its modules.

    Source: torch/nn/modules/transformer.py, TransformerEncoderLayer.forward (v2.13).
    """


def policy_class(module: nn.Module) -> type[nn.Module]:
    """Returns the subclass for a module with a policy."""
    kind = type(module)
    if _is_parametrized_class(module):
        # Removing a parametrization restores the class's first base, so ours has to be that base.
        return _on_base(kind, _extend(kind.__bases__[0]))
    return _extend(kind)


def _is_parametrized_class(module: nn.Module) -> bool:
    return parametrize.is_parametrized(module) and type(module).__name__.startswith("Parametrized")


def _on_base(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """The class that a parametrization created for one module, with another base."""
    body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return _new_class(kind, base, body)


def _new_class(like: type[nn.Module], base: type[nn.Module], body: dict[str, Any]) -> type[nn.Module]:
    make: Any = type(like)
    kind: type[nn.Module] = make(like.__name__, (base,), body)
    return kind


#: Weak keys and values: a subclass lives as long as its instances, and keeps its base alive.
_subclasses: weakref.WeakKeyDictionary[type, weakref.ref[type[nn.Module]]] = weakref.WeakKeyDictionary()


def _extend(base: type[nn.Module]) -> type[nn.Module]:
    known = _subclasses.get(base)
    kind = known() if known is not None else None
    if kind is None:
        kind = _make_subclass(base)
        _subclasses[base] = weakref.ref(kind)
    return kind


def _make_subclass(base: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, super(kind, self).forward, args, kwargs)

    # torch.jit would compile the source of the wrapped function and lose the policy. It refuses ours.
    del forward.__wrapped__
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        function, arguments, *rest = super(kind, self).__reduce_ex__(protocol)
        arguments = tuple(base if argument is kind else argument for argument in arguments)
        return _rebuild, (function, arguments, policy_of(self)), *rest

    def deepcopy(self: Any, memo: Any) -> Any:
        copied = super(kind, self).__deepcopy__(memo)
        policy = policy_of(self)
        if policy is not None and isinstance(copied, nn.Module):
            attach(copied, policy)
        return copied

    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(base, name) for name in names} | {_BASE: base, "forward": forward, "__reduce_ex__": reduce}
    if hasattr(base, "__deepcopy__"):
        body["__deepcopy__"] = deepcopy
    kind = _new_class(base, base, body)
    return kind


def _rebuild(function: Callable[..., Any], arguments: tuple[Any, ...], policy: ModulePolicy | None) -> Any:
    module = function(*arguments)
    module.__class__ = _extend(type(module))
    if policy is not None and "_forward_pre_hooks" in module.__dict__:
        attach(module, policy)  # recreated by its own __reduce__; otherwise the state that is restored next contains it
    return module
