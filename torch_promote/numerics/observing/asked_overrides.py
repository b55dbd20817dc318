"""The overrides set by regions, modules, `install` and the default policy during a trace, and whether calls used them.

NOTE [ What one override is ]
An override counts as the user wrote it: {"linalg_*": "fp32"} is one override, and it is used as soon as one of its
overloads is. A named policy ("cuda") also counts as one, because no program uses all its rows. The entries of another
policy, such as a file's, count op by op.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_promote.native.region_spec import RegionSpec
from torch_promote.numerics.records.groups import Totals
from torch_promote.policy.op_names import spell_key
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, spell_policy
from torch_promote.policy.overrides import select
from torch_promote.policy.policy import Policy
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.defaults import default_policy
from torch_promote.regions.installation import installed
from torch_promote.regions.module_forward import policy_of

__all__ = ["INSTALLED", "AskedOverrides"]

#: The source of an override of `install`. Regions of torch.autocast append their line to it.
INSTALLED = "install"
#: Stands for the ops of a named policy.
_ALL = "*"


@dataclass(frozen=True, slots=True)
class _Asked:
    """An override that was set."""

    op: str
    device: str
    policy: str
    said_by: str
    overloads: frozenset[str]

    def is_used(
        self, names: Collection[str], used: Iterable[tuple[str, str, str]], without_policy: Iterable[str]
    ) -> bool:
        """Whether one of the (overload, policy, source) comes from this override, whose source has these names.

        A call under "fallthrough" is recorded without a policy, so any call without a policy may be one.
        """
        if self.policy == CastPolicy.fallthrough.value and not self.overloads.isdisjoint(without_policy):
            return True
        return any(
            op in self.overloads
            and policy in (self.policy, policy if self.op == _ALL else "")
            and (said_by in names or said_by.partition(",")[0] == INSTALLED in names)
            for op, policy, said_by in used
        )


class AskedOverrides:
    """Collects overrides while a trace runs. Each is listed once, however often its region is entered."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str, str], _Asked] = {}
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
        fields = ("op", "device", "policy", "said_by")
        return [
            {
                **{name: getattr(one, name) for name in fields},
                "used": one.is_used({one.said_by, *self._more_names.get(one.said_by, ())}, used, others),
            }
            for one in list(self._asked.values())
        ]

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
            self._put(_Asked(spell_key(key), devices, spell_policy(chosen), said_by, frozenset(overloads)))

    def _add_policy(self, policy: Policy, said_by: str) -> None:
        name = next((name for name in Policy.names() if Policy.named(name) == policy), None)
        if name is not None:
            ops = frozenset(overload for overload, _, _ in policy.changes)
            if ops and name != "off":
                self._put(_Asked(_ALL, ", ".join(DEVICE_TYPES), f'policy "{name}"', said_by, ops))
            return
        for asked in _by_op(policy, said_by):
            self._put(asked)

    def _put(self, asked: _Asked) -> None:
        self._asked.setdefault((asked.op, asked.policy, asked.said_by), asked)


def _by_op(policy: Policy, said_by: str) -> Iterator[_Asked]:
    """The entries of a policy, grouped by op over its overloads and devices."""
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for overload, device, value in policy.changes:
        devices, overloads = found.setdefault((overload.partition(".")[0], spell_policy(value)), (set(), set()))
        devices.add(device)
        overloads.add(overload)
    for (op, spelled), (devices, overloads) in found.items():
        yield _Asked(op.removeprefix("aten::"), ", ".join(sorted(devices)), spelled, said_by, frozenset(overloads))
