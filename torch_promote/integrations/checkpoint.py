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
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.utils.checkpoint

from torch_promote import _C
from torch_promote.extension import RegionSpec, kept_in_force
from torch_promote.loader import AUTOCAST_KEY

_KEY = getattr(torch._C.DispatchKey, AUTOCAST_KEY)


_NO_CHANGE = _C.register_change([], False)


class _Captured(NamedTuple):
    """The policy and cache mode at one point of the program."""

    active: bool  # whether calls passed through our wrappers; if not, the policy is the one that a region starts from
    change: _C.HeldChange  # results in this policy, independent of where it is entered
    stock: bool  # whether the policy is stock's
    cache_mode: str
    kept: tuple[Any, ...] = ()  # what the policy's module tables need


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


def keeps_stock_autocast(plain: bool) -> bool:
    """Whether a region that is being entered stays PyTorch's even while `torch_promote.install` is in force."""
    # So are regions by which checkpoint mirrors the forward, if that ran in PyTorch's own region, or if a region of
    # ours would change its policy or cache mode. A `plain` one would take both from its surroundings.
    mirrors = _thread.mirrors
    if not mirrors or (plain and mirrors == "unless plain"):
        return False
    return sys._getframe(2).f_code.co_filename == torch.utils.checkpoint.__file__


@contextlib.contextmanager
def _recomputing(captured: _Captured) -> Iterator[None]:
    """Puts a captured policy and cache mode in force for one recomputation, unless there is nothing to do."""
    now, before = _capture(), _thread.mirrors
    # PyTorch's own mirroring is then sufficient. A policy that is already in force is entered again nevertheless: a
    # promotion rule acts only in a backward in which its region was entered.
    is_enough = now.stock and captured.stock and now.cache_mode == captured.cache_mode
    region: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not is_enough:
        change = _C.register_change([], True) if captured is _BEFORE_INSTALL else captured.change
        region = _PolicyRegion(change, captured.cache_mode)
    with region:
        if not (is_enough or captured.active):
            torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, True)  # until the region ends
        _thread.mirrors = "unless plain" if is_enough or captured.active else "always"
        try:
            yield
        finally:
            _thread.mirrors = before


# A plain function without a closure: `_disable_dynamo` creates a reference cycle with the function that it decorates.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _run_again(captured: _Captured, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _recomputing(captured):
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


@functools.cache
def install() -> None:
    """Makes `torch.utils.checkpoint` store policies and cache modes; called before the first that is not stock's."""
    module: Any = torch.utils.checkpoint  # not by sys.modules, which is empty while Python ends
    module.CheckpointFunction._backward_cls.run_function = _KeepsPolicy("run_function")
    module._CheckpointFrame.recompute_fn = _KeepsPolicy("recompute_fn")
