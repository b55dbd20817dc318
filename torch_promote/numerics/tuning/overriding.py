"""Policies that override exactly the ops, modules or sites that the search chose.

NOTE [ Tables that reach inside ]
A module's table also applies inside its submodules. A submodule that runs an overridden op and was not chosen gets a
table that restores the op's policy without the override. The model itself also stands for calls outside of modules,
which no table covers, so its overrides become overrides of the whole policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from torch_promote.errors import PolicyError
from torch_promote.numerics.comparing.site import Site
from torch_promote.numerics.tuning.candidates import Place
from torch_promote.policy.module_tables import spell_table
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.overrides import select
from torch_promote.policy.policy import Policy
from torch_promote.regions.module_policies import choose, module_policies

__all__ = ["Overriding", "Tables"]

#: Modules or patterns, and their overrides. The overrides of "" are those of the whole policy.
Tables = dict[str, dict[str, str]]


class Overriding:
    """Makes policies with overrides for chosen sites on top of a policy.

    Args:
        base: The policy.
        model: The model for its tables.
        level: "op", "module" or "site".
        value: The override: "fp32" or "lower_precision_fp".

    Attributes:
        closed: The modules in which the policy switches autocast off.
        sites: All sites that can be chosen; `choose_from` sets them.
    """

    def __init__(self, base: Policy, model: nn.Module, level: str, value: str) -> None:
        self.base, self.model, self.level, self.value = base, model, level, value
        self._own = self._tables_on_modules(base)
        self.closed = [name for name, table in self._own.items() if not isinstance(table, Mapping)]
        self.sites: list[Site] = []
        self._before: dict[Place, str] = {}

    def choose_from(self, sites: Iterable[Site]) -> list[str]:
        """Sets the sites that can be chosen, without those whose module cannot have a table.

        Sites with a policy from `set_module_policy` are excluded as well, because it takes precedence.

        Returns:
            A sentence for each excluded site.
        """
        self.sites, without = [], []
        set_on_modules = module_policies(self.model)
        for site in sites:
            fixed = self._where_fixed(site, set_on_modules)
            if fixed is None:
                self.sites.append(site)
            else:
                without.append(
                    f"{site.name} in {site.module or 'the model'}: set_module_policy has given "
                    f"{repr(fixed) if fixed else 'the model'} a policy for it, which wins"
                )
        if self.level != "op":
            reasons = {module: self._why_no_table(module) for module in {site.module for site in self.sites} - {""}}
            without += [
                f"{site.name} in {site.module}: {why}" for site in self.sites if (why := reasons.get(site.module))
            ]
            self.sites = [site for site in self.sites if not reasons.get(site.module)]
        for site in self.sites:
            self._before.setdefault((site.module, site.op), site.policy or "fallthrough")
        return without

    def _where_fixed(self, site: Site, policies: Mapping[str, Any]) -> str | None:
        """The module whose own policy takes precedence over the override of a site, or None."""
        for name in _and_parents(site.module) if self.level == "op" else [site.module]:
            policy = policies.get(name)
            if isinstance(policy, Mapping):
                if any(site.name in select(key, value)[1] for key, value in policy.items()):
                    return name
            elif policy is not None:
                return name
        return None

    def _why_no_table(self, module: str) -> str:
        try:
            choose(self.model, {module: {"mm": "fp32"}})
        except PolicyError as error:
            return str(error)
        return ""

    # --- policies

    def overrides(self, chosen: set[Place]) -> dict[str, Any]:
        """Returns the overrides for chosen places: of ops at level "op", else tables of modules."""
        if self.level == "op":
            return dict.fromkeys(sorted({op for _, op in chosen}), self.value)
        return self._tables(chosen)

    def policy(self, overrides: Mapping[str, Any]) -> Policy:
        """Returns the policy with overrides on top."""
        if self.level == "op":
            return self._with_ops(overrides)
        policy = self.base.override(overrides[""]) if overrides.get("") else self.base
        tables = {}
        for name, table in overrides.items():
            own = {key: value for key, value in self._own_entries(name).items() if key.partition(".")[0] not in table}
            if name or self._own_entries(name):
                tables[name] = {**own, **table}
        return policy.override_modules(tables)

    def _with_ops(self, overrides: Mapping[str, str]) -> Policy:
        """Overrides ops, also in the policy's tables, which would take precedence."""
        policy = self.base.override(overrides)
        overloads = {name for op in overrides for name in select(op, self.value)[1]}
        for module, table in policy.modules:
            named = [] if isinstance(table, str) else [overload for overload, _ in table if overload in overloads]
            if named:
                policy = policy.override_modules({module: {exact_key(overload): self.value for overload in named}})
        return policy

    def _own_entries(self, name: str) -> Mapping[str, str]:
        """The base policy's table for a module: an exact name takes precedence over a pattern."""
        own = self._own.get(name, {})
        return own if isinstance(own, Mapping) else {}

    def _tables(self, chosen: set[Place]) -> Tables:
        tables: Tables = {}
        by_op: dict[str, list[str]] = {}
        for module, op in self._before:
            by_op.setdefault(op, []).append(module)
        for op, modules in by_op.items():
            for module in sorted(modules, key=lambda name: (bool(name), name.count("."))):
                wanted = self.value if (module, op) in chosen else None
                present = self._inherited(module, op, tables)
                if wanted != present:
                    tables.setdefault(module, {})[op] = wanted or self._before[(module, op)]
        return dict(sorted(tables.items()))

    def _inherited(self, module: str, op: str, tables: Mapping[str, Mapping[str, str]]) -> str | None:
        """The override of an op in a module, or None if its policy is unchanged."""
        for name in _and_parents(module):
            if name in tables and op in tables[name]:
                return self.value if tables[name][op] == self.value else None
            if any(key.partition(".")[0] == op for key in self._own_entries(name)) and name:
                return None
        return None

    # --- the effect of tables

    def effect(self, overrides: Mapping[str, Any]) -> dict[Place, str | None]:
        """Returns the override that each site has, None for none. Patterns may be among the keys.

        Raises:
            PolicyError: A pattern matches no module, or two patterns differ about one.
        """
        on_modules = self._tables_on_modules(self.policy(overrides))
        found: dict[Place, str | None] = {}
        for module, op in self._before:
            found[module, op] = None
            for name in _and_parents(module):
                table = overrides.get("", {}) if not name else on_modules.get(name, {})
                values = [value for key, value in table.items() if key.partition(".")[0] == op]
                own = [value for key, value in self._own_entries(name).items() if key.partition(".")[0] == op]
                if values:
                    is_override = self.value in values and (not own or values != own)
                    found[module, op] = self.value if is_override else None
                    break
        return found

    def _tables_on_modules(self, policy: Policy) -> dict[str, Any]:
        values = {name: table if isinstance(table, str) else spell_table(table) for name, table in policy.modules}
        if not values:
            return {}
        chosen = choose(self.model, values)
        return {name: chosen[module].value for name, module in self.model.named_modules() if module in chosen}


def _and_parents(module: str) -> Iterator[str]:
    """A module's name, those of the modules around it, and "" for the model.

    Example:
        >>> list(_and_parents("a.b"))
        ['a.b', 'a', '']
    """
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""
