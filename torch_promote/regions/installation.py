"""`install`: turns all regions of torch.autocast in this process into regions of ours.

`install` replaces `__enter__` and `__exit__` in the class `torch.autocast`, which keeps PyTorch's `__init__`, checks,
warnings and attributes. So it also affects code that imported the class earlier (`from torch import autocast`),
subclasses (`torch.cuda.amp.autocast`), `custom_fwd` and `ExitStack`.

Source: torch/amp/autocast_mode.py, class autocast, _enter_autocast (v2.13).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

import torch

from torch_promote import _C
from torch_promote.errors import OptionError, PolicyError, UnusedOverrideWarning, explains_arguments, say
from torch_promote.extension import DTYPE_NUMBERS, DeviceSpec, RegionSpec, fork_safe_lock
from torch_promote.integrations import compile as _compile
from torch_promote.integrations.asyncio_tasks import guard_tasks
from torch_promote.integrations.checkpoint import keeps_stock_autocast
from torch_promote.integrations.compile import graph_enter, graph_exit, record_enter, record_exit, while_changing
from torch_promote.policy.named_policies import stock_policy
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, OpPolicy
from torch_promote.policy.overrides import parse_overrides, select, spell_overrides
from torch_promote.policy.policy import Policy, PolicyLike
from torch_promote.regions import defaults
from torch_promote.regions.autocast import (
    CacheMode,
    allows_cache,
    number_of_applied,
    policy_change,
    read_policy,
    tell_watchers,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_mode = torch.amp.autocast_mode
_Autocast = _mode.autocast


class stock_autocast(_Autocast):  # noqa: N801 (named as the class that it is)
    """PyTorch's own `torch.autocast`, also while `install` is in force. Use it for comparisons.

    Inside an open region of ours, that region's policy stays in force, as it does inside `torch.autocast` without
    `install`.

    It takes the arguments of `torch.autocast`.

    Example:
        >>> with install(policy="off"):
        ...     with torch.autocast("cpu"):
        ...         ours = torch.ones(2, 2) @ torch.ones(2, 2)
        ...     with stock_autocast("cpu"):
        ...         stock = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> ours.dtype, stock.dtype
        (torch.float32, torch.bfloat16)
    """

    if TYPE_CHECKING:

        def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
            """Decorates a callable."""

    else:
        __enter__ = _Autocast.__enter__
        __exit__ = _Autocast.__exit__


class _Objects(list[weakref.ref[Any]]):
    """The objects whose regions are open in a thread, once per open region, outermost first."""

    # The references own the regions: the extension stores the address of an owner, and that of an object may be reused
    # while its region is open. A dead reference is that of a region that no code can end.

    __slots__ = ("__weakref__",)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.objects = _Objects()
        self.passes_on = False
        _threads[id(self.objects)] = self.objects


_threads: weakref.WeakValueDictionary[int, _Objects] = weakref.WeakValueDictionary()
_thread = _Thread()

#: Protects changes of the installation. Acquire Dynamo's lock before this one, never after it.
_lock = fork_safe_lock()

_installation: Installation | None = None

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
    if packed is None or keeps_stock_autocast(installation.is_plain):
        return _enter_method.pass_on(self)
    device_type = self.device
    # Unused here, but PyTorch's objects have these attributes.
    self.prev_cache_enabled = torch.is_autocast_cache_enabled()
    self.prev = torch.is_autocast_enabled(device_type)
    self.prev_fastdtype = torch.get_autocast_dtype(device_type)
    if _opens_in_graph is not None and sys._getframe(1).f_code is _opens_in_graph:
        self.__class__ = _GraphAutocast  # pragma: no cover: PyTorch before 2.12
    if self.__class__ is _GraphAutocast:
        graph_enter(packed)
        _opened_by_graphs.add(self)
        _compile.refuse_strict_export()
        return self
    owner = weakref.ref(self)
    surroundings = _C.enter_region(owner, packed)
    _thread.objects.append(owner)
    if surroundings:
        try:
            _tell_surroundings(surroundings, packed, self)
        except BaseException:
            _end(_thread.objects, self)
            raise
    if _installation is None:  # another thread has removed it meanwhile, and may have missed this region
        with _lock:
            _exit_method.place()
    return self


@functools.wraps(_Autocast.__exit__)
def _exit(
    self: Any, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
) -> Literal[False]:
    surroundings = _end(_thread.objects, self)
    if surroundings is not None:
        if surroundings > 0:
            record_exit(_names_device(self.device))
    elif self.__class__ is _GraphAutocast and self in _opened_by_graphs:
        _opened_by_graphs.discard(self)
        graph_exit(_names_device(self.device))
    # Unless the region is open in the thread that entered it:
    elif self.device not in DEVICE_TYPES or not any(one() is self for them in _of_all_threads() for one in them):
        _exit_method.pass_on(self, kind, value, traceback)
    if _installation is None:
        _restore()
    return False


def _tell_surroundings(surroundings: int, packed: str, region: Any) -> None:
    if surroundings & _C.RUNNING_LOOP:
        guard_tasks()
        objects = _thread.objects
        if len(objects) > _C.depth() + 64:  # left over from tasks that finished without ending their regions
            objects[:] = [owner for owner in objects if owner() is not None]
    if surroundings & _C.TORCH_FUNCTION_MODE:
        record_enter(packed)
    if surroundings & _C.WATCHED:
        tell_watchers(region)


def _names_device(device_type: str) -> str:
    return RegionSpec((DeviceSpec(device_type, torch.bfloat16, True),)).pack()


def _of_all_threads() -> list[_Objects]:
    # Iterating over the dictionary itself would raise if another thread started or ended meanwhile.
    return [objects for reference in _threads.valuerefs() if (objects := reference()) is not None]


def _end(objects: _Objects, region: object) -> int | None:
    """Ends the innermost region of an object in this thread. Returns what `exit_region` does, None if there is none."""
    for at in range(len(objects) - 1, -1, -1):
        if objects[at]() is region:
            break
    else:
        return None
    surroundings = _C.exit_region(objects[at])
    if surroundings >= 0:  # else it is suspended between two steps of a coroutine
        # PyTorch's regions restore at their end the state that they found, and so end those left open inside them.
        for above in range(len(objects) - 1, at, -1):
            if objects[above]() is None:
                _C.exit_region(objects[above])
                del objects[above]
    del objects[at]
    return surroundings


class _Method:
    """A method of the class that we replace."""

    def __init__(self, name: str, ours: Callable[..., Any]) -> None:
        self.name = name
        self.ours = ours
        # `before` is PyTorch's method or another replacement. It handles the calls that we don't.
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
    """Restores the class once nothing is installed; `__exit__` only once no region of ours is open."""
    with _lock:
        if _installation is None:
            _enter_method.restore()
            if not _opened_by_graphs and not any(_of_all_threads()):
                _exit_method.restore()


def _forget_other_threads() -> None:
    # A fork copies only this thread. Regions of other threads are not open in the child.
    _threads.clear()
    _threads[id(_thread.objects)] = _thread.objects


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_other_threads)

_compile.register(_enter, _exit, stock_autocast)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _not_in_graphs(function: _Function) -> _Function:
    """Makes Dynamo break the graph at calls of the function, with a reason."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it changes the regions of compiled functions"  # type: ignore[attr-defined]
    return function


class Installation:
    """The handle that `install` returns, and its settings.

    Attributes:
        policy: The policy of regions. None: the policy of the surrounding region, or the default if there is none.
        overrides: The cast policies of single ops on top of the policy.
        cache: The cache mode. None: the mode of the surrounding region, or "weights" if there is none.
    """

    __slots__ = ("_change", "_held", "_specs", "cache", "is_plain", "overrides", "policy")

    def __init__(
        self, policy: PolicyLike | None, overrides: Mapping[Any, OpPolicy] | None, cache: CacheMode | None
    ) -> None:
        given = dict(overrides) if isinstance(overrides, Mapping) else overrides
        self.policy: Policy | str | None = read_policy(policy)
        tables = 0 if self.policy is None else number_of_applied(Policy.of(self.policy))
        self._held = policy_change(self.policy, given, tables)
        self._change = self._held.number
        if cache is not None:
            allows_cache(cache, None)
        self.overrides: Mapping[Any, OpPolicy] = MappingProxyType(given or {})
        self.cache: CacheMode | None = cache
        self._specs: dict[Any, str] = {}
        #: Whether regions take the policy and the cache mode from their surroundings.
        self.is_plain: bool = self._change == 0 and cache is None

    @_not_in_graphs
    def remove(self) -> None:
        """Puts in force what was installed before. Repeating it does nothing.

        Regions that are open keep running as regions of ours until they end. If handles are removed in another order
        than that of their calls, the last call whose handle has not been removed is in force.
        """
        _replace("Installation.remove()", lambda: [one for one in _installations if one is not self])

    def __enter__(self) -> Installation:
        return self

    @_not_in_graphs
    def __exit__(self, *error: object) -> None:
        _replace("Installation.__exit__()", self._before)

    def _before(self) -> list[Installation]:
        """What was installed before the call. The end of a block also removes what was installed in it."""
        at = _installations.index(self) if self in _installations else len(_installations)
        return _installations[:at]

    def spec_of(self, region: Any) -> str | None:
        """Returns the packed spec of a torch.autocast object, or None if PyTorch has to handle it (or raise)."""
        enabled, reuses = region._enabled, region._cache_enabled
        # PyTorch rejects 1, although it equals True.
        if not ((enabled is True or enabled is False) and (reuses is True or reuses is False)):
            return None
        key = region.device, region.fast_dtype, enabled, reuses
        try:
            return self._specs[key]
        except (KeyError, TypeError):  # not computed yet, or not hashable
            device_type, dtype = key[:2]
        known = isinstance(device_type, str) and device_type in DEVICE_TYPES
        if not known or not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NUMBERS:
            return None
        devices, mode = (DeviceSpec(device_type, dtype, enabled),), None if self.cache == "none" else self.cache
        packed = self._specs[key] = RegionSpec(devices, reuses and self.cache != "none", mode, self._change).pack()
        if enabled and not reuses and mode is not None:
            warnings.warn(
                f"cache={mode!r} was asked for, and a region with cache_enabled=False reuses no casts. Remove "
                "cache_enabled=False there.",
                UnusedOverrideWarning,
                stacklevel=3,
            )
        return packed

    def digest(self) -> str:
        """Returns a digest of the settings of a region entered now. It is the same in every process."""
        owner = object()
        _C.enter_region(owner, RegionSpec(policy_change=self._change).pack())
        try:
            return f"installed {self.cache} {_compile.policy_digest()}"
        finally:
            _C.exit_region(owner)

    @property
    def info(self) -> str:
        """Returns a sentence that describes the installation."""
        parts = [] if self.policy is None else [f"policy {self.policy!r}"]
        parts += [f"overrides {spell_overrides(self.overrides)}"] if self.overrides else []
        parts += [] if self.cache is None else [f"cache {self.cache!r}"]
        asked = ", ".join(parts) or "PyTorch's own policy and the cache mode 'weights' unless set elsewhere"
        return f"Regions of torch.autocast for {', '.join(DEVICE_TYPES)} are run by torch_promote: {asked}."

    def __repr__(self) -> str:
        parts = [f"policy={self.policy!r}"] if self.policy is not None else []
        parts += [f"overrides={spell_overrides(self.overrides)}"] if self.overrides else []
        parts += [f"cache={self.cache!r}"] if self.cache is not None else []
        return f"<torch_promote.install({', '.join(parts)})>"


_compile.digests.append(lambda: "" if _installation is None else _installation.digest())


#: What is installed, in the order of the calls. The last is in force.
_installations: list[Installation] = []


def _behavior(installation: Installation | None) -> tuple[int, CacheMode | None] | None:
    return None if installation is None else (installation._change, installation.cache)


def _replace(what: str, changed: Callable[[], list[Installation]]) -> None:
    global _installation
    with while_changing(what) as forget_compiled, _lock:
        _installations[:] = changed()
        before, _installation = _installation, _installations[-1] if _installations else None
        if _behavior(before) != _behavior(_installation):
            forget_compiled()
        if _installation is None:
            _restore()
        else:
            _exit_method.place()  # first: another thread may be entering a region of an earlier installation
            _enter_method.place()


@_not_in_graphs
@explains_arguments
def install(
    *, policy: PolicyLike | None = None, overrides: Mapping[Any, OpPolicy] | None = None, cache: CacheMode | None = None
) -> Installation:
    """Runs every region of `torch.autocast` that is entered from now on as a region of ours.

    It affects all threads of the process and all code, including PyTorch and frameworks. It does not affect
    device types that `my_autocast` lacks, regions that are open now, and functions of `torch.jit.script`. A second call
    takes the place of the first until its handle is removed.

    Args:
        policy: As for `my_autocast`.
        overrides: As for `my_autocast`.
        cache: As for `my_autocast`. A region with `cache_enabled=False` reuses no casts in any mode.

    Returns:
        A handle: its `remove()`, or the end of a `with` block with it, puts in force what was installed before. The end
        of a block also removes what was installed in the block, in any thread. The installation stays if you drop the
        handle; `installed()` returns it again.

    Raises:
        OptionError: The cache mode does not exist. It is a ValueError.
        PolicyError: A policy or op does not exist, a policy is not legal for an op, a policy file is invalid, or the
            policy has module tables and `Policy.apply_to` was not called. It is a ValueError. After either error,
            nothing has changed.

    Example:
        >>> handle = install(overrides={"matmul": "fp32"})
        >>> handle
        <torch_promote.install(overrides={'matmul': 'fp32'})>
        >>> with torch.autocast("cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
        >>> handle.remove()
        >>> with install(policy="off"):  # for the length of a block
        ...     with torch.autocast("cpu"):
        ...         (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    installation = Installation(policy, overrides, cache)
    _replace("install()", lambda: [*_installations, installation])
    return installation


@explains_arguments
def installed() -> Installation | None:
    """Returns the handle of the installation that is in force, or None. Its `remove()` undoes it.

    Example:
        >>> installed() is None
        True
    """
    return _installation


AUTOCAST = "TORCH_PROMOTE_AUTOCAST"
POLICY = defaults.VARIABLE
OVERRIDES = "TORCH_PROMOTE_OVERRIDES"
CACHE = "TORCH_PROMOTE_CACHE"
VARIABLES = (AUTOCAST, POLICY, defaults.MODEL, OVERRIDES, CACHE)


def use_environment() -> Installation | None:
    """Calls `install` with TORCH_PROMOTE_OVERRIDES and TORCH_PROMOTE_CACHE if TORCH_PROMOTE_AUTOCAST is 1."""
    # It passes no policy: regions without one use the default policy, which TORCH_PROMOTE_POLICY sets.
    if os.environ.get(AUTOCAST) != "1":  # _torch_promote_hooks warns of other values
        return None
    cache = os.environ.get(CACHE, "")
    try:
        return install(overrides=asked_overrides(), cache=cast(CacheMode, cache) or None)
    except OptionError as error:
        raise OptionError(f"the environment variable {CACHE} is {cache!r}: {error}") from None


def unused_overrides() -> tuple[list[str], str]:
    """At the end of `torch-promote run --override`: returns the overrides that never acted here, and why."""
    installation = installed()
    entered = [key for one in _installations for key in one._specs]  # of the regions that the program has entered
    is_launcher = not entered and (os.times().children_user > 0 or multiprocessing.parent_process() is not None)
    if installation is None or is_launcher:  # or a worker
        return [], ""
    applied, unused = set(_C.ops_with_applied_policies()), []
    for op, spelled in asked_overrides().items():
        policy, overloads = select(op, spelled)
        # Of one that says what PyTorch's table says, nothing is known.
        devices = [device for device, *_ in entered] or DEVICE_TYPES
        changes = any(stock_policy(name, device) is not policy for name in overloads for device in devices)
        if changes and policy is not CastPolicy.fallthrough and applied.isdisjoint(overloads):
            unused.append(f"{op}={spelled}")
    why = (
        "The op did not run, ran where autocast is off (outside of regions, or in one with enabled=False), or was "
        "called by another op that autocast casts."
    )
    if not any(enabled for _, _, enabled, _ in entered):
        why = "All regions of the program were disabled (enabled=False), or their device is not there."
    if not entered:
        why = "The program opened no region of torch.autocast."
    return unused, f"{why} `torch-promote trace` names its calls."


def say_unused_overrides() -> None:
    """Says on stderr which overrides of the command line never acted in this process."""
    unused, why = unused_overrides()
    if unused:
        say(f"torch-promote: the override {', '.join(unused)} never acted. {why}")


def asked_overrides() -> dict[str, str]:
    """Returns the overrides in TORCH_PROMOTE_OVERRIDES, which are checked."""
    text = os.environ.get(OVERRIDES, "")
    try:
        overrides = split_overrides(text)
        parse_overrides(overrides)
    except PolicyError as error:
        raise PolicyError(f"the environment variable {OVERRIDES} is {text!r}: {error}") from None
    return overrides


def split_overrides(text: str) -> dict[str, str]:
    """Parses overrides from one line, as "softmax=lower, linalg_*=float64"."""
    overrides: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        op, equals, policy = (piece.strip() for piece in part.partition("="))
        if not (op and equals and policy):
            raise PolicyError(f"{part!r} is not an override. Write OP=POLICY, as in softmax=fp32.")
        if overrides.setdefault(op, policy) != policy:
            raise PolicyError(f"{op!r} has two policies, {overrides[op]!r} and {policy!r}. Name each op once.")
    return overrides


def join_overrides(overrides: dict[str, str]) -> str:
    """The reverse of `split_overrides`."""
    return ",".join(f"{op}={policy}" for op, policy in overrides.items())
