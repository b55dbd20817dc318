"""The modules of a trace as a tree, with the dtypes of their calls, and the float32 islands among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch_promote.numerics.pages.paths import cut_tree, make_tree, prefixes
from torch_promote.numerics.records.calls import AUTOCAST_OFF
from torch_promote.numerics.records.groups import CallGroup
from torch_promote.numerics.report.findings import OTHER, is_lower, result_dtypes

__all__ = ["ModuleNode", "ModuleTree", "module_tree"]


@dataclass
class ModuleNode:
    """A module and its submodules.

    Attributes:
        path: The module's path.
        name: The last part of it.
        group: The sums over its calls and those of its submodules.
        children: Its submodules.
        island: If all its floating results are float32 or wider while other modules' are narrower: the policies that
            applied, or "no policy". Otherwise "". Modules inside an island are not marked.
    """

    path: str
    name: str
    group: CallGroup = field(default_factory=lambda: CallGroup(""))
    children: list[ModuleNode] = field(default_factory=list)
    island: str = ""

    @property
    def dtypes(self) -> dict[str, int]:
        """The number of calls by the dtype of their results."""
        return result_dtypes(self.group.dtypes)


@dataclass
class ModuleTree:
    """The tree.

    Attributes:
        nodes: The outermost modules.
        outside: The calls outside of modules, and in the model itself; None if there are none.
        left_out: The number of modules left out (the deepest ones).
        islands: The number of float32 islands.
    """

    nodes: list[ModuleNode]
    outside: CallGroup | None
    left_out: int
    islands: int


def module_tree(groups: Iterable[CallGroup]) -> ModuleTree:
    """Makes the tree of the modules of a trace.

    Args:
        groups: The calls by module, `TraceReport.by_module()`.

    Example:
        >>> from collections import Counter
        >>> bf16 = CallGroup("0.linear", 2, Counter({"bfloat16 -> bfloat16": 2}))
        >>> fp32 = CallGroup("0.norm", 1, Counter({"bfloat16 -> float32 -> float32": 1}), Counter({"fp32: me": 1}))
        >>> tree = module_tree([bf16, fp32])
        >>> [(node.path, node.group.calls, node.dtypes) for node in tree.nodes]
        [('0', 3, {'float32': 1, 'bfloat16': 2})]
        >>> [(node.name, node.island) for node in tree.nodes[0].children]
        [('linear', ''), ('norm', 'fp32, set by me')]
    """
    groups = list(groups)
    roots, by_path = make_tree([group.key for group in groups], ModuleNode)
    for group in groups:
        for path in prefixes(group.key) if group.key else ():
            by_path[path].group.merge(group)
    if any(is_lower(name) for group in groups for name in result_dtypes(group.dtypes)):
        for node in roots:
            _mark_islands(node)
    outside = next((group for group in groups if not group.key), None)
    islands = sum(bool(node.island) for node in by_path.values())
    return ModuleTree(roots, outside, cut_tree(roots, len(by_path)), islands)


def _mark_islands(node: ModuleNode) -> None:
    floating = [name for name in node.dtypes if name != OTHER]
    if floating and not any(is_lower(name) for name in floating):
        policies = [text.partition(": ") for text in node.group.policies]
        told = "; ".join(dict.fromkeys(f"{policy}, set by {source}" for policy, _, source in policies))
        off = (text for text in node.group.rules if text.startswith(AUTOCAST_OFF))
        node.island = told or "; ".join(off) or "no policy"
        return
    for child in node.children:
        _mark_islands(child)
