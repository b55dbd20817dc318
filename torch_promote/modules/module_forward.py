"""Gives a module a policy: an instance attribute `forward` runs the module's forward in a nested region.

The class stays as it is, because other libraries select modules by `type(module)` and capture `module.forward`. Another
attribute, which is not in the state_dict either, holds the policy. If it is missing, the forward runs as without one.

NOTE [ Whose forward ]
An attribute of an instance is not bound to the instance by Python, as a method of its class is. `PolicyForward` refers
to its module itself: weakly, so that the module dies with its last reference. Deep copies and pickles refer to the new
module. But a shallow copy, such as a replica of DataParallel, has the attribute of the original. A forward pre-hook,
which is called with the right module, gives it one of its own; because PyTorch has looked up `forward` by then, the
hook also passes the module to that call, as a keyword argument.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx
from torch import nn
from torch.nn.utils import parametrize

from torch_promote.errors import RegionError
from torch_promote.modules.module_policy import ModulePolicy, run_under, traced_by_fx

__all__ = ["attach", "detach", "policy_of"]

_ATTRIBUTE = "_torch_promote_policy"
_MODULE = "_torch_promote_module"  # keyword argument: the module that is called


def policy_of(module: nn.Module) -> ModulePolicy | None:
    """Returns the module's policy, or None."""
    return module.__dict__.get(_ATTRIBUTE)


class _Bound:
    """A callable that is an attribute of a module, and refers to it. Copies of the module have copies of it."""

    def __init__(self, module: nn.Module | None, *rest: Any) -> None:
        self._module: Callable[[], nn.Module | None] = weakref.ref(module) if module is not None else _no_module
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

    def is_of(self, module: nn.Module) -> bool:
        return self._module() is module

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), *self._rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(*copy.deepcopy((self._module(), *self._rest), memo))


def _no_module() -> None:
    """Takes the place of a weak reference."""


class PolicyForward(_Bound):
    """The attribute `forward` of a module with a policy. Looks like a bound method.

    Args:
        module: The module. None: it no longer exists.
        inner: The attribute `forward` that the module had before. None: the forward of its class.
    """

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
            return run_under(policy_of(module), module, None, args, kwargs)

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
        module = kwargs.pop(_MODULE, None)
        if module is None:
            module = self.__self__
        return run_under(policy_of(module), module, self._rest[0], args, kwargs)


def _look_like(wrapper: Any, wrapped: Callable[..., Any], bound: Callable[..., Any]) -> None:
    functools.update_wrapper(wrapper, wrapped)
    # torch.jit would compile this function, and Accelerate would restore it: the policy would be lost.
    del wrapper.__wrapped__
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
        wrapper.__signature__ = inspect.signature(bound)


class _Copier(_Bound):
    """The attribute `__deepcopy__` or `__reduce_ex__` of a module whose class defines it: the copy has the policy."""

    def __call__(self, argument: Any) -> Any:
        module, name = self.__self__, self._rest[0]
        made = getattr(type(module), name)(module, argument)
        if name == "__reduce_ex__":
            function, arguments, *rest = made
            return _rebuild, (function, arguments, policy_of(module)), *rest
        if isinstance(made, nn.Module):
            attach(made, policy_of(module))
        return made


def _rebuild(function: Callable[..., Any], arguments: tuple[Any, ...], policy: ModulePolicy | None) -> Any:
    module = function(*arguments)
    if "_forward_pre_hooks" in module.__dict__:  # otherwise the state that is restored next contains the policy
        attach(module, policy)
    return module


def _own_copiers(kind: type[nn.Module]) -> Iterator[str]:
    """The special methods with which a class copies or pickles its modules without their attributes."""
    copies = getattr(kind, "__deepcopy__", None)
    if copies is not None and copies.__module__ != parametrize.__name__:  # which copies all attributes
        yield "__deepcopy__"
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        yield "__reduce_ex__"


def attach(module: nn.Module, policy: ModulePolicy | None) -> None:
    """Sets the module's policy, replacing any previous one. None: does nothing."""
    if policy is None:
        return
    attributes = module.__dict__
    attributes[_ATTRIBUTE] = policy
    _own_forward(module)
    for name in _own_copiers(type(module)):
        attributes.setdefault(name, _Copier(module, name))
    if _call_as_itself not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_call_as_itself, with_kwargs=True)


def _own_forward(module: nn.Module) -> None:
    forward = module.__dict__.get("forward")
    if not isinstance(forward, PolicyForward):
        inner = forward
        if inner is None and not inspect.isfunction(inspect.getattr_static(type(module), "forward")):
            inner = module.forward  # such as a staticmethod, to which no module is passed
    elif forward.is_of(module):
        return
    else:
        inner = forward.inner
    module.__dict__["forward"] = PolicyForward(module, inner)


def detach(module: nn.Module) -> None:
    """Removes the module's policy, if any. A captured forward then runs as if there had been none."""
    attributes = module.__dict__
    if attributes.pop(_ATTRIBUTE, None) is None:
        return
    for number, hook in list(module._forward_pre_hooks.items()):
        if hook is _call_as_itself:
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
    for name in ("__deepcopy__", "__reduce_ex__"):
        if isinstance(attributes.get(name), _Copier):
            del attributes[name]
    forward = attributes.get("forward")
    if isinstance(forward, PolicyForward):
        del attributes["forward"]
        if forward.inner is not None and forward.inner != module.forward:
            attributes["forward"] = forward.inner


def _call_as_itself(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
    """Passes a shallow copy of a module with a policy to the forward that it shares; see NOTE [ Whose forward ].

    It also raises if somebody deleted the forward. And without a hook, the fast path of `nn.TransformerEncoderLayer`
    would not call its modules.

    Source: torch/nn/modules/transformer.py, TransformerEncoderLayer.forward (v2.13).
    """
    forward = module.__dict__.get("forward")
    if forward is None and policy_of(module) is not None:
        raise RegionError(
            f"the attribute 'forward' of a {type(module).__name__} was deleted. It applies the module's policy. Call "
            f"set_module_policy again, or remove_module_policy."
        )
    if not isinstance(forward, PolicyForward) or forward.is_of(module):
        return None
    if not torch.compiler.is_dynamo_compiling():
        _own_forward(module)
    return args, {**kwargs, _MODULE: module}


@functools.cache
def _install() -> None:
    """Changes the functions of PyTorch that would lose the policy of a module, or run it for another module."""
    _replace(torch.fx.Tracer, "trace", _trace)
    _replace(nn.Module, "_replicate_for_data_parallel", _replicate)
    quantize = sys.modules.get("torch.ao.quantization.quantize")
    if quantize is not None:
        _replace(quantize, "swap_module", _swap_module)


def _replace(holder: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(holder, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(holder, name, replaced)


def _trace(original: Callable[..., Any], tracer: torch.fx.Tracer, root: Any, *args: Any, **kwargs: Any) -> Any:
    """It traces the forward of the root's class."""
    if isinstance(root, nn.Module) and policy_of(root) is not None:
        raise traced_by_fx(root)
    return original(tracer, root, *args, **kwargs)


def _replicate(original: Callable[..., Any], module: nn.Module) -> nn.Module:
    """It copies the attributes of a module, and so its forward.

    Source: torch/nn/modules/module.py, Module._replicate_for_data_parallel (v2.13).
    """
    replica: nn.Module = original(module)
    if policy_of(replica) is not None:
        _own_forward(replica)
    return replica


def _swap_module(original: Callable[..., Any], mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """It replaces a module by one of another class, and carries over its hooks.

    Source: torch/ao/quantization/quantize.py, swap_module (v2.13).
    """
    new = original(mod, *args, **kwargs)
    attach(new, policy_of(mod))
    return new
