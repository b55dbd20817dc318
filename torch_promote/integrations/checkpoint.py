"""Activation checkpointing: the backward recomputes a function under the policy of its forward.

`torch.utils.checkpoint` recomputes under regions of torch.autocast that mirror the enabled flags, dtypes and cache flag
of the forward. It does not know policies and cache modes. Both its kinds keep the function in an attribute of an object
that lives until the backward: `ctx.run_function` (reentrant) and `frame.recompute_fn`. A descriptor for these
attributes stores policy and cache mode with the function.

Source: torch/utils/checkpoint.py, CheckpointFunction, _CheckpointFrame, _checkpoint_hook (v2.13).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.utils.checkpoint

from torch_promote import _C
from torch_promote.dispatch_keys import AUTOCAST_KEY
from torch_promote.errors import RegionError
from torch_promote.extension import RegionSpec, kept_in_force

__all__ = ["checkpoint_contexts", "install", "stays_stocks"]

_KEY = getattr(torch._C.DispatchKey, AUTOCAST_KEY)


_NO_CHANGE = _C.register_change([], False)


class _Captured(NamedTuple):
    """The policy and cache mode at one point of the program.

    Attributes:
        active: Whether calls passed through our wrappers. If not, the policy is the one that a region starts from.
        change: A change that results in this policy, independent of where it is entered.
        stock: Whether the policy is stock's.
        cache_mode: The mode of the cast cache.
        kept: What the policy's module tables need.
    """

    active: bool
    change: _C.HeldChange
    stock: bool
    cache_mode: str
    kept: tuple[Any, ...] = ()


class _PolicyRegion:
    """A region that changes only the policy and the cache mode, not devices, dtypes or the cache flag."""

    __slots__ = ("_cache_mode", "_change")

    def __init__(self, change: _C.HeldChange, cache_mode: str) -> None:
        self._change = change
        self._cache_mode = cache_mode

    def __enter__(self) -> None:
        cache_enabled = torch.is_autocast_cache_enabled()
        spec = RegionSpec(cache_enabled=cache_enabled, cache_mode=self._cache_mode, policy_change=self._change.number)
        _C.enter_region(self, spec.pack())

    def __exit__(self, *error: object) -> None:
        _C.exit_region(self)


def _capture() -> _Captured:
    """Returns the policy and the cache mode in force in this thread."""
    cache_mode = _C.cache_mode()
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    if included and not torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY):
        return _captured(True, cache_mode)
    with _PolicyRegion(_NO_CHANGE, cache_mode):
        return _captured(False, cache_mode)


def _captured(active: bool, cache_mode: str) -> _Captured:
    return _Captured(active, _C.capture_policy(), _C.policy_is_stock(), cache_mode, kept_in_force())


#: For functions that were checkpointed before `install`, when only stock's policy and cache mode were in use.
_BEFORE_INSTALL = _Captured(False, _NO_CHANGE, True, _C.CACHE_MODES[0])


_Mirrors = Literal["", "unless plain", "always"]


class _Thread(threading.local):
    #: When a region that checkpoint opens to mirror the forward stays PyTorch's; "" outside of recomputations.
    mirrors: _Mirrors = ""


_thread = _Thread()


def stays_stocks(plain: bool) -> bool:
    """Whether a region that is being entered stays PyTorch's even while `torch_promote.install` is in force.

    This is the case for regions that checkpoint opens to mirror the forward, if the forward ran in PyTorch's own
    region, or if a region of ours would change the forward's policy or cache mode.

    Args:
        plain: Whether the region, as one of ours, would take the policy and the cache mode from its surroundings.
    """
    mirrors = _thread.mirrors
    if not mirrors or (plain and mirrors == "unless plain"):
        return False
    return sys._getframe(2).f_code.co_filename == torch.utils.checkpoint.__file__


class _Recomputation:
    """Puts a captured policy and cache mode in force for one recomputation, unless there is nothing to do."""

    __slots__ = ("_captured", "_mirrors_before", "_region")

    _mirrors_before: _Mirrors
    _region: _PolicyRegion | None

    def __init__(self, captured: _Captured) -> None:
        self._captured = captured

    def __enter__(self) -> None:
        captured, now = self._captured, _capture()
        # PyTorch's own mirroring is then sufficient. A policy that is already in force is entered again nevertheless: a
        # promotion rule acts only in a backward in which its region was entered.
        is_enough = now.stock and captured.stock and now.cache_mode == captured.cache_mode
        self._region = None
        if not is_enough:
            change = _C.register_change([], True) if captured is _BEFORE_INSTALL else captured.change
            self._region = _PolicyRegion(change, captured.cache_mode)
        self._mirrors_before = _thread.mirrors
        if self._region is not None:
            self._region.__enter__()
            if not captured.active:
                torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, True)  # until the region ends
        _thread.mirrors = "unless plain" if is_enough or captured.active else "always"

    def __exit__(self, *error: object) -> None:
        _thread.mirrors = self._mirrors_before
        if self._region is not None:
            _C.exit_region(self._region)


class _Recomputations:
    """`_Recomputation` for several recomputations: each backward through a retained graph recomputes."""

    def __init__(self, captured: _Captured) -> None:
        self._captured = captured
        self._open: list[_Recomputation] = []

    def __enter__(self) -> None:
        recomputation = _Recomputation(self._captured)
        recomputation.__enter__()
        self._open.append(recomputation)

    def __exit__(self, *error: object) -> None:
        self._open.pop().__exit__()


# A plain function without a closure: `_disable_dynamo` creates a reference cycle with the function that it decorates.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _run_again(captured: _Captured, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Recomputation(captured):
        return function(*args, **kwargs)


class _KeepsPolicy:
    """A descriptor for an attribute that holds a function. It stores the policy at the assignment with the function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set__(self, holder: Any, function: Callable[..., Any]) -> None:
        holder.__dict__[self._name] = function
        holder.__dict__["_torch_promote_policy"] = _capture()

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        if holder is None:
            return self
        kept = holder.__dict__
        if self._name not in kept:
            raise AttributeError(f"{type(holder).__name__!r} object has no attribute {self._name!r}")
        captured = kept.get("_torch_promote_policy", _BEFORE_INSTALL)
        return functools.partial(_run_again, captured, kept[self._name])


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Returns a `context_fn` for `torch.utils.checkpoint.checkpoint` that carries the policy to the recomputation.

    Optional: policies carry over automatically. Use it to make that explicit. It works with `use_reentrant=False`, and
    not in functions that torch.compile compiles.

    Returns:
        A context for the forward, which does nothing, and one for the recomputation.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> from torch_promote import my_autocast
        >>> x, weight = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
        >>> with my_autocast("cpu", overrides={"matmul": "fp32"}):
        ...     y = checkpoint(torch.matmul, x, weight, use_reentrant=False, context_fn=checkpoint_contexts)
        >>> y.dtype
        torch.float32
    """
    install()
    return contextlib.nullcontext(), _Recomputations(_capture())


@functools.cache
def install() -> None:
    """Makes `torch.utils.checkpoint` store policies and cache modes.

    Call it before the first use of a policy or cache mode other than stock's.

    Raises:
        RegionError: This PyTorch's checkpointing lacks the attributes for the hooks and for a check that refuses.
    """
    module = torch.utils.checkpoint  # not by sys.modules, which is empty while Python ends
    try:
        places = _find_places(module)
    except LookupError as error:
        _refuse(module, str(error))
    else:
        for kind, name in places:
            setattr(kind, name, _KeepsPolicy(name))


def _find_places(module: types.ModuleType) -> list[tuple[type, str]]:
    """Returns the classes whose objects keep the function, and the attribute. Raises LookupError if they differ."""
    places: list[tuple[type, str]] = []
    for kept_on, name, setter, reader in (
        (
            "CheckpointFunction._backward_cls",
            "run_function",
            "CheckpointFunction.forward",
            "CheckpointFunction.backward",
        ),
        ("_CheckpointFrame", "recompute_fn", "_CheckpointFrame.__init__", "_checkpoint_hook.__init__"),
    ):
        for function in (setter, reader):
            code = getattr(_look_up(module, function), "__code__", None)
            if code is None or not _mentions(code, name):
                raise LookupError(f"{function} has no {name!r}")
        kind = _look_up(module, kept_on)
        taken = hasattr(kind, name) and not isinstance(getattr(kind, name), _KeepsPolicy)
        if taken or not getattr(kind, "__dictoffset__", 0):
            raise LookupError(f"{kept_on} does not accept a descriptor for {name!r}")
        places.append((kind, name))
    return places


def _look_up(module: types.ModuleType, path: str) -> Any:
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        raise LookupError(f"there is no {path}") from None


def _mentions(code: types.CodeType, attribute: str) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return attribute in code.co_names or any(_mentions(constant, attribute) for constant in inner)


def _refuse(module: types.ModuleType, reason: str) -> None:
    """Makes checkpointing under a policy other than stock's raise at the call.

    Both kinds of checkpointing call one function to read the autocast state.
    """
    message = (
        f"torch_promote does not support torch.utils.checkpoint of PyTorch {torch.__version__} ({reason}): the "
        f"recomputation in the backward would run without the current overrides."
    )
    mirror = getattr(module, "_get_autocast_kwargs", None)
    if mirror is None:
        raise RegionError(f"{message} Only the stock policy works with this PyTorch.")

    def refuse_or_mirror(*args: Any, **kwargs: Any) -> Any:
        now = _capture()
        if now.active and not now.stock:
            raise RegionError(f"{message} Call checkpoint outside of the region, and open the region in the function.")
        return mirror(*args, **kwargs)

    module._get_autocast_kwargs = refuse_or_mirror  # type: ignore[attr-defined]
