"""Writes module tables as patterns: `blocks.*.attn` for the attention of every block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch_promote.errors import PolicyError
from torch_promote.numerics.tuning.overriding import Overriding, Tables
from torch_promote.regions.module_policies import matches

__all__ = ["compress"]

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
