"""The autocast state in force, and who has set an op's policy; the overrides that no call has used.

NOTE [ What one override is ]
An override counts as the user wrote it: {"linalg_*": "fp32"} is one override, and it is used as soon as one of its
overloads is. A named policy ("cuda") also counts as one, because no program uses all its rows. The entries of another
policy, such as a file's, count op by op.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_promote import _C
from torch_promote.extension import RegionSpec, policies_beyond_stock
from torch_promote.loader import AUTOCAST_KEY
from torch_promote.observe.call import AUTOCAST_OFF, BY_BACKWARD, BY_CUSTOM_BWD, BY_SETTER, TensorInfo, is_by_backward
from torch_promote.observe.ops import has_row
from torch_promote.observe.places import RunningModules, frames, innermost_line, is_ours, place, shown_line
from torch_promote.policy.named_policies import RECOGNIZED
from torch_promote.policy.op_names import spell_key
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, spell_policy
from torch_promote.policy.overrides import select
from torch_promote.policy.policy import Policy
from torch_promote.reference.autocast import AutocastState, DeviceAutocast
from torch_promote.regions.autocast import Region, my_autocast
from torch_promote.regions.defaults import default_policy, registered_policies, source_of_default_policy
from torch_promote.regions.installation import installed
from torch_promote.regions.module_forward import policy_of
from torch_promote.regions.promotion import promotion
from torch_promote.report.base import short_line

#: Excluded while the kernel of an op runs; see csrc/policy/dispatch_state.h.
_NOT_IN_KERNELS = torch._C.DispatchKey.ADInplaceOrView
_KEY = getattr(torch._C.DispatchKey, AUTOCAST_KEY)


def my_autocast_is_in_force() -> bool:
    """Whether calls in this thread pass through the kernels of `my_autocast`."""
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    return included and not torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)


@functools.lru_cache(maxsize=64)
def _overrides_of(policy_id: int, inside_kernel: bool) -> Mapping[str, Mapping[str, CastPolicy | torch.dtype]]:
    """The policies in force that differ from stock, by overload and device type. The id is the key of the cache."""
    # Inside the kernel of an op, policies other than stock's cast nothing.
    del policy_id
    found = {}
    for name, policies in policies_beyond_stock().items():
        if inside_kernel:
            policies = {d: p if p in _CASTING_NOTHING else CastPolicy.fallthrough for d, p in policies.items()}
        found[name] = MappingProxyType(policies)
    return MappingProxyType(found)


_CASTING_NOTHING = (CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned)


def state_in_force() -> AutocastState | None:
    """Returns the autocast state in force; None if autocast is off for every device type."""
    # An observer asks at each call: no generator, and no further function.
    # torch._C._is_any_autocast_enabled would not do: it leaves out MPS.
    on: list[tuple[str, torch.dtype]] = []
    for device in DEVICE_TYPES:
        if torch.is_autocast_enabled(device):
            on.append((device, torch.get_autocast_dtype(device)))
    if not on:
        return None
    policy_id = _C.current_policy_id() if my_autocast_is_in_force() else None
    inside = torch._C._dispatch_tls_is_dispatch_key_excluded(_NOT_IN_KERNELS)
    return _state(tuple(on), policy_id, inside)


@functools.lru_cache(maxsize=64)
def _state(on: tuple[tuple[str, torch.dtype], ...], policy_id: int | None, inside_kernel: bool) -> AutocastState:
    devices = {device: DeviceAutocast(True, dtype) for device, dtype in on}
    overrides = MappingProxyType({}) if policy_id is None else _overrides_of(policy_id, inside_kernel)
    return AutocastState(devices, overrides)


STOCK = "PyTorch's table"
#: The start of `Call.policy_source` of calls on tensors of a device type for which no region is.
NO_REGION = "no region for "
_REGISTERED = "register_policy"
#: The source of an override of `install`. Regions of torch.autocast append their line to it.
_INSTALLED = "install"
_NESTED = "a region of torch.autocast inside"
_UNKNOWN = "a region that was open before the trace"
_ALL_DEVICES = ", ".join(DEVICE_TYPES)


@dataclass(frozen=True, slots=True)
class UnusedOverride:
    """An override that no call used: it names the wrong op, or the op ran outside of the region or module.

    Attributes:
        op: The op as it was written: "softmax", "linalg_*". "*" stands for a named policy.
        device: Its device types: "cpu", "cpu, cuda, xpu, mps".
        policy: The cast policy's name, "float16" for a dtype, or 'policy "cuda"'.
        policy_source: Its source: "region at FILE:LINE", 'module policy "NAME"', "install", "the default policy"
            or "mine.toml, the default policy".

    Example:
        >>> print(UnusedOverride("exp", "cpu", "fp32", 'module policy "blocks.3"'))
        exp: fp32, asked for by module policy "blocks.3"
    """

    op: str
    device: str
    policy: str
    policy_source: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the override as JSON-compatible values."""
        return asdict(self)

    def __str__(self) -> str:
        what = self.policy if self.op == "*" else f"{self.op}: {self.policy}"
        return f"{what}, asked for by {self.policy_source}"


class _OpenRegion(NamedTuple):
    """An open region: the number of its policy change, its name, and its device types with whether autocast is on."""

    change: int
    text: str
    devices: Mapping[str, bool]


class PolicySources:
    """Follows the regions that are entered, and finds the source of an op's policy."""

    def __init__(self, modules: RunningModules) -> None:
        self._modules = modules
        self._regions: dict[tuple[int, int, int], _OpenRegion] = {}  # by thread, owner, and nesting count
        self._known: dict[tuple[Any, ...], str] = {}  # the answers since the last region was entered
        # Autograd's threads and a checkpoint's recomputation have a policy without its regions: then the source is that
        # of this module's forward, or that of the regions that were open when the policy was entered.
        self._said: dict[tuple[int, str, str, str], str] = {}
        self._by_policy: dict[int, tuple[_OpenRegion, ...]] = {}
        # The overrides that somebody asked for, with their overloads, and what `Call.policy_source` is if they apply.
        self._asked: dict[UnusedOverride, tuple[set[str], set[str]]] = {}
        self._asked_at: set[tuple[str, int]] = set()
        # A region that is entered at several lines is named after the first.
        self._first: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()

    def entered(self, owner: object) -> None:
        """Records a region that this thread has entered; for `watch_regions`."""
        module, path = self._modules.innermost
        if type(owner) is Region:
            text = f'module policy "{path}"'
        else:
            prefix = "" if isinstance(owner, my_autocast | promotion) else f"{_INSTALLED}, "
            text = f"{prefix}{_name_here()}"
        self._known.clear()  # a new region may have the address of an old one
        opened = _C.open_regions()
        innermost, change = opened[-1]
        times = sum(address == innermost for address, _ in opened)
        region = _OpenRegion(change, text, _devices_of(owner))
        self._regions[threading.get_ident(), innermost, times] = region
        self._by_policy[_C.current_policy_id()] = self._open_regions()
        if (text, change) not in self._asked_at:
            self._asked_at.add((text, change))
            self._ask(default := source_of_default_policy(), default, default_policy())
            if type(owner) is Region:
                self.ask_module(module, path)
            elif isinstance(owner, my_autocast):
                asked, shown = owner._asked, self._first.setdefault(owner, text)
                self._ask(shown, text, asked.policy, asked.overrides, ", ".join(region.devices))
            elif text.startswith(_INSTALLED) and (installation := installed()) is not None:
                self._ask(_INSTALLED, text, installation.policy, installation.overrides)

    def ask_module(self, module: nn.Module | None, path: str) -> None:
        """Collects the overrides of a module's policy, if it has one."""
        policy = None if module is None else policy_of(module)
        if policy is not None and policy.change is not None:  # "fp32" and "off" disable autocast
            source, value = f'module policy "{path}"', policy.value
            if isinstance(value, dict):
                self._ask(source, source, None, value)
            else:
                self._ask(source, source, value)

    def _ask(
        self,
        shown: str,
        policy_source: str,
        policy: Any,
        overrides: Mapping[Any, Any] | None = None,
        devices: str = _ALL_DEVICES,
    ) -> None:
        """Collects overrides. Each is listed once, however often its region is entered."""
        found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
        if policy is not None:
            whole = Policy.of(policy)
            names = [policy] if isinstance(policy, str) and policy in Policy.names() else RECOGNIZED
            name = next((name for name in names if Policy.named(name) == whole), None)
            for overload, device, value in whole.changes if name != "off" else ():
                op = overload.partition(".")[0].removeprefix("aten::")
                key = (op, spell_policy(value)) if name is None else ("*", f'policy "{name}"')
                types, overloads = found.setdefault(key, (set(), set()))
                types.update(DEVICE_TYPES if name else [device])
                overloads.add(overload)
        every = [(op, ", ".join(sorted(types)), text, overloads) for (op, text), (types, overloads) in found.items()]
        for written, value in (overrides or {}).items():
            chosen, named = select(written, value)
            every.append((spell_key(written), devices, spell_policy(chosen), set(named)))
        for op, where, spelled, overloads in every:
            one = UnusedOverride(op, where, spelled, shown)
            self._asked.setdefault(one, (overloads, set()))[1].add(policy_source)

    def asked(self, used: Collection[tuple[str, str, str]]) -> list[dict[str, Any]]:
        """Returns the collected overrides as JSON-compatible values, with whether a call in `used` used them."""
        return [
            {
                **asdict(one),
                "used": any(
                    op in overloads
                    and policy_source in sources
                    and one.op in ("*", one.op if policy == one.policy else "")
                    for op, policy, policy_source in used
                ),
            }
            for one, (overloads, sources) in self._asked.items()
        ]

    def of(self, name: str, device_type: str, module: str = "") -> str:
        """Returns the source of the policy of an overload in this thread, as in `Call.policy_source`."""
        if not my_autocast_is_in_force():
            return STOCK
        policy = _C.current_policy_id()
        place = threading.get_ident(), policy, _C.open_regions(), name, device_type, module
        text = self._known.get(place)
        if text is None:
            text = _source(self._open_regions(), name, device_type)
            if text:
                self._said[policy, name, device_type, module] = text
                innermost = self._open_regions()[-1].text.removeprefix(f"{_INSTALLED}, ")
                text += f", {innermost}" * (text == STOCK and is_by_backward(innermost))
            else:
                text = self._said.get((policy, name, device_type, module), "")
                text = text or _source(self._by_policy.get(policy, ()), name, device_type) or _UNKNOWN
            self._known[place] = text
        return text

    def switched_off(
        self, name: str, inputs: tuple[TensorInfo, ...], autocast: tuple[tuple[str, torch.dtype], ...]
    ) -> str:
        """Returns "autocast off by region at FILE:LINE" or the like, for an op with a policy; "" without a region."""
        on = dict(autocast)
        for info in inputs:
            device_type = info.device.partition(":")[0]
            if device_type not in on and device_type in DEVICE_TYPES and has_row(name, device_type):
                regions = self._open_regions()
                for region in reversed(regions):
                    enabled = region.devices.get(device_type)
                    if enabled is not None:
                        return f"{AUTOCAST_OFF}{_NESTED if enabled else region.text}"
                if regions and regions[-1].devices:
                    others = ", ".join(map(_shown_device, regions[-1].devices))
                    return f"{NO_REGION}{device_type}: {regions[-1].text} is for {others}"
        return ""

    @staticmethod
    def outside_of_regions() -> str:
        """Returns `BY_SETTER` if no region is open in this thread, where autocast is on."""
        torch.autocast_increment_nesting()  # which is what tells their number
        return "" if torch.autocast_decrement_nesting() or _C.depth() else BY_SETTER

    def open_here(self) -> str:
        """Returns the innermost region of this thread if autocast is on there, without folders; "" if it is off."""
        if state_in_force() is None:
            return ""
        opened, at, line = (self._open_regions()[-1].text if _C.depth() else "a region").rpartition(" at ")
        return f"{opened.removeprefix(f'{_INSTALLED}, ')}{at}{short_line(line)}"

    def _open_regions(self) -> tuple[_OpenRegion, ...]:
        """The open regions of this thread."""
        found, thread, times = [], threading.get_ident(), Counter[int]()
        for address, change in _C.open_regions():
            times[address] += 1
            known = self._regions.get((thread, address, times[address]), _OpenRegion(change, _UNKNOWN, {}))
            found.append(known._replace(change=change))
        return tuple(found)


#: Where the wrappers that decorators of regions return have the function.
_WRAPPERS = {"decorate_bwd": "bwd", "decorate_autocast": "func", "wrapper": "func"}


def _name_here() -> str:
    """The name of a region that is entered now, after the line of the program that opens it."""
    here = place() if torch._C._current_graph_task_id() != -1 else None
    start = BY_BACKWARD if here is not None and here.phase == "backward" else "region at "
    if here is not None and here.line:
        return f"{start}{shown_line(here.line)}"
    # PyTorch's code may open it: a decorated function's wrapper, or a checkpoint. The line of backward() opens none.
    for frame in frames():
        name = frame.f_code.co_name
        # The locals of other frames are not asked for, which keeps them alive.
        function: Any = frame.f_locals.get(_WRAPPERS[name]) if name in _WRAPPERS else None
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            start, word = (BY_CUSTOM_BWD, "custom_bwd") if name == "decorate_bwd" else (start, "autocast")
            file, first = code.co_filename, code.co_firstlineno  # the line of the first decorator
            lines = ((line, linecache.getline(file, line)) for line in itertools.count(first))
            decorators = itertools.takewhile(lambda of: of[1].lstrip().startswith("@"), lines)
            own = (line for line, text in decorators if word in text)
            return f"{start}{shown_line(f'{file}:{next(own, first)}')}"
        if not is_ours(frame) and name != "__enter__":
            line = innermost_line() if here is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
            return f"{start}{line}"
    return f"{start}a thread of autograd"


def _source(regions: tuple[_OpenRegion, ...], name: str, device_type: str) -> str:
    """The source of an op's policy in open regions; "" if they do not tell."""
    if not regions:
        return ""
    wanted = (name, device_type)
    for region in reversed(regions):
        base, ops = _described(region.change)
        if wanted in ops:
            # The change that carries a policy into a recomputation or another thread is complete.
            return "" if base == "stock" else region.text
        if base != "around":
            return _REGISTERED if base == "registered" and wanted in registered_policies() else STOCK
    default = default_policy()
    if default is not None and any(change[:2] == wanted for change in default.changes):
        return source_of_default_policy()
    return _REGISTERED if wanted in registered_policies() else STOCK


def _shown_device(device_type: str) -> str:
    is_available = getattr(getattr(torch, device_type, None), "is_available", lambda: True)
    return device_type if is_available() else f"{device_type}, which is not available here"


def _devices_of(owner: object) -> dict[str, bool]:
    """The device types of a region, and whether autocast is on in it."""
    if isinstance(owner, Region):
        return {device.device_type: device.enabled for device in RegionSpec.unpack(owner._packed).devices}
    return {owner.device: owner._enabled}  # type: ignore[attr-defined]  # of torch.autocast


@functools.lru_cache(maxsize=256)
def _described(change: int) -> tuple[str, frozenset[tuple[str, str]]]:
    base, ops = _C.describe_change(change)
    return base, frozenset((name, DEVICE_TYPES[device]) for name, device in ops)
