"""The errors and impact of modules, summed over their sites, as a tree with a colour scale for each measure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch_promote.numerics.comparing.site import Site
from torch_promote.observe.findings import cut_tree, make_tree, prefixes

__all__ = ["MEASURES", "HeatNode", "HeatTree", "Heats", "heat_tree", "heats_of", "module_heats"]

#: The measures by which a module can be coloured.
MEASURES = ("local", "accumulated", "impact")


@dataclass
class Heats:
    """The sums over sites.

    Attributes:
        local: The largest local error.
        accumulated: The largest accumulated error; None without one.
        impact: The root of the sum of squares of the impacts; None if none is known.
        sites: Their number.
        nonfinite: The number of elements that become infinite or NaN in a local run.
    """

    local: float = 0.0
    accumulated: float | None = None
    impact: float | None = None
    sites: int = 0
    nonfinite: int = 0

    def add(self, site: Site) -> None:
        """Adds a site."""
        self.local = max(self.local, site.local)
        if site.accumulated is not None:
            self.accumulated = max(self.accumulated or 0.0, site.accumulated)
        if site.impact is not None:
            self.impact = math.hypot(self.impact or 0.0, site.impact)
        self.sites += 1
        self.nonfinite += site.nonfinite


def heats_of(sites: Iterable[Site]) -> Heats:
    """Returns the sums over sites.

    Example:
        >>> heats_of([Site("mm", "", "", 1, local=0.5, impact=3.0), Site("exp", "", "", 1, impact=4.0)])
        Heats(local=0.5, accumulated=None, impact=5.0, sites=2, nonfinite=0)
    """
    heats = Heats()
    for site in sites:
        heats.add(site)
    return heats


def module_heats(sites: Iterable[Site]) -> dict[str, Heats]:
    """Returns the sums over the sites of each module, without its submodules, largest first.

    Args:
        sites: The sites.
    """
    found: dict[str, Heats] = {}
    for site in sites:
        found.setdefault(site.module, Heats()).add(site)
    return dict(sorted(found.items(), key=lambda item: (-(item[1].impact or 0.0), -item[1].local)))


@dataclass
class HeatNode:
    """A module.

    Attributes:
        path: The module's path.
        name: The last part of it.
        heats: The sums over its sites and those of its submodules.
        children: The modules in it.
        shares: For each measure, the module's position from 0 to 1 on a logarithmic scale from the smallest to the
            largest value of the tree.
    """

    path: str
    name: str
    heats: Heats = field(default_factory=Heats)
    children: list[HeatNode] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)


@dataclass
class HeatTree:
    """The tree.

    Attributes:
        nodes: The outermost modules.
        outside: The sites in the model itself and outside of it, as a module without children; None if there are none.
        left_out: The number of modules left out (the deepest ones).
        known: The measures that any site has.
    """

    nodes: list[HeatNode]
    outside: HeatNode | None
    left_out: int
    known: list[str]


def heat_tree(sites: Sequence[Site], modules: Iterable[str] = ()) -> HeatTree:
    """Makes the tree of the modules that have sites, and of their parents.

    Args:
        sites: The sites.
        modules: The paths of all modules, in the model's order, which the tree keeps.

    Example:
        >>> sites = [Site("mm", "", f"blocks.{n}.attn", 1, local=10.0**-n, impact=0.1) for n in range(3)]
        >>> (blocks,) = heat_tree(sites).nodes
        >>> blocks.heats.local, [(node.path, node.shares["local"]) for node in blocks.children]
        (1.0, [('blocks.0', 1.0), ('blocks.1', 0.525), ('blocks.2', 0.05)])
    """
    place = {path: number for number, path in enumerate(modules)}
    roots, by_path = make_tree([site.module for site in sites], HeatNode)
    for nodes in [roots, *(node.children for node in by_path.values())]:
        nodes.sort(key=lambda node: place.get(node.path, len(place)))
    outside = HeatNode("", "")
    for site in sites:
        for node in [by_path[path] for path in prefixes(site.module)] if site.module else [outside]:
            node.heats.add(site)
    everything = [*by_path.values(), *([outside] if outside.heats.sites else [])]
    for measure in MEASURES:
        _share(everything, measure)
    known = [measure for measure in MEASURES if any(getattr(site, measure) is not None for site in sites)]
    return HeatTree(roots, outside if outside.heats.sites else None, cut_tree(roots, len(by_path)), known)


_COOLEST = 0.05
_DECADES = 6.0


def _share(nodes: Iterable[HeatNode], measure: str) -> None:
    """Sets `shares`: 0 for no error, 1 for the largest and for infinite ones, in between by the logarithm."""
    values = {id(node): value for node in nodes if (value := getattr(node.heats, measure))}
    finite = [math.log10(value) for value in values.values() if math.isfinite(value)]
    top = max(finite, default=0.0)
    low = max(min(finite, default=0.0), top - _DECADES)
    for node in nodes:
        value = values.get(id(node))
        if not value:
            share = 0.0
        elif not math.isfinite(value) or top == low:
            share = 1.0
        else:
            share = _COOLEST + (1 - _COOLEST) * max(0.0, (math.log10(value) - low) / (top - low))
        node.shares[measure] = round(share, 3)
