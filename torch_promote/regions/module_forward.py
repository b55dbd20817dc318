"""The policy of a module: an instance attribute `forward` runs the module's forward in a nested region.

The class stays as it is, because other libraries select modules by `type(module)` and capture `module.forward`. Another
attribute, which is not in the state_dict either, holds the policy. If it is missing, the forward runs as without one.

NOTE [ Whose forward ]
An attribute of an instance is not bound to the instance by Python, as a method of its class is. `PolicyForward` refers
to its module itself: weakly, so that the module dies with its last reference. Deep copies and pickles refer to the new
module. But a shallow copy, such as a replica of DataParallel, has the attribute of the original. A forward pre-hook,
which is called with the right module, gives it one of its own; because PyTorch has looked up `forward` by then, the
hook also passes the module to that call, as a keyword argument.

NOTE [ Tables on a module ]
A region may have tables for modules (torch_promote/regions/module_policies.py). A module that is in some has the same
attribute `forward`, and a dict of its policies by the number of the tables; the policy in force says which number
holds. A copy or a pickle of the module is another module, which no region names: it has none of these attributes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.fx
from torch import nn
from torch.utils._pytree import tree_map

from torch_promote.errors import PolicyError, RegionError, UnusedOverrideWarning
from torch_promote.extension import RegionSpec, number_in_force
from torch_promote.policy.op_names import spell_key
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, spell_policy
from torch_promote.policy.overrides import advice_for
from torch_promote.policy.policy import Policy, PolicyOfModule
from torch_promote.regions.autocast import Region, check_devices, policy_change


class ModulePolicy:
    """The policy of a module. Raises PolicyError if the policy does not exist, or is not legal."""

    __slots__ = ("_held", "below", "change", "value")

    def __init__(self, value: object) -> None:
        # As in `set_module_policy`. The ops and cast policies of a mapping are names; a file is replaced by its policy.
        self.value: PolicyOfModule
        # The number of the change to the surrounding policy. None: the region disables autocast.
        self.change: int | None = None
        # After the removal of the handle of `set_module_policy` that set it: the module, and the policy that it had
        # replaced there. A copy of the module may have the same object, for which nothing was removed.
        self.below: tuple[weakref.ref[nn.Module], ModulePolicy | None] | None = None
        if isinstance(value, str) and value in ("fp32", "off"):
            self.value = value
        else:
            self.value = _by_name(value) if isinstance(value, Mapping) else _policy(value)
            of_ops = self.value if isinstance(self.value, dict) else None
            self._held = policy_change(self.value if of_ops is None else None, of_ops)
            self.change = self._held.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModulePolicy) and self.value == other.value

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

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
    named: dict[str, str] = {}
    for key, value in overrides.items():
        op, policy = spell_key(key), spell_policy(value) if isinstance(value, CastPolicy | torch.dtype) else value
        if named.setdefault(op, policy) != policy:
            raise PolicyError(f"{op!r} gets two policies, {named[op]!r} and {policy!r}. Name it once.")
    return named


def _policy(value: Any) -> Policy | str:
    """A policy in a form that can be pickled: a name stays a name, a file is read now."""
    if isinstance(value, torch.dtype | str) and (advice := advice_for(value)):
        shown = repr(value) if isinstance(value, str) else str(value)
        raise PolicyError(
            f"{shown} is not a policy of a module. Legal: 'fp32', 'off', a policy or a mapping of overrides.{advice}"
        )
    return value if value in Policy.names() else Policy.of(value)


def run_under(
    policies: tuple[ModulePolicy, ...], module: nn.Module, forward: Callable[..., Any] | None, args: Any, kwargs: Any
) -> Any:
    """Runs a forward of a module, by default that of its class, as policies say, of which the first is outermost."""
    if not policies:
        return forward(*args, **kwargs) if forward is not None else type(module).forward(module, *args, **kwargs)
    policy, *inner = policies
    if inner:
        outer_forward, inner_policies = forward, tuple(inner)

        def nested(*args: Any, **kwargs: Any) -> Any:
            return run_under(inner_policies, module, outer_forward, args, kwargs)

        forward = nested
    elif forward is None:
        forward, args = type(module).forward, (module, *args)
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.fx.Proxy):
            raise traced_by_fx(module)
    devices = _enabled_devices()
    if not devices:
        return forward(*args, **kwargs)
    if policy.value == "fp32":
        args, kwargs = tree_map(functools.partial(_to_float32, devices), (args, kwargs))
    with Region(_packed_inside(policy.change)):
        return forward(*args, **kwargs)


def traced_by_fx(module: nn.Module) -> RegionError:
    """The error for a module with a policy that torch.fx traces."""
    return RegionError(
        f"torch.fx traces a module of type {type(module).__name__} with a policy. Its graphs cannot contain regions, "
        f"so the policy would be lost. Call remove_module_policy first, and set policies on modules of the graph."
    )


def _enabled_devices() -> list[str]:
    return [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]


def _to_float32(devices: list[str], value: Any) -> Any:
    """Casts eligible tensors: floating, not float64, on a device type whose autocast is on."""
    # Source: torch/amp/autocast_mode.py, _cast (v2.13).
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


_ATTRIBUTE = "_torch_promote_policy"
_TABLES = "_torch_promote_tables"
_MODULE = "_torch_promote_module"  # keyword argument: the module that is called


#: The forward of modules that had policies, and may get some again: Dynamo guards on the object.
_forwards: weakref.WeakKeyDictionary[nn.Module, PolicyForward] = weakref.WeakKeyDictionary()


def policy_of(module: nn.Module) -> ModulePolicy | None:
    """Returns the module's policy, or None."""
    return module.__dict__.get(_ATTRIBUTE)


def policies_in_force(module: nn.Module) -> tuple[ModulePolicy, ...]:
    """Returns the policies that a call of the module runs under: of the region's tables, and inside it, its own."""
    attributes = module.__dict__
    own = attributes.get(_ATTRIBUTE)
    of_module = () if own is None else (own,)
    tables = attributes.get(_TABLES)
    if tables is None:
        return of_module
    of_region = tables.get(number_in_force())
    return of_module if of_region is None else (of_region[-1], *of_module)


class _Bound:
    """A callable that is an attribute of a module, and refers to it. Copies of the module have copies of it."""

    def __init__(self, module: nn.Module | None, *rest: Any) -> None:
        self._module: Callable[[], nn.Module | None] = weakref.ref(module) if module is not None else lambda: None
        self._rest = rest

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RegionError(
                "the module of this forward no longer exists. The forward of a module with a policy does not keep the "
                "module alive: keep a reference to the module."
            )
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), *self._rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(*copy.deepcopy((self._module(), *self._rest), memo))


class PolicyForward(_Bound):
    """The attribute `forward` of a module with a policy. Looks like a bound method."""

    # `module` is None if it no longer exists. `inner` is the `forward` that it had before; None: that of its class.

    def __init__(self, module: nn.Module | None, inner: Callable[..., Any] | None = None) -> None:
        super().__init__(module, inner)
        _install()
        if inner is not None:
            _look_like(self, inner, inner)
        elif module is not None:
            _look_like(self, type(module).forward, type(module).forward.__get__(module))

    @property
    def inner(self) -> Callable[..., Any] | None:
        """The attribute that the module had before."""
        inner: Callable[..., Any] | None = self._rest[0]
        return inner

    @property
    def __func__(self) -> Callable[..., Any]:
        if self.inner is not None:
            raise AttributeError("a forward that replaced an attribute of the module has no function")

        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return run_under(policies_in_force(module), module, None, args, kwargs)

        original = type(self.__self__).forward
        _look_like(forward, original, original)
        return forward

    @property
    def __globals__(self) -> dict[str, Any]:
        raise AttributeError(
            "torch.jit.script cannot compile the forward of a module with a policy, because TorchScript has no "
            "regions. Call remove_module_policy first, or use torch.jit.trace."
        )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward of the module in the regions of its policies."""
        module = kwargs.pop(_MODULE, None)
        if module is None:
            module = self.__self__
        return run_under(policies_in_force(module), module, self._rest[0], args, kwargs)


def _look_like(wrapper: Any, wrapped: Callable[..., Any], bound: Callable[..., Any]) -> None:
    functools.update_wrapper(wrapper, wrapped)
    # torch.jit would compile this function, and Accelerate would restore it: the policy would be lost.
    del wrapper.__wrapped__
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
        wrapper.__signature__ = inspect.signature(bound)


def attach(module: nn.Module, policy: ModulePolicy | None) -> None:
    """Sets the module's policy, replacing any previous one. None: does nothing."""
    if policy is None:
        return
    module.__dict__[_ATTRIBUTE] = policy
    _prepare(module)
    _watch(module)


# NOTE [ Modules that are never called ]
# A policy acts on calls of its module's forward. diffusers calls the method `encode` of a VAE, which calls the modules
# inside: the policy of the VAE itself would do nothing, in silence. So the first call of a child with autocast on looks
# whether the module has run, or runs around it as compiled code. Its hooks are gone after the first call of either.

#: The hooks on modules with a policy and their children, until the module or a child runs.
_watched: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
#: PyTorch's fast paths are taken only without hooks.
_WITH_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _FirstCall:
    """A forward pre-hook of a module with a policy, or of a child. In copies it does nothing, without torch_promote."""

    def __init__(self, parent: nn.Module, child: nn.Module) -> None:
        self._modules = weakref.ref(parent), weakref.ref(child)

    def __call__(self, child: nn.Module, args: Any) -> None:
        parent, own = (reference() for reference in self._modules)
        if child is not own or parent is None or torch.compiler.is_dynamo_compiling():
            return
        if child is not parent and not _enabled_devices():
            return
        _unwatch(parent)
        if child is parent:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            running = frame.f_locals.get("self"), frame.f_locals.get("module")
            if frame.f_code.co_name in ("forward", "_call_impl", "run_under") and any(one is parent for one in running):
                return
            frame = frame.f_back
        if policy_of(child) is None and policy_of(parent) is not None:
            name = next((name for name, module in parent.named_modules() if module is child), "")
            warnings.warn(
                f"The policy {policy_of(parent)} of a module of type {type(parent).__name__} acts on calls of its "
                f"forward. Its child {name!r} ran outside of such a call, so the policy did not act there: something "
                f"calls a method such as encode, or the child. Give the children the policy: set_module_policy(model, "
                f'{{"**": ...}}), or their names.',
                UnusedOverrideWarning,
                stacklevel=2,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")


def _watch(module: nn.Module) -> None:
    _unwatch(module)
    if any(isinstance(one, _WITH_FAST_PATHS) for one in module.modules()):
        return
    inside = [one for one in module.children() if isinstance(one, nn.ModuleList | nn.ModuleDict)]
    children = [one for parent in (module, *inside) for one in parent.children() if one not in inside]
    if children:
        watched = dict.fromkeys((module, *children))
        _watched[module] = [one.register_forward_pre_hook(_FirstCall(module, one)) for one in watched]


def _unwatch(module: nn.Module) -> None:
    for hook in _watched.pop(module, ()):
        hook.remove()


def attach_table(module: nn.Module, number: int, policy: ModulePolicy) -> None:
    """Sets the module's policy under the tables with a number; see NOTE [ Tables on a module ]."""
    attributes = module.__dict__
    tables = attributes.get(_TABLES, {})
    # Another dict, because a thread may be reading this one. Several objects may have set policies for one number.
    attributes[_TABLES] = {**tables, number: (*tables.get(number, ()), policy)}
    attributes["__getstate__"] = _StateWithoutTables(module)
    _prepare(module)


def detach_table(module: nn.Module, number: int, policy: ModulePolicy) -> None:
    """Removes the object that `attach_table` was given for the tables with a number, if it is there."""
    attributes = module.__dict__
    tables = dict(attributes.get(_TABLES, {}))
    left = tuple(other for other in tables.pop(number, ()) if other is not policy)
    if left:
        tables[number] = left
    if tables:
        attributes[_TABLES] = tables
    elif _TABLES in attributes:
        if _ATTRIBUTE not in attributes:
            _restore(attributes, module)
        _drop_tables(attributes)


def _drop_tables(attributes: dict[str, Any]) -> None:
    attributes.pop("__getstate__", None)
    del attributes[_TABLES]


class _StateWithoutTables(_Bound):
    """The attribute `__getstate__` of a module with tables: copies and pickles have none of what belongs to them."""

    def __call__(self) -> Any:
        module = self.__self__
        state = type(module).__getstate__(module)
        if not isinstance(state, dict) or _TABLES not in state:
            return state
        attributes = dict(state)
        _drop_tables(attributes)
        if _ATTRIBUTE not in attributes:
            for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
                attributes[hooks] = attributes[hooks].copy()
            _restore(attributes, module)
        return attributes


def _prepare(module: nn.Module) -> None:
    """Gives the module what applies its policies."""
    _own_forward(module)
    if _call_as_itself not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_call_as_itself, with_kwargs=True)


def _own_forward(module: nn.Module) -> None:
    forward = module.__dict__.get("forward")
    if not isinstance(forward, PolicyForward):
        inner = forward
        if inner is None and not inspect.isfunction(inspect.getattr_static(type(module), "forward")):
            inner = module.forward  # such as a staticmethod, to which no module is passed
    elif forward._module() is module:
        return
    else:
        inner = forward.inner
    made = None if inner is not None else _forwards.get(module)
    if made is None:
        made = PolicyForward(module, inner)
        if inner is None:
            _forwards[module] = made
    module.__dict__["forward"] = made


def detach(module: nn.Module) -> None:
    """Removes the module's policy, if any. A captured forward then runs as if there had been none."""
    attributes = module.__dict__
    _unwatch(module)
    if attributes.pop(_ATTRIBUTE, None) is not None and _TABLES not in attributes:
        _restore(attributes, module)


@contextlib.contextmanager
def without_module_policies(model: nn.Module) -> Iterator[None]:
    """Suspends the policies that `set_module_policy` has set on a model's modules during a block."""
    suspended = [(module, module.__dict__.pop(_ATTRIBUTE)) for module in model.modules() if policy_of(module)]
    try:
        yield
    finally:
        for module, policy in suspended:
            module.__dict__.setdefault(_ATTRIBUTE, policy)


def _restore(attributes: dict[str, Any], module: nn.Module) -> None:
    """Removes from a module's attributes what `_prepare` put there."""
    for number, hook in list(attributes["_forward_pre_hooks"].items()):
        if hook is _call_as_itself:
            attributes["_forward_pre_hooks_with_kwargs"].pop(number, None)
            del attributes["_forward_pre_hooks"][number]
    forward = attributes.get("forward")
    if isinstance(forward, PolicyForward):
        of_class = inspect.getattr_static(type(module), "forward").__get__(module)
        if forward.inner is not None and forward.inner != of_class:
            attributes["forward"] = forward.inner
        else:
            del attributes["forward"]


def _call_as_itself(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
    """Passes a shallow copy of a module with a policy to the forward that it shares; see NOTE [ Whose forward ]."""
    # It also raises if somebody deleted the forward. And without a hook, the fast path of `nn.TransformerEncoderLayer`
    # would not call its modules.
    # Source: torch/nn/modules/transformer.py, TransformerEncoderLayer.forward (v2.13).
    forward = module.__dict__.get("forward")
    if forward is None and policies_in_force(module):
        raise RegionError(
            f"the attribute 'forward' of a module of type {type(module).__name__} was deleted. It applies the module's "
            f"policy. Call set_module_policy again, or remove_module_policy."
        )
    if not isinstance(forward, PolicyForward) or forward._module() is module:
        return None
    if not torch.compiler.is_dynamo_compiling():
        _own_forward(module)
    return args, {**kwargs, _MODULE: module}


@functools.cache
def _install() -> None:
    """Changes the functions of PyTorch that would lose the policy of a module, or run it for another module."""
    _replace(torch.fx.Tracer, "trace", _trace)
    _replace(nn.Module, "_replicate_for_data_parallel", _replicate)


def _replace(holder: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(holder, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(holder, name, replaced)


def _trace(original: Callable[..., Any], tracer: torch.fx.Tracer, root: Any, *args: Any, **kwargs: Any) -> Any:
    """It traces the forward of the root's class."""
    if isinstance(root, nn.Module) and policies_in_force(root):
        raise traced_by_fx(root)
    return original(tracer, root, *args, **kwargs)


def _replicate(original: Callable[..., Any], module: nn.Module) -> nn.Module:
    """It copies the attributes of a module, and so its forward."""
    # Source: torch/nn/modules/module.py, Module._replicate_for_data_parallel (v2.13).
    replica: nn.Module = original(module)
    if policy_of(replica) is not None or _TABLES in replica.__dict__:
        _own_forward(replica)
    return replica
