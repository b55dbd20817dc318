"""The sources of policies: PyTorch's table, `register_policy`, the default policy, regions, modules; unused overrides.

NOTE [ What one override is ]
An override counts as the user wrote it: {"linalg_*": "fp32"} is one override, and it is used as soon as one of its
overloads is. A named policy ("cuda") also counts as one, because no program uses all its rows. The entries of another
policy, such as a file's, count op by op.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_promote import _C
from torch_promote.extension import RegionSpec
from torch_promote.observe.autocast_state import my_autocast_is_in_force
from torch_promote.observe.events import AUTOCAST_OFF, TensorInfo, Totals
from torch_promote.observe.ops import has_row
from torch_promote.observe.places import RunningModules, innermost_line
from torch_promote.policy.op_names import spell_key
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, spell_policy
from torch_promote.policy.overrides import select
from torch_promote.policy.policy import Policy
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.defaults import default_policy, registered_policies
from torch_promote.regions.installation import installed
from torch_promote.regions.module_forward import policy_of
from torch_promote.regions.promotion import promotion
from torch_promote.regions.region import Region

if TYPE_CHECKING:
    from torch_promote.observe.events import Recording

__all__ = [
    "DEFAULT_POLICY",
    "INSTALLED",
    "REGISTERED",
    "STOCK",
    "AskedOverrides",
    "PolicySources",
    "UnusedOverride",
    "unused_overrides",
]


#: The source of an override of `install`. Regions of torch.autocast append their line to it.
INSTALLED = "install"
#: Stands for the ops of a named policy.
_ALL = "*"


@dataclass(frozen=True, slots=True)
class UnusedOverride:
    """An override that no call used: it names the wrong op, or the op ran outside of the region or module.

    Attributes:
        op: The op as it was written: "softmax", "linalg_*". "*" stands for a named policy.
        device: Its device types: "cpu", "cpu, cuda".
        policy: The cast policy's name, "float16" for a dtype, or 'policy "cuda"'.
        said_by: Its source: "region at FILE:LINE", 'module policy "NAME"', "install" or "the default policy".

    Example:
        >>> print(UnusedOverride("exp", "cpu", "fp32", 'module policy "blocks.3"'))
        exp: fp32, asked for by module policy "blocks.3"
    """

    op: str
    device: str
    policy: str
    said_by: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the override as JSON-compatible values."""
        return asdict(self)

    def __str__(self) -> str:
        what = self.policy if self.op == "*" else f"{self.op}: {self.policy}"
        return f"{what}, asked for by {self.said_by}"


class AskedOverrides:
    """Collects overrides while a trace runs. Each is listed once, however often its region is entered."""

    def __init__(self) -> None:
        self._asked: dict[UnusedOverride, frozenset[str]] = {}  # with the overloads that each names
        self._seen: set[tuple[str, int]] = set()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[my_autocast, str] = weakref.WeakKeyDictionary()
        self._more_names: dict[str, set[str]] = {}

    def entered(self, owner: object, said_by: str, change: int) -> None:
        """Records the overrides of a region.

        Args:
            owner: The region: an object of `my_autocast`, or, under `install`, of torch.autocast.
            said_by: Its name in the trace.
            change: The number of its policy change.
        """
        if isinstance(owner, my_autocast):
            # A decorator's region is entered at each line that calls the function.
            first = self._names.setdefault(owner, said_by)
            if first != said_by:
                self._more_names.setdefault(first, set()).add(said_by)
                return
        if (said_by, change) in self._seen:
            return
        self._seen.add((said_by, change))
        default = default_policy()
        if default is not None:
            self._add_policy(default, "the default policy")
        if isinstance(owner, my_autocast):
            policy, overrides = (*owner._arguments, None, None, None)[5:7]
            devices = RegionSpec.unpack(owner._packed).devices
            self._add(policy, overrides, said_by, ", ".join(device.device_type for device in devices))
        elif said_by.startswith(f"{INSTALLED},"):
            installation = installed()
            if installation is not None:
                self._add(installation.policy, installation.overrides, INSTALLED)

    def has_module(self, module: nn.Module | None, path: str) -> None:
        """Records the policy of a module, if it has one."""
        policy = None if module is None else policy_of(module)
        if module is None or policy is None:
            return
        self._modules.add(module)
        said_by = f'module policy "{path}"'
        if policy.change is None or (said_by, policy.change) in self._seen:  # "fp32" and "off" disable autocast
            return
        self._seen.add((said_by, policy.change))
        if isinstance(policy.value, dict):
            self._add(None, policy.value, said_by)
        else:
            self._add(policy.value, None, said_by)

    def add_modules(self, modules: Iterable[tuple[nn.Module, str]]) -> None:
        """Records the policies of modules that did not run."""
        for module, path in modules:
            if module not in self._modules:
                self.has_module(module, path)

    def records(self, totals: Totals) -> list[dict[str, Any]]:
        """Returns the overrides as JSON-compatible values, with whether a call of the trace used them."""
        used: set[tuple[str, str, str]] = set()
        others: set[str] = set()
        for (op, _, _), group in totals.select(lambda place: True):
            for text in group.policies:
                policy, _, said_by = text.partition(": ")
                used.add((op, policy, said_by))
            if group.policies.total() < group.calls:
                others.add(op)
        return [
            {**one.to_dict(), "used": self._is_used(one, overloads, used, others)}
            for one, overloads in list(self._asked.items())
        ]

    def _is_used(
        self, one: UnusedOverride, overloads: frozenset[str], used: set[tuple[str, str, str]], others: set[str]
    ) -> bool:
        # A call under "fallthrough" is recorded without a policy, so any call without a policy may be one.
        if one.policy == CastPolicy.fallthrough.value and not overloads.isdisjoint(others):
            return True
        names = {one.said_by, *self._more_names.get(one.said_by, ())}
        return any(
            op in overloads
            and policy in (one.policy, policy if one.op == _ALL else "")
            and (said_by in names or said_by.partition(",")[0] == INSTALLED in names)
            for op, policy, said_by in used
        )

    def _add(
        self,
        policy: Any,
        overrides: Mapping[Any, Any] | None,
        said_by: str,
        devices: str = ", ".join(DEVICE_TYPES),
    ) -> None:
        if policy is not None:
            self._add_policy(Policy.of(policy), said_by)
        for key, value in (overrides or {}).items():
            chosen, overloads = select(key, value)
            self._put(UnusedOverride(spell_key(key), devices, spell_policy(chosen), said_by), overloads)

    def _add_policy(self, policy: Policy, said_by: str) -> None:
        name = next((name for name in Policy.names() if Policy.named(name) == policy), None)
        if name is not None:
            ops = frozenset(overload for overload, _, _ in policy.changes)
            if ops and name != "off":
                self._put(UnusedOverride(_ALL, ", ".join(DEVICE_TYPES), f'policy "{name}"', said_by), ops)
            return
        # The entries by op, over its overloads and devices.
        found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
        for overload, device, value in policy.changes:
            devices, overloads = found.setdefault((overload.partition(".")[0], spell_policy(value)), (set(), set()))
            devices.add(device)
            overloads.add(overload)
        for (op, spelled), (devices, overloads) in found.items():
            one = UnusedOverride(op.removeprefix("aten::"), ", ".join(sorted(devices)), spelled, said_by)
            self._put(one, overloads)

    def _put(self, one: UnusedOverride, overloads: Iterable[str]) -> None:
        self._asked.setdefault(one, frozenset(overloads))


STOCK = "PyTorch's table"
REGISTERED = "register_policy"
DEFAULT_POLICY = "the default policy"
_NESTED = "a region of torch.autocast inside"
_UNKNOWN = "a region that was open before the trace"


class PolicySources:
    """Follows the regions that are entered, and finds the source of an op's policy.

    Args:
        modules: Tracks which module runs.
    """

    def __init__(self, modules: RunningModules) -> None:
        self._modules = modules
        self._regions: dict[tuple[int, int, int], str] = {}  # by thread, owner, and nesting count
        self._said: dict[tuple[int, str, str, str], str] = {}
        self._known: dict[tuple[Any, ...], str] = {}  # the answers since the last region was entered
        self._chains: dict[int, tuple[tuple[int, str], ...]] = {}  # the regions that were open under a policy
        self._devices: dict[tuple[int, int, int], dict[str, bool]] = {}  # a region's devices, and whether it is on
        self.asked = AskedOverrides()

    def entered(self, owner: object) -> None:
        """Records a region that this thread has entered; for `watch_regions`."""
        if type(owner) is Region:
            text = f'module policy "{self._modules.path}"'
        elif isinstance(owner, my_autocast | promotion):
            text = f"region at {innermost_line()}"
        else:
            text = f"install, region at {innermost_line()}"
        self._known.clear()  # a new region may have the address of an old one
        times = sum(address == id(owner) for address, _ in _C.open_regions())
        place = (threading.get_ident(), id(owner), times)
        self._regions[place], self._devices[place] = text, _devices_of(owner)
        self._chains[_C.current_policy_id()] = self._open_regions()
        if type(owner) is Region:
            self.asked.has_module(*self._modules.innermost)
        else:
            change = next((change for address, change in _C.open_regions()[-1:] if address == id(owner)), 0)
            self.asked.entered(owner, text, change)

    def of(self, name: str, device_type: str, module: str = "") -> str:
        """Returns the source of an op's policy in this thread.

        Args:
            name: The overload's full name, "aten::mm".
            device_type: "cpu" or "cuda".
            module: The path of the module that calls it.

        Returns:
            "PyTorch's table", "register_policy", "the default policy", "region at FILE:LINE", "module policy "NAME"" or
            "install, region at FILE:LINE".
        """
        if not my_autocast_is_in_force():
            return STOCK
        policy, opened = _C.current_policy_id(), tuple(_C.open_regions())
        place = threading.get_ident(), policy, opened, name, device_type, module
        known = self._known.get(place)
        if known is not None:
            return known
        text = self._of_regions(self._open_regions(), name, device_type)
        if text is None:
            # Autograd's threads and a checkpoint's recomputation have the policy without its regions. The source is
            # then that of this module's forward, or that of regions with the same policy.
            said = self._said.get((policy, name, device_type, module))
            return said or self._of_regions(self._chains.get(policy, ()), name, device_type) or _UNKNOWN
        self._said[policy, name, device_type, module] = self._known[place] = text
        return text

    def switched_off(
        self, name: str, inputs: tuple[TensorInfo, ...], autocast: tuple[tuple[str, torch.dtype], ...]
    ) -> str:
        """Finds the open region of this thread that has switched autocast off for an op with a policy.

        Args:
            name: The overload's full name.
            inputs: Its inputs.
            autocast: The device types for which autocast is on, with their dtypes.

        Returns:
            "autocast off by region at FILE:LINE" or the like; "" if none has, or no region is open.
        """
        on = dict(autocast)
        for info in inputs:
            device_type = info.device.partition(":")[0]
            if device_type not in on and device_type in DEVICE_TYPES and has_row(name, device_type):
                who = self._who_switched_off(device_type)
                if who:
                    return f"{AUTOCAST_OFF}{who}"
        return ""

    def _who_switched_off(self, device_type: str) -> str:
        thread, times = threading.get_ident(), Counter[int]()
        places = []
        for address, _ in _C.open_regions():
            times[address] += 1
            places.append((thread, address, times[address]))
        for place in reversed(places):
            enabled = self._devices.get(place, {}).get(device_type)
            if enabled is not None:
                return _NESTED if enabled else self._regions[place]
        return ""

    def _open_regions(self) -> tuple[tuple[int, str], ...]:
        """The open regions of this thread: the number of each one's policy change, and its name."""
        found, times = [], Counter[int]()
        for address, change in _C.open_regions():
            times[address] += 1
            found.append((change, self._regions.get((threading.get_ident(), address, times[address]), _UNKNOWN)))
        return tuple(found)

    @staticmethod
    def _of_regions(regions: tuple[tuple[int, str], ...], name: str, device_type: str) -> str | None:
        if not regions:
            return None
        wanted = (name, device_type)
        for change, text in reversed(regions):
            base, ops = _described(change)
            if wanted in ops:
                # The change that carries a policy into a recomputation or another thread is complete.
                return None if base == "stock" else text
            if base != "around":
                return REGISTERED if base == "registered" and wanted in registered_policies() else STOCK
        default = default_policy()
        if default is not None and any(change[:2] == wanted for change in default.changes):
            return DEFAULT_POLICY
        return REGISTERED if wanted in registered_policies() else STOCK


def _devices_of(owner: object) -> dict[str, bool]:
    """The device types of a region, and whether autocast is on in it."""
    if isinstance(owner, Region):
        return {device.device_type: device.enabled for device in RegionSpec.unpack(owner._packed).devices}
    return {owner.device: owner._enabled}  # type: ignore[attr-defined]  # of torch.autocast


@functools.lru_cache(maxsize=256)
def _described(change: int) -> tuple[str, frozenset[tuple[str, str]]]:
    base, ops = _C.describe_change(change)
    return base, frozenset((name, DEVICE_TYPES[device]) for name, device in ops)


def unused_overrides(report: Recording) -> list[UnusedOverride]:
    """Returns the overrides that were set in a traced block and that no call in it used.

    An override that repeats the op's existing policy counts as unused. See NOTE [ What one override is ].

    Args:
        report: The report of a block that has ended.
    """
    names = ("op", "device", "policy", "said_by")
    return [UnusedOverride(*(one[name] for name in names)) for one in report.asked if not one["used"]]
