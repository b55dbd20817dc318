"""The paths of modules as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

__all__ = ["Node", "cut_tree", "make_tree", "prefixes"]

_MOST, _DEEPEST = 1_200, 50


class _Node(Protocol):
    children: list[Any]


Node = TypeVar("Node", bound=_Node)


def make_tree(paths: Iterable[str], make: Callable[[str, str], Node]) -> tuple[list[Node], dict[str, Node]]:
    """Makes the nodes of paths and of their parents.

    Args:
        paths: Paths of modules; "" has no node.
        make: Makes a node from a path and its last part. A node has a list `children`.

    Returns:
        The outermost nodes, sorted so that "blocks.2" comes before "blocks.10"; and all nodes, by path.
    """
    by_path: dict[str, Node] = {}
    roots: list[Node] = []
    for whole in sorted(paths, key=_natural):
        for path in prefixes(whole) if whole else ():
            if path not in by_path:
                outer, _, name = path.rpartition(".")
                node = by_path[path] = make(path, name)
                (by_path[outer].children if outer else roots).append(node)
    return roots, by_path


def prefixes(path: str) -> Iterator[str]:
    """Yields the parents of a path, and the path itself.

    Example:
        >>> list(prefixes("blocks.0.attn"))
        ['blocks', 'blocks.0', 'blocks.0.attn']
    """
    parts = path.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _natural(path: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in path.split(".")]


def cut_tree(roots: list[Node], total: int) -> int:
    """Removes the deepest nodes if there are too many or too deep ones for a page.

    Args:
        roots: The outermost nodes.
        total: The number of nodes.

    Returns:
        The number of removed nodes.
    """
    kept, level, depth = 0, roots, 0
    while level:
        kept, depth = kept + len(level), depth + 1
        below = [child for node in level for child in node.children]
        if kept + len(below) > _MOST or depth == _DEEPEST:
            for node in level:
                node.children = []
            break
        level = below
    return total - kept
