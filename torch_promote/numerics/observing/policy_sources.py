"""Finds the source of an op's policy: PyTorch's table, `register_policy`, the default policy, a region, a module."""

from __future__ import annotations

import functools
import threading
from collections import Counter

from torch_promote import _C
from torch_promote.checking.autocast_in_force import my_autocast_is_in_force
from torch_promote.native.region_spec import RegionSpec
from torch_promote.numerics.observing.asked_overrides import AskedOverrides
from torch_promote.numerics.observing.call_facts import has_row
from torch_promote.numerics.observing.places import innermost_line
from torch_promote.numerics.observing.running_modules import RunningModules
from torch_promote.numerics.records.calls import AUTOCAST_OFF
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.base import Region
from torch_promote.regions.defaults import default_policy, registered_policies
from torch_promote.regions.promotion import promotion

__all__ = ["DEFAULT_POLICY", "REGISTERED", "STOCK", "PolicySources"]

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
        policy, regions = _C.current_policy_id(), self._open_regions()
        text = self._of_regions(regions, name, device_type)
        if text is None:
            # Autograd's threads and a checkpoint's recomputation have the policy without its regions. The source is
            # then that of this module's forward, or that of regions with the same policy.
            said = self._said.get((policy, name, device_type, module))
            return said or self._of_regions(self._chains.get(policy, ()), name, device_type) or _UNKNOWN
        self._said[policy, name, device_type, module] = text
        return text

    def switched_off(self, name: str, devices: set[str], on: set[str]) -> str:
        """Finds the open region of this thread that has switched autocast off for an op with a policy.

        Args:
            name: The overload's full name.
            devices: The devices of its inputs, such as "cuda:0".
            on: The device types for which autocast is on.

        Returns:
            "autocast off by region at FILE:LINE" or the like; "" if none has, or no region is open.
        """
        if not _C.depth():
            return ""
        for device_type in {device.partition(":")[0] for device in devices} - on:
            who = (
                self._who_switched_off(device_type)
                if device_type in DEVICE_TYPES and has_row(name, device_type)
                else ""
            )
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
