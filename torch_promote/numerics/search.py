"""The search of `tune`: the candidates for an override, and a small set of them that passes.

The search consists of functions of an oracle, a `Memo`. Assumptions about it, such as that a superset of a passing set
passes, only save runs: the functions return only sets that ran.

NOTE [ Tables that reach inside ]
A module's table also applies inside its submodules. A submodule that runs an overridden op and was not chosen gets a
table that restores the op's policy without the override. The model itself also stands for calls outside of modules,
which no table covers, so its overrides become overrides of the whole policy.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from torch_promote.errors import PolicyError
from torch_promote.numerics.comparison import Site
from torch_promote.numerics.tuning import Candidate
from torch_promote.policy.module_tables import spell_table
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES, FLOAT8_POLICIES, CastPolicy, spell_policy
from torch_promote.policy.overrides import select
from torch_promote.policy.policy import Policy
from torch_promote.regions.module_policies import choose, matches, module_policies
from torch_promote.report.base import module_name

# --- the search

#: Up to this number of candidates, all smaller sets are run if the budget allows.
MOST_FOR_MINIMUM = 12

Passes = Callable[[frozenset[str]], bool]  # a Memo, too


class OutOfBudgetError(Exception):
    """The oracle has no runs left."""


class Memo:
    """Tests whether a set of names passes. Runs each set once."""

    def __init__(self, passes: Passes, weight: Callable[[frozenset[str]], float] = len) -> None:
        self._passes, self._weight = passes, weight
        self.known: dict[frozenset[str], bool] = {}  # in the order of the runs
        self.stage = ""  # of `minimise`: "prefix", "shrink", "certify" or "smaller set"

    def __call__(self, names: Iterable[str]) -> bool:
        """Whether a set passes."""
        subset = frozenset(names)
        if subset not in self.known:
            self.known[subset] = self._passes(subset)
        return self.known[subset]

    def best(self) -> frozenset[str] | None:
        """The lightest set that passed (the first of several), or None."""
        passing = (subset for subset, passed in self.known.items() if passed)
        return min(passing, key=lambda subset: (self._weight(subset), len(subset)), default=None)


def minimise(
    order: Sequence[str], passes: Memo, *, pinned: int = 0, spare: Callable[[], float] = lambda: math.inf
) -> None:
    """Searches for a smallest set that passes. `passes.best()` returns the result."""
    # All names together have passed; the likeliest `pinned` members come first. `spare` returns the number of runs
    # left, without which the oracle raises OutOfBudgetError.
    passes.stage = "prefix"
    end = _shortest_prefix(order, passes, pinned)
    passes.stage = "shrink"
    prefix = list(order[:end])
    background = prefix[:pinned]
    passes([*background, *_quick_xplain(background, prefix[pinned:], passes)])
    _certify(order, passes)
    if len(order) <= MOST_FOR_MINIMUM:
        _run_smaller_sets(order, passes, spare)


def _shortest_prefix(order: Sequence[str], passes: Passes, start: int) -> int:
    """Returns the length of the shortest prefix that passes, by doubling and bisection; all names together pass."""
    low, high = max(start - 1, 0), max(start, 1)
    while high < len(order) and not passes(frozenset(order[:high])):
        low, high = high, high * 2
    high = min(high, len(order))
    while high - low > 1:
        middle = (low + high) // 2
        if passes(frozenset(order[:middle])):
            high = middle
        else:
            low = middle
    return high


def _quick_xplain(background: list[str], items: list[str], passes: Passes, has_grown: bool = True) -> list[str]:
    """Returns a subset of `items` that passes with `background`. It is minimal if the oracle is monotone."""
    # Source: U. Junker, QUICKXPLAIN: Preferred Explanations and Relaxations for Over-Constrained Problems, AAAI 2004.
    # The background and all items together are assumed to pass. Earlier items are preferred.
    if not items or (has_grown and passes(frozenset(background))):
        return []
    if len(items) == 1:
        return items
    half = (len(items) + 1) // 2
    first, second = items[:half], items[half:]
    of_second = _quick_xplain(background + first, second, passes)
    of_first = _quick_xplain(background + of_second, first, passes, bool(of_second))
    return of_first + of_second


def _certify(order: Sequence[str], passes: Memo) -> None:
    """Tries to remove each member of the best set, and continues from a smaller set that passes."""
    passes.stage = "certify"
    has_shrunk = True
    while has_shrunk:
        best = passes.best() or frozenset(order)
        has_shrunk = any(passes(best - {name}) for name in reversed(order) if name in best)


def _run_smaller_sets(order: Sequence[str], passes: Memo, spare: Callable[[], float]) -> None:
    """Runs the sets that are smaller than the best one."""
    # First all names except one member: if these fail, a monotone oracle has no other solution. Then sets that are
    # not a subset of a failed set. The others, which should fail, only if the budget covers all of them.
    passes.stage = "smaller set"
    best = passes.best() or frozenset(order)
    everything = frozenset(order)
    for name in reversed(order):
        if name in best and not _is_known_to_fail(everything - {name}, passes):
            passes(everything - {name})
    for subset in _subsets(order):
        best = passes.best() or everything
        if len(subset) >= len(best):
            break
        if subset not in passes.known and not _is_known_to_fail(subset, passes):
            passes(subset)
    _certify(order, passes)
    passes.stage = "smaller set"
    best = passes.best() or everything
    left = [subset for subset in _subsets(order, len(best) - 1) if subset not in passes.known]
    if len(left) <= spare():
        for subset in left:
            if passes(subset):
                break  # all smaller sets have been run
        _certify(order, passes)


def _is_known_to_fail(subset: frozenset[str], passes: Memo) -> bool:
    return any(subset <= known for known, passed in passes.known.items() if not passed)


def _subsets(order: Sequence[str], largest: int | None = None) -> Iterator[frozenset[str]]:
    """Subsets by size, those with early names first."""
    for size in range(len(order) if largest is None else largest + 1):
        for names in itertools.combinations(order, size):
            yield frozenset(names)


def prove(found: frozenset[str], order: Sequence[str], known: Mapping[frozenset[str], bool]) -> str:
    """Returns the property of a passing set that the runs have proved: "minimum", "1-minimal" or "passes"."""
    if any(known.get(found - {name}) is not False for name in found):
        return "passes"
    number = sum(math.comb(len(order), size) for size in range(len(found)))
    members = frozenset(order)
    smaller = [passed for subset, passed in known.items() if len(subset) < len(found) and subset <= members]
    return "minimum" if len(smaller) == number and not any(smaller) else "1-minimal"


# --- the candidates

LEVELS = ("op", "module", "site")
#: Among the dtypes of sites that run in float8.
_IN_FLOAT8 = "float8_e4m3fn"
#: The op that may run in float8.
_LINEAR = "aten::linear"
#: The dtypes from which an override moves an op.
_DTYPES = {
    "fp32": {"float16", "bfloat16"},
    "lower_precision_fp": {"float32"},
    **{policy.value: {"float16", "bfloat16", _IN_FLOAT8} for policy in FLOAT8_POLICIES},
}
#: The maximum distance in a sorted list of two names that are compared for a common pattern.
_FARTHEST = 8

_Place = tuple[str, str]  # a module and an op in it
#: Modules or patterns, and their overrides. The overrides of "" are those of the whole policy.
_Tables = dict[str, dict[str, str]]


class Candidates:
    """The candidates for an override: ops, modules, or ops in modules."""

    # `value` is the override: "fp32", "lower_precision_fp", or a float8 policy, for which the sites are those of a
    # comparison with `all_in_float8`. The seed orders candidates with equal estimates.

    def __init__(
        self, base: Policy, model: nn.Module, level: str, value: str, sites: Iterable[Site], seed: int
    ) -> None:
        self._base, self._model, self._level, self._value = base, model, level, value
        self._base_tables = self._tables_on_modules(base)
        self.sites: list[Site] = []  # whose dtype the override would change
        self.flops_before: int = 0  # that the base policy runs in float8
        excluded: dict[tuple[str, str], int] = {}
        set_on_modules, reasons = module_policies(model), dict[str, str]()
        for site in sites:
            if not site.in_region or not set(site.dtypes.split(", ")) & _DTYPES[value]:
                continue
            if is_float8(value) and site.name != _LINEAR:
                continue
            why = self._obstacle(site, set_on_modules, reasons)
            if why:
                excluded[site.name, why] = excluded.get((site.name, why), 0) + 1
                if _IN_FLOAT8 in site.dtypes and why != reasons.get(site.module):  # not because of this override
                    self.flops_before += site.flops
            else:
                self.sites.append(site)
        # A sentence for each op that runs in such a dtype and cannot get the override.
        self.excluded: list[str] = [f"{name}: {why} (sites: {number})" for (name, why), number in excluded.items()]
        self._policies: dict[_Place, str] = {}  # without an override
        for site in self.sites:
            before = "lower_precision_fp" if is_float8(value) else site.policy or "fallthrough"
            self._policies.setdefault((site.module, site.op), before)
        # For "lower_precision_fp" in the order of the size of their results, smallest first; otherwise overflows come
        # first, and the others follow by impact, then by error.
        self.all: list[Candidate] = self._rank(seed)

    def _obstacle(self, site: Site, set_on_modules: Mapping[str, Any], reasons: dict[str, str]) -> str:
        """Why a site cannot get the override; "" if it can."""
        for name in _outwards(site.module):
            if name in self._base_tables and not isinstance(self._base_tables[name], Mapping):
                return f"the policy switches autocast off in {name!r}"
        try:
            select(exact_key(site.name), self._value)
        except PolicyError as error:
            return str(error).partition(". Legal")[0]
        for name in _outwards(site.module) if self._level == "op" else [site.module]:
            policy = set_on_modules.get(name)
            if isinstance(policy, Mapping):
                policy = any(site.name in select(key, value)[1] for key, value in policy.items()) or None
            if policy is not None:
                return f"set_module_policy has given {name!r} a policy for it, which takes precedence"
        if is_float8(self._value) and (why := self._why_not_float8(site)):
            return why
        if self._level == "op" or not site.module:
            return ""
        if site.module not in reasons:
            reasons[site.module] = ""
            try:
                choose(self._model, {site.module: {"mm": "fp32"}})
            except PolicyError as error:
                reasons[site.module] = str(error)
        return reasons[site.module]

    def _why_not_float8(self, site: Site) -> str:
        key, tables = exact_key(_LINEAR), map(self._base_table, _outwards(site.module))
        devices = {one.device.type for one in self._model.parameters()}.intersection(DEVICE_TYPES)
        of_ops = {str(spell_policy(policy)) for device in devices if (policy := self._base.lookup(key, device))}
        if self._value in next(([table[key]] for table in tables if key in table), of_ops):
            return "the policy runs it in float8 already"
        if site.policy != self._value:
            return f"its policy is {site.policy or 'unknown'}, of the policy to tune or of the region"
        return "" if _IN_FLOAT8 in site.dtypes else site.misfit or "it did not run in float8"

    def _rank(self, seed: int) -> list[Candidate]:
        groups: dict[str, list[Site]] = {}
        for site in self.sites:
            groups.setdefault(self._name(site), []).append(site)
        ties = random.Random(seed)

        def rank(candidate: Candidate) -> tuple[float, ...]:
            sites = groups[candidate.name]
            error = max(one.local if one.local or one.accumulated is None else one.accumulated for one in sites)
            if self._value == "lower_precision_fp":
                return (self.weight([candidate.name]), -error, ties.random())
            return (not candidate.nonfinite, -candidate.impact, -error, ties.random())

        return sorted((self._candidate(name, sites) for name, sites in groups.items()), key=rank)

    def _candidate(self, name: str, sites: Sequence[Site]) -> Candidate:
        return Candidate(
            name=name,
            op="" if self._level == "module" else sites[0].op,
            module="" if self._level == "op" else sites[0].module,
            impact=math.sqrt(sum((site.impact or 0.0) ** 2 for site in sites)),
            nonfinite=any(site.nonfinite for site in sites),
            calls=sum(site.calls for site in sites),
            flops=sum(site.flops for site in sites),
        )

    def _name(self, site: Site) -> str:
        module = module_name(site.module)
        return {"op": site.op, "module": module, "site": f"{module}: {site.op}"}[self._level]

    def weight(self, names: Iterable[str]) -> int:
        """Returns what candidates save: the size of their results in float32, or for a float8 policy their FLOPs."""
        chosen, counted = set(names), "flops" if is_float8(self._value) else "bytes"
        return sum(getattr(site, counted) for site in self.sites if self._name(site) in chosen)

    # --- policies

    def overrides(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the overrides for candidates: of ops at level "op", else tables of modules."""
        chosen = set(names)
        places = {(site.module, site.op) for site in self.sites if self._name(site) in chosen}
        if self._level == "op":
            return dict.fromkeys(sorted({op for _, op in places}), self._value)
        tables: _Tables = {}
        modules_of: dict[str, list[str]] = {}
        for module, op in self._policies:
            modules_of.setdefault(op, []).append(module)
        for op, modules in modules_of.items():
            for module in sorted(modules, key=lambda name: (bool(name), name.count("."))):
                is_chosen = (module, op) in places
                if is_chosen != self._inherits(module, op, tables):
                    tables.setdefault(module, {})[op] = self._value if is_chosen else self._policies[module, op]
        return dict(sorted(tables.items()))

    def policy(self, overrides: Mapping[str, Any]) -> Policy:
        """Returns the policy with overrides on top."""
        if not overrides:
            return self._base
        if self._level == "op" and is_float8(self._value):
            return all_in_float8(self._base, self._value)
        if self._level == "op":
            return self._with_ops(overrides)
        policy = self._base.override(overrides[""]) if overrides.get("") else self._base
        tables = {}
        for name, table in overrides.items():
            own = {key: value for key, value in self._base_table(name).items() if key.partition(".")[0] not in table}
            if name or self._base_table(name):
                tables[name] = {**own, **table}
        return policy.override_modules(tables)

    def _with_ops(self, overrides: Mapping[str, str]) -> Policy:
        """Overrides ops, also in the policy's tables, which would take precedence."""
        policy = self._base.override(overrides)
        overloads = {name for op in overrides for name in select(op, self._value)[1]}
        for module, table in policy.modules:
            named = [] if isinstance(table, str) else [overload for overload, _ in table if overload in overloads]
            if named:
                policy = policy.override_modules({module: {exact_key(overload): self._value for overload in named}})
        return policy

    def _inherits(self, module: str, op: str, tables: Mapping[str, Mapping[str, str]]) -> bool:
        for name in _outwards(module):
            if name in tables and op in tables[name]:
                return tables[name][op] == self._value
            if name and any(key.partition(".")[0] == op for key in self._base_table(name)):
                return False
        return False

    def _base_table(self, name: str) -> Mapping[str, str]:
        """The base policy's table for a module: an exact name takes precedence over a pattern."""
        table = self._base_tables.get(name, {})
        return table if isinstance(table, Mapping) else {}

    def _tables_on_modules(self, policy: Policy) -> dict[str, Any]:
        values = {name: table if isinstance(table, str) else spell_table(table) for name, table in policy.modules}
        if not values:
            return {}
        chosen = choose(self._model, values)
        return {name: chosen[module].value for name, module in self._model.named_modules() if module in chosen}

    # --- patterns

    def overridden_places(self, overrides: Mapping[str, Any]) -> set[tuple[str, str]]:
        """Returns the modules and ops that have the override. Patterns may be among the keys."""
        on_modules = self._tables_on_modules(self.policy(overrides))
        found = set()
        for module, op in self._policies:
            for name in _outwards(module):
                table = on_modules.get(name, {}) if name else overrides.get("", {})
                values = [value for key, value in table.items() if key.partition(".")[0] == op]
                if values:
                    own = [value for key, value in self._base_table(name).items() if key.partition(".")[0] == op]
                    if self._value in values and values != own:
                        found.add((module, op))
                    break
        return found

    def with_patterns(self, tables: Mapping[str, Mapping[str, str]]) -> _Tables:
        """Returns tables that override the same places, with patterns: `blocks.*.attn` for every block's attention."""
        wanted = self.overridden_places(tables)
        present: _Tables = {name: dict(table) for name, table in tables.items()}
        groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, table in tables.items():
            if name:
                groups.setdefault(tuple(sorted(table.items())), []).append(name)
        for names in groups.values():
            for pattern in _patterns(names):
                covered = [name for name in names if name in present and matches(name, pattern)]
                if len(covered) < 2:
                    continue
                others = {name: table for name, table in present.items() if name not in covered}
                tried = {**others, pattern: dict(tables[covered[0]])}
                try:
                    if self.overridden_places(tried) == wanted:
                        present = tried
                except PolicyError:  # it selects a module that cannot have a table, or two patterns differ about one
                    continue
        return dict(sorted(present.items()))


def is_float8(value: str) -> bool:
    """Whether an override is a float8 policy."""
    return value in (policy.value for policy in FLOAT8_POLICIES)


def all_in_float8(base: Policy, value: str) -> Policy:
    """Returns a policy with a float8 policy where it runs linear in lower precision."""
    override, lower = {exact_key(_LINEAR): value}, CastPolicy.lower_precision_fp
    devices = [device for device in DEVICE_TYPES if base.lookup(exact_key(_LINEAR), device) is lower]
    policy = base.override(override, devices) if devices else base
    lowering = [module for module, table in base.modules if not isinstance(table, str) and (_LINEAR, lower) in table]
    return policy.override_modules(dict.fromkeys(lowering, override)) if lowering else policy


def _outwards(module: str) -> Iterator[str]:
    """A module's name, those of the modules around it, and "" for the model."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _patterns(names: Sequence[str]) -> list[str]:
    """Patterns that select several of the names: most selected names first, then narrowest."""
    found: dict[str, int] = {}
    for distance in range(1, min(len(names), _FARTHEST + 1)):
        for one, other in zip(names, names[distance:], strict=False):
            for pattern in _patterns_of_two(one.split("."), other.split("."), names):
                found.setdefault(pattern, sum(matches(name, pattern) for name in names))
    return sorted(found, key=lambda pattern: (-found[pattern], pattern.count("*"), pattern))


def _patterns_of_two(one: list[str], other: list[str], names: Sequence[str]) -> Iterator[str]:
    differ = [a != b for a, b in zip(one, other, strict=False)]
    if len(one) == len(other) and not all(differ):
        star = ".".join("*" if differs else part for part, differs in zip(one, differ, strict=True))
        yield star
        parts = {name.split(".")[differ.index(True)] for name in names if matches(name, star)}
        if sum(differ) == 1 and all(len(part) == 1 and part.isdigit() for part in parts):
            yield star.replace("*", f"[{''.join(sorted(parts))}]")
