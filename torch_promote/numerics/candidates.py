"""The candidates for an override: ops, modules, or ops in modules."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from torch_promote.errors import PolicyError
from torch_promote.numerics.comparing.site import Site
from torch_promote.numerics.tuning.tuning import Candidate
from torch_promote.policy.module_tables import spell_table
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.overrides import select
from torch_promote.policy.policy import Policy
from torch_promote.regions.module_policies import choose, matches, module_policies

__all__ = [
    "LEVELS",
    "Overriding",
    "Place",
    "Tables",
    "bytes_of",
    "compress",
    "overridable",
    "rank_candidates",
    "sites_of",
]


LEVELS = ("op", "module", "site")
#: A module and an op in it.
Place = tuple[str, str]
_LOW = ("float16", "bfloat16")
_DTYPES_OF = {"fp32": _LOW, "lower_precision_fp": ("float32",)}


def overridable(sites: Iterable[Site], value: str, closed: Iterable[str] = ()) -> tuple[list[Site], list[str]]:
    """Returns the sites whose dtype an override would change.

    Args:
        sites: The sites of a comparison.
        value: The override: "fp32" or "lower_precision_fp".
        closed: Modules in which autocast is off, including their submodules.

    Returns:
        The sites, and a sentence for each site that runs in such a dtype and cannot be changed.
    """
    found: list[Site] = []
    others: dict[tuple[str, str], int] = {}
    for site in sites:
        if not site.in_region or not set(site.dtypes.replace(" ", "").split(",")) & set(_DTYPES_OF[value]):
            continue
        why = _why_not(site, value, closed)
        if why:
            others[site.name, why] = others.get((site.name, why), 0) + site.calls
        else:
            found.append(site)
    return found, [
        f"{name} ({number} {'call' if number == 1 else 'calls'}): {why}" for (name, why), number in others.items()
    ]


def rank_candidates(sites: Iterable[Site], level: str, seed: int, by_bytes: bool = False) -> list[Candidate]:
    """Groups sites into candidates, and returns them likeliest first.

    Args:
        sites: The sites, as `overridable` returns them.
        level: One of `LEVELS`.
        seed: Orders candidates with equal estimates.
        by_bytes: Whether to sort by the size of the results, smallest first. Otherwise: overflows first, then by
            impact, then by error.
    """
    groups: dict[str, list[Site]] = {}
    for site in sites:
        groups.setdefault(_name(site, level), []).append(site)
    found = [_candidate(name, own, level) for name, own in groups.items()]
    ties = random.Random(seed)

    def rank(one: Candidate) -> tuple[float, ...]:
        own = groups[one.name]
        first = (bytes_of(own),) if by_bytes else (not one.nonfinite, -one.impact)
        return (*first, -max(_error(site) for site in own), ties.random())

    return sorted(found, key=rank)


def bytes_of(sites: Iterable[Site]) -> int:
    """Returns the size of the results of sites in float32."""
    return sum(site.bytes for site in sites)


def _why_not(site: Site, value: str, closed: Iterable[str]) -> str:
    inside = [name for name in closed if site.module == name or not name or site.module.startswith(f"{name}.")]
    if inside:
        return f"the policy has {inside[0]!r} run with autocast off"
    try:
        select(exact_key(site.name), value)
    except PolicyError as error:
        return str(error).partition(". Legal")[0]
    return ""


def _name(site: Site, level: str) -> str:
    module = site.module or "(model)"
    return {"op": site.op, "module": module, "site": f"{module}: {site.op}"}[level]


def _candidate(name: str, sites: Sequence[Site], level: str) -> Candidate:
    return Candidate(
        name=name,
        op="" if level == "module" else sites[0].op,
        module="" if level == "op" else sites[0].module,
        impact=math.sqrt(sum((site.impact or 0.0) ** 2 for site in sites)),
        nonfinite=any(site.nonfinite for site in sites),
        calls=sum(site.calls for site in sites),
    )


def _error(site: Site) -> float:
    return site.local if site.local or site.accumulated is None else site.accumulated


def sites_of(candidates: Iterable[Candidate], sites: Iterable[Site], level: str) -> list[Site]:
    """Returns the sites of the candidates."""
    names = {one.name for one in candidates}
    return [site for site in sites if _name(site, level) in names]


# ---Policies that override exactly the ops, modules or sites that the search chose.
#
# NOTE [ Tables that reach inside ]
# A module's table also applies inside its submodules. A submodule that runs an overridden op and was not chosen gets a
# table that restores the op's policy without the override. The model itself also stands for calls outside of modules,
# which no table covers, so its overrides become overrides of the whole policy.


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


# ---Writes module tables as patterns: `blocks.*.attn` for the attention of every block.


#: The maximum distance in a sorted list of two names that are compared for a common pattern.
_FARTHEST = 8


def compress(tables: Mapping[str, Mapping[str, str]], overriding: Overriding) -> Tables:
    """Returns tables with the same effect on every site, merged with patterns that select several modules.

    Args:
        tables: The tables of modules.
        overriding: Computes the effect of tables.
    """
    wanted = overriding.effect(tables)
    present: Tables = {name: dict(table) for name, table in tables.items()}
    for group in _groups(tables):
        left = list(group)
        for pattern in _patterns(group):
            covered = [name for name in left if matches(name, pattern)]
            if len(covered) < 2:
                continue
            others = {name: table for name, table in present.items() if name not in covered}
            tried = {**others, pattern: dict(tables[covered[0]])}
            try:
                same = overriding.effect(tried) == wanted
            except PolicyError:  # it selects a module that cannot have a table, or two patterns differ about one
                continue
            if same:
                present, left = tried, [name for name in left if name not in covered]
    return dict(sorted(present.items()))


def _groups(tables: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """The groups of two or more modules with the same table."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, table in tables.items():
        if name:
            groups.setdefault(tuple(sorted(table.items())), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _patterns(names: Sequence[str]) -> Iterator[str]:
    """Patterns that select several of the names: most selected names first, then narrowest."""
    found: dict[str, int] = {}
    for distance in range(1, min(len(names), _FARTHEST + 1)):
        for one, other in zip(names, names[distance:], strict=False):
            for pattern in _patterns_of_two(one.split("."), other.split("."), names):
                found.setdefault(pattern, sum(matches(name, pattern) for name in names))
    yield from sorted(found, key=lambda pattern: (-found[pattern], "**" in pattern, pattern.count("*"), pattern))


def _patterns_of_two(one: list[str], other: list[str], names: Sequence[str]) -> Iterator[str]:
    if len(one) == len(other):
        differ = [a != b for a, b in zip(one, other, strict=True)]
        if not all(differ):
            star = ".".join("*" if differs else part for part, differs in zip(one, differ, strict=True))
            yield star
            parts = {name.split(".")[differ.index(True)] for name in names if matches(name, star)}
            if sum(differ) == 1 and all(len(part) == 1 and part.isdigit() for part in parts):
                digits = f"[{''.join(sorted(parts))}]"
                yield ".".join(digits if differs else part for part, differs in zip(one, differ, strict=True))
    shared = 0
    while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
        shared += 1
    if shared:
        yield ".".join(["**", *one[-shared:]])
