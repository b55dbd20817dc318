"""The candidates for an override: ops, modules, or ops in modules."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from torch_promote.errors import PolicyError
from torch_promote.numerics.comparing.site import Site
from torch_promote.numerics.tuning.tuning import Candidate
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.overrides import select

__all__ = ["LEVELS", "Place", "bytes_of", "overridable", "rank_candidates", "sites_of"]

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
