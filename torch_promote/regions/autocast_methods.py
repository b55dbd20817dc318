"""The replacements of `torch.autocast.__enter__` and `__exit__` while `install` is in force.

`install` replaces these two methods in the class `torch.autocast`, which keeps PyTorch's `__init__`, checks, warnings
and attributes. So it also affects code that imported the class earlier (`from torch import autocast`), subclasses
(`torch.cuda.amp.autocast`), `custom_fwd` and `ExitStack`.

Source: torch/amp/autocast_mode.py, class autocast, _enter_autocast (v2.13).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from torch_promote import _C
from torch_promote.extension import DeviceSpec, RegionSpec, fork_safe_lock
from torch_promote.integrations import compile as compile_installed
from torch_promote.integrations.asyncio_tasks import guard_tasks
from torch_promote.integrations.checkpoint import stays_stocks
from torch_promote.integrations.compile import graph_enter, graph_exit
from torch_promote.integrations.export import record_enter, record_exit
from torch_promote.integrations.ranks import compare_ranks
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.regions.watching import tell_watchers

__all__ = ["in_force", "lock", "put_in_force", "stock_autocast"]

_mode = torch.amp.autocast_mode
_Autocast = _mode.autocast


class InForce(Protocol):
    """The interface of an Installation that `put_in_force` uses."""

    def spec_of(self, region: Any) -> str | None:
        """Returns the packed spec of a torch.autocast object, or None if PyTorch has to handle it (or raise)."""

    @property
    def is_plain(self) -> bool:
        """Whether regions take the policy and the cache mode from their surroundings."""


class stock_autocast(_Autocast):  # noqa: N801 (named as the class that it is)
    """PyTorch's own `torch.autocast`, also while `install` is in force. Use it for comparisons.

    Inside an open region of ours, that region's policy stays in force, as it does inside `torch.autocast` without
    `install`.

    It takes the arguments of `torch.autocast`.

    Example:
        >>> from torch_promote import installed_as
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


class _Held:
    """The objects whose regions are open in a thread, once per open region. The extension stores their addresses."""

    __slots__ = ("__weakref__", "objects")

    def __init__(self) -> None:
        self.objects: list[Any] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = _Held()
        self.objects = self.held.objects
        self.passes_on = False
        _threads[id(self.held)] = self.held


_threads: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()
_thread = _Thread()

#: Protects changes of the installation. Acquire Dynamo's lock before this one, never after it.
lock = fork_safe_lock()

_installation: InForce | None = None

# NOTE [ Regions that graphs open ]
# In a Dynamo graph, a region is two calls, _enter_autocast and _exit_autocast. If the graph raises between them, the
# region is not ended. So all regions of graphs have the same owner, and end at the latest with the region around them.
# PyTorch has a class for the objects that _enter_autocast creates; before 2.12 they are plain torch.autocast objects,
# and get this class when they are entered.
_opened_by_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
_GraphAutocast: Any = getattr(_mode, "_UnmanagedAutocast", None)
_opens_in_graph: Any = None
if _GraphAutocast is None:  # pragma: no cover: PyTorch before 2.12

    class _OfGraph(_Autocast):
        pass

    _GraphAutocast = _OfGraph
    _opens_in_graph = _mode._enter_autocast.__code__


@functools.wraps(_Autocast.__enter__)
def _enter(self: Any) -> Any:
    installation = _installation
    if installation is None:  # other code has put this method back into the class, or calls it directly
        _restore()
        return _enter_method.pass_on(self)
    packed = installation.spec_of(self)
    if packed is None or stays_stocks(installation.is_plain):
        return _enter_method.pass_on(self)
    device_type = self.device
    # Unused here, but PyTorch's objects have these attributes.
    self.prev_cache_enabled = torch.is_autocast_cache_enabled()
    self.prev = torch.is_autocast_enabled(device_type)
    self.prev_fastdtype = torch.get_autocast_dtype(device_type)
    if _opens_in_graph is not None and sys._getframe(1).f_code is _opens_in_graph:
        self.__class__ = _GraphAutocast  # pragma: no cover: PyTorch before 2.12
    if self.__class__ is _GraphAutocast:
        return _enter_in_graph(self, packed)
    surroundings = _C.enter_region(self, packed)
    _thread.objects.append(self)
    if surroundings:
        try:
            _tell_surroundings(surroundings, packed, self)
        except BaseException:
            _C.exit_region(self)
            _remove(_thread.objects, self)
            raise
    if _installation is None:  # another thread has called uninstall meanwhile, and may have missed this region
        _keep_exit()
    return self


@functools.wraps(_Autocast.__exit__)
def _exit(
    self: Any, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
) -> Literal[False]:
    surroundings = _C.exit_region(self)
    objects = _thread.objects
    if surroundings >= 0:
        if objects and objects[-1] is self:
            del objects[-1]
        else:
            _remove(objects, self, ends_dropped_above=True)
        if surroundings:
            record_exit(_names_device(self.device))
    elif self.__class__ is _GraphAutocast and self in _opened_by_graphs:
        _opened_by_graphs.discard(self)
        graph_exit(_names_device(self.device))
    elif not _began_as_ours(self):
        _exit_method.pass_on(self, kind, value, traceback)
    else:  # the region is suspended between two steps of a coroutine, or open in the thread that entered it
        _remove(objects, self)
    if _installation is None:
        _restore()
    return False


def _enter_in_graph(region: Any, packed: str) -> Any:
    graph_enter(packed)
    _opened_by_graphs.add(region)
    compile_installed.refuse_strict_export()
    return region


def _tell_surroundings(surroundings: int, packed: str, region: Any) -> None:
    if surroundings & _C.UNCHECKED_RANKS:
        compare_ranks(_installation)
    if surroundings & _C.RUNNING_LOOP:
        guard_tasks()
        objects = _thread.objects
        if len(objects) > _C.depth() + 64:  # left over from tasks that finished without ending their regions
            objects[:] = [objects[at] for at in range(len(objects)) if not _is_dropped(objects, at)]
    if surroundings & _C.TORCH_FUNCTION_MODE:
        record_enter(packed)
    if surroundings & _C.WATCHED:
        tell_watchers(region)


def _names_device(device_type: str) -> str:
    return RegionSpec((DeviceSpec(device_type, torch.bfloat16, True),)).pack()


def _began_as_ours(region: Any) -> bool:
    """Whether any thread has the region open or suspended as a region of ours."""
    if region.device not in DEVICE_TYPES:
        return False
    return any(one is region for held in _of_all_threads() for one in held.objects)


def _of_all_threads() -> list[_Held]:
    # Iterating over the dictionary itself would raise if another thread started or ended meanwhile.
    return [held for reference in _threads.valuerefs() if (held := reference()) is not None]


def _remove(objects: list[Any], gone: object, ends_dropped_above: bool = False) -> None:
    for at in range(len(objects) - 1, -1, -1):
        if objects[at] is gone:
            del objects[at]
            return
        # If only this list holds an object, no code can end its region. PyTorch's regions restore at their end the
        # state that they found, and so end regions that were left open inside them.
        if ends_dropped_above and _is_dropped(objects, at):
            _C.exit_region(objects[at])
            del objects[at]


_one = [object()]
#: The `sys.getrefcount` of an object that only a list holds.
_REFERENCES_OF_A_LIST = sys.getrefcount(_one[0])


def _is_dropped(objects: list[Any], at: int) -> bool:
    return sys.getrefcount(objects[at]) <= _REFERENCES_OF_A_LIST


class _Method:
    """A method of the class that we replace.

    Attributes:
        before: The method that was in the class, PyTorch's or another replacement. It handles the calls that we don't.
    """

    def __init__(self, name: str, ours: Callable[..., Any]) -> None:
        self.name = name
        self.ours = ours
        self.stock = self.before = getattr(_Autocast, name)
        self.is_placed = False

    def place(self) -> None:
        found = getattr(_Autocast, self.name)
        # Other code may have replaced ours since. Unless it restored the method from before, its method presumably
        # calls ours.
        if found is not self.ours and (not self.is_placed or found in (self.before, self.stock)):
            self.before = found
            setattr(_Autocast, self.name, self.ours)
        self.is_placed = True

    def restore(self) -> None:
        if getattr(_Autocast, self.name) is self.ours:
            setattr(_Autocast, self.name, self.before)
            self.is_placed = False

    def pass_on(self, *arguments: Any) -> Any:
        """Calls the method that was in the class before, or PyTorch's if that one calls ours in turn."""
        if self.before is self.stock or _thread.passes_on:
            return self.stock(*arguments)
        _thread.passes_on = True
        try:
            return self.before(*arguments)
        finally:
            _thread.passes_on = False


_enter_method = _Method("__enter__", _enter)
_exit_method = _Method("__exit__", _exit)


def _restore() -> None:
    """Restores the class after `uninstall`; `__exit__` only once no region of ours is open."""
    with lock:
        if _installation is None:
            _enter_method.restore()
            if not _opened_by_graphs and not any(held.objects for held in _of_all_threads()):
                _exit_method.restore()


def _place() -> None:
    _exit_method.place()
    _enter_method.place()


def _keep_exit() -> None:
    with lock:
        _exit_method.place()


def in_force() -> Any:
    """Returns the argument of the last `put_in_force`."""
    return _installation


def put_in_force(installation: InForce | None) -> None:
    """Puts an installation in force; None for none. The caller holds `lock`."""
    global _installation
    if installation is not None:
        _place()  # first: another thread may be entering a region of an earlier installation
    _installation = installation
    if installation is None:
        _restore()


def _forget_other_threads() -> None:
    # A fork copies only this thread. Regions of other threads are not open in the child.
    _threads.clear()
    _threads[id(_thread.held)] = _thread.held


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_other_threads)

compile_installed.register(_enter, _exit, stock_autocast)
