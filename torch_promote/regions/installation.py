"""`install`: the regions of torch.autocast in this process, whoever opens them, become regions of ours.

`torch.autocast` stays the class that it is, with PyTorch's `__init__`, checks, warnings and attributes; `__enter__` and
`__exit__` are replaced in the class. So it makes no difference who holds which name: `from torch import autocast`
before `install`, `torch.cuda.amp.autocast` (a subclass), `custom_fwd`, `ExitStack`.

Source: torch/amp/autocast_mode.py, class autocast (v2.13).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import torch

from torch_promote import _C
from torch_promote.integrations.asyncio_tasks import guard_tasks
from torch_promote.integrations.compare_ranks import compare_ranks
from torch_promote.integrations.export import record_enter, record_exit
from torch_promote.native.fork_safe_lock import fork_safe_lock
from torch_promote.native.region_spec import DTYPE_NUMBERS, DeviceSpec, RegionSpec
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.policy import Policy
from torch_promote.regions.arguments import allows_cache, cache_mode, policy_number, read_policy
from torch_promote.regions.interrupts import without_interrupt_at_start

__all__ = ["Installation", "install", "installed", "installed_as", "stock_autocast", "uninstall"]

_Autocast = torch.amp.autocast_mode.autocast
_PolicyArgument = Policy | str | os.PathLike[str] | None


class stock_autocast(_Autocast):  # noqa: N801 (named as the class that it is)
    """`torch.autocast` as PyTorch defines it, whatever is installed: to compare with.

    Args:
        device_type, dtype, enabled, cache_enabled: As for `torch.autocast`.

    Example:
        >>> with installed_as(policy="off"):
        ...     with torch.autocast("cpu"):
        ...         ours = torch.ones(2, 2) @ torch.ones(2, 2)
        ...     with stock_autocast("cpu"):
        ...         stock = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> ours.dtype, stock.dtype
        (torch.float32, torch.bfloat16)
    """

    __enter__ = _Autocast.__enter__
    __exit__ = _Autocast.__exit__


class Installation:
    """What `install` has put in force.

    Attributes:
        policy: The policy of regions; None for that of the region around, or outside of regions the default.
        overrides: The cast policies of single ops on top of it.
        cache: The cache mode; None for that of the region around, or "weights" outside of regions.
    """

    __slots__ = ("_change", "_specs", "cache", "overrides", "policy")

    def __init__(self, policy: _PolicyArgument, overrides: Mapping[Any, Any] | None, cache: str | None) -> None:
        if cache is not None:
            allows_cache(cache, None)
        self.policy = read_policy(policy)
        self.overrides: Mapping[Any, Any] = MappingProxyType(dict(overrides or {}))
        self.cache = cache
        self._change = policy_number(self.policy, self.overrides or overrides)
        self._specs: dict[Any, str] = {}

    def spec_of(self, region: Any) -> str | None:
        """Returns the packed spec of an object of torch.autocast; None if PyTorch has to serve it, or to raise."""
        asked = region.device, region.fast_dtype, region._enabled, region._cache_enabled
        try:
            packed = self._specs.get(asked)
        except TypeError:  # an argument without a hash: PyTorch raises
            return None
        if packed is not None:
            return packed
        device_type, dtype, enabled, cache_enabled = asked
        known = device_type in DEVICE_TYPES and isinstance(dtype, torch.dtype) and dtype in DTYPE_NUMBERS
        if not known or type(enabled) is not bool or type(cache_enabled) is not bool:
            return None
        devices = (DeviceSpec(device_type, dtype, enabled),)
        allowed = cache_enabled and self.cache != "none"
        packed = self._specs[asked] = RegionSpec(devices, allowed, cache_mode(self.cache), self._change).pack()
        return packed

    def renew(self) -> bool:
        """Registers the policy again if the extension has dropped it, and returns whether it had."""
        if _C.touch_change(self._change):
            return False
        self._change = policy_number(self.policy, self.overrides)
        self._specs = {}
        return True

    @property
    def info(self) -> str:
        """What holds for regions of torch.autocast, in one sentence."""
        parts = [] if self.policy is None else [f"policy {self.policy!r}"]
        parts += [f"{len(self.overrides)} override{'s' * (len(self.overrides) > 1)}"] if self.overrides else []
        parts += [] if self.cache is None else [f"cache {self.cache!r}"]
        asked = ", ".join(parts) if parts else "PyTorch's own policy and the cache mode 'weights' unless set elsewhere"
        return f"Regions of torch.autocast for {' and '.join(DEVICE_TYPES)} are run by torch_promote: {asked}."

    def __repr__(self) -> str:
        given = {"policy": self.policy, "overrides": dict(self.overrides) or None, "cache": self.cache}
        parts = (f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"<torch_promote.install({', '.join(parts)})>"


class _Entered:
    """The objects whose regions are open in a thread, as often as they are."""

    __slots__ = ("__weakref__", "objects")

    def __init__(self) -> None:
        self.objects: list[Any] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered = _Entered()
        _threads.add(self.entered)


_threads: weakref.WeakSet[_Entered] = weakref.WeakSet()
_thread = _Thread()
_lock = fork_safe_lock()
_installed: Installation | None = None


@functools.wraps(_Autocast.__enter__)
def _enter(self: Any) -> Any:
    installation = _installed
    packed = None if installation is None else installation.spec_of(self)
    if packed is None:
        return _enter_method.before(self)
    device_type = self.device
    # Nobody here reads these three, but they are attributes of PyTorch's objects.
    self.prev_cache_enabled = torch.is_autocast_cache_enabled()
    self.prev = torch.is_autocast_enabled(device_type)
    self.prev_fastdtype = torch.get_autocast_dtype(device_type)
    objects = _thread.entered.objects
    objects.append(self)  # the extension knows a region by the address of its object
    try:
        surroundings = _C.enter_region(self, packed)
        if surroundings:
            _tell_surroundings(surroundings, packed)
    except BaseException as error:  # of a signal handler too, right after the call
        _C.undo_enter(self)
        _remove(objects, self)
        if isinstance(error, RuntimeError) and installation.renew():  # type: ignore[union-attr]
            return _enter(self)
        raise
    return self


@functools.wraps(_Autocast.__exit__)
@without_interrupt_at_start
def _exit(
    self: Any, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
) -> Literal[False]:
    surroundings = _C.exit_region(self)
    objects = _thread.entered.objects
    if surroundings < 0 and not any(_holds(entered.objects, self) for entered in list(_threads)):
        _exit_method.before(self, kind, value, traceback)  # it began as PyTorch's
        return False
    _remove(objects, self)
    if surroundings > 0:
        record_exit(RegionSpec((DeviceSpec(self.device, torch.bfloat16, True),)).pack())
    elif surroundings < 0 and kind is not GeneratorExit:  # which closes a body between two steps: already ended
        warnings.warn(
            "a region of torch.autocast ends in another thread than it began in. Autocast's state belongs to a thread: "
            "nothing was changed in this one, and the region goes on in the other. End regions in their own threads.",
            RuntimeWarning,
            stacklevel=2,
        )
    if _installed is None:
        _restore()
    return False


def _tell_surroundings(surroundings: int, packed: str) -> None:
    if surroundings & _C.UNCHECKED_RANKS:
        compare_ranks(_installed)
    if surroundings & _C.RUNNING_LOOP:
        guard_tasks()
    if surroundings & _C.TORCH_FUNCTION_MODE:
        record_enter(packed)


def _holds(objects: list[Any], wanted: object) -> bool:
    return any(one is wanted for one in objects)


def _remove(objects: list[Any], gone: object) -> None:
    for at in range(len(objects) - 1, -1, -1):
        if objects[at] is gone:
            del objects[at]
            return


class _Method:
    """A method of the class, which ours takes the place of.

    Attributes:
        before: What stood in the class, and serves what we don't: PyTorch's, or somebody's who has replaced that.
    """

    def __init__(self, name: str, ours: Any) -> None:
        self.name = name
        self.ours = ours
        self.before = getattr(_Autocast, name)
        self.is_placed = False

    def place(self) -> None:
        found = getattr(_Autocast, self.name)
        if found is self.ours or (self.is_placed and found is not self.before):
            return  # placed, and perhaps replaced since by somebody who calls it
        self.before = found
        setattr(_Autocast, self.name, self.ours)
        self.is_placed = True

    def restore(self) -> None:
        if getattr(_Autocast, self.name) is self.ours:
            setattr(_Autocast, self.name, self.before)
            self.is_placed = False


_enter_method = _Method("__enter__", _enter)
_exit_method = _Method("__exit__", _exit)


def _restore() -> None:
    """After `uninstall`: restores the class, but `__exit__` only when no region of ours is open any more."""
    with _lock:
        if _installed is None:
            _enter_method.restore()
            if not any(entered.objects for entered in list(_threads)):
                _exit_method.restore()


def _put(installation: Installation | None) -> Installation | None:
    """Puts an installation in force, or none, and returns the one before. The caller holds the lock."""
    global _installed
    before, _installed = _installed, installation
    if installation is None:
        _restore()
    else:
        _exit_method.place()
        _enter_method.place()
    # Dynamo has no guard on what is installed.
    if "torch._dynamo" in sys.modules and before is not installation:
        torch._dynamo.reset()
    return before


def install(
    *, policy: _PolicyArgument = None, overrides: Mapping[Any, Any] | None = None, cache: str | None = None
) -> Installation:
    """Makes every region of `torch.autocast` for "cpu" and "cuda" that is entered from now on a region of ours.

    It holds for all threads of the process and for all code, PyTorch's and that of frameworks included. Regions of
    other device types stay PyTorch's, and so do regions that are open now and functions of `torch.jit.script`. A second
    call replaces the first.

    Args:
        policy: As for `my_autocast`.
        overrides: As for `my_autocast`.
        cache: As for `my_autocast`. A region with `cache_enabled=False` reuses no casts, whatever the mode.

    Returns:
        What is in force now.

    Raises:
        OptionError: The cache mode does not exist. It is a ValueError.
        PolicyError: A policy or op does not exist, a policy is not legal for an op, or a policy file is wrong. It is a
            ValueError. In both cases nothing has changed.

    Example:
        >>> install(overrides={"matmul": "fp32"})
        <torch_promote.install(overrides={'matmul': 'fp32'})>
        >>> with torch.autocast("cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
        >>> uninstall()
        <torch_promote.install(overrides={'matmul': 'fp32'})>
    """
    installation = Installation(policy, overrides, cache)
    with _lock:
        _put(installation)
    return installation


def uninstall() -> Installation | None:
    """Makes regions of `torch.autocast` PyTorch's again. Regions that are open end as what they began as.

    Returns:
        What was in force; None if nothing was, and nothing has changed.

    Example:
        >>> uninstall() is None
        True
    """
    with _lock:
        return _put(None)


def installed() -> Installation | None:
    """Returns what `install` has put in force; None if nothing.

    Example:
        >>> installed() is None
        True
    """
    return _installed


@contextlib.contextmanager
def installed_as(
    *, policy: _PolicyArgument = None, overrides: Mapping[Any, Any] | None = None, cache: str | None = None
) -> Iterator[Installation]:
    """`install` for the length of a block, after which holds what held before; for tests.

    It is for the whole process, as `install` is, so blocks of several threads must not overlap.

    Args:
        policy: As for `install`.
        overrides: As for `install`.
        cache: As for `install`.

    Yields:
        What is in force in the block.

    Example:
        >>> with installed_as(policy="off") as installation:
        ...     installed() is installation
        True
        >>> installed() is None
        True
    """
    installation = Installation(policy, overrides, cache)
    with _lock:
        before = _put(installation)
    try:
        yield installation
    finally:
        with _lock:
            _put(before)
