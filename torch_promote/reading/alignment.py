"""The alignment of the calls of two runs.

NOTE [ How calls are aligned ]
The calls of a module in one phase of one step are aligned with those of the same place in the other run. Calls of one
op whose results have equal bits belong together, whatever their order, and first of them those that read equal bits.
That leaves the calls from the first difference on. Of these, the end is aligned first, because a call that was inserted
stands at the start of what differs. The rest is a longest common subsequence (Myers, 1986), whose time grows with the
number of differences, not with the length. Of an op that one run calls more often, calls of equal shapes come first.
Calls of an optimizer that has its parameters in another order are aligned by the parameter that is written next.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Sequence
from typing import TypeAlias

#: The number of differences in a place above which calls are aligned by their running numbers.
_MOST_DIFFERENCES = 1500


#: For each of two sequences, the names of its elements.
_Names: TypeAlias = tuple[Sequence[Hashable], Sequence[Hashable]]


def align(names: Sequence[_Names], contents: Sequence[_Names] = ()) -> list[tuple[int, int]]:
    """Aligns two sequences: returns pairs of indices, in the order of the first.

    Args:
        names: What aligns those that stand in one order; the second, those between what the first has aligned.
        contents: What tells those that belong together in any order, the surest first; a false value equals none.
    """
    first, second = (*names, *contents)[0]
    left = [*range(len(first))], [*range(len(second))]
    if names and all(one == other for one, other in (*names, *contents)):
        return [(i, i) for i in left[0]]
    pairs: list[tuple[int, int]] = []
    for one, other in contents:
        waiting: dict[Hashable, list[int]] = {}
        for j in reversed(left[1]):
            if other[j]:
                waiting.setdefault(other[j], []).append(j)
        pairs += [(i, waiting[one[i]].pop()) for i in left[0] if waiting.get(one[i])]
        taken = {i for i, _ in pairs}, {j for _, j in pairs}
        left = [i for i in left[0] if i not in taken[0]], [j for j in left[1] if j not in taken[1]]
    ends = [(-1, -1), (len(left[0]), len(left[1]))]
    for one, other in names:
        named = [one[i] for i in left[0]], [other[j] for j in left[1]]
        ends += [
            (a[0] + 1 + i, a[1] + 1 + j)
            for a, b in itertools.pairwise(ends)
            for i, j in _common(named[0][a[0] + 1 : b[0]], named[1][a[1] + 1 : b[1]])
        ]
        ends.sort()
    return sorted([*pairs, *((left[0][i], left[1][j]) for i, j in ends[1:-1])])


def rising(numbers: Sequence[int]) -> set[int]:
    """Returns the longest subsequence of different numbers that increases."""
    ends: list[int] = []  # by length, the place of the least end of such a subsequence
    before: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect.bisect_left(ends, number, key=numbers.__getitem__)
        before.append(ends[length - 1] if length else -1)
        ends[length : length + 1] = [place]
    found = set()
    place = ends[-1] if ends else -1
    while place >= 0:
        found.add(numbers[place])
        place = before[place]
    return found


def _common(one: list[Hashable], other: list[Hashable]) -> list[tuple[int, int]]:
    end, start = 0, 0
    least = min(len(one), len(other))
    while end < least and one[-1 - end] == other[-1 - end]:
        end += 1
    while start < least - end and one[start] == other[start]:
        start += 1
    pairs = [(i, i) for i in range(start)]
    middle = _longest_common(one[start : len(one) - end], other[start : len(other) - end])
    pairs += [(start + i, start + j) for i, j in middle]
    return [*pairs, *((len(one) - k, len(other) - k) for k in range(end, 0, -1))]


def _longest_common(one: list[Hashable], other: list[Hashable]) -> list[tuple[int, int]]:
    """Returns the pairs of a longest common subsequence; of sequences with too little in common, k-th with k-th."""
    if not one or not other:
        return []
    reach = {1: 0}  # by diagonal: how far into `one` the best path with so many differences gets
    history = []
    for differences in range(len(one) + len(other) + 1):
        if differences > _MOST_DIFFERENCES:
            return _by_running_number(one, other)
        history.append(
            reach.copy()
            if differences < 2
            else {k: reach[k] for k in range(-differences, differences + 1) if k in reach}
        )
        for diagonal in range(-differences, differences + 1, 2):
            down = diagonal == -differences or (diagonal != differences and reach[diagonal - 1] < reach[diagonal + 1])
            i = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            j = i - diagonal
            while i < len(one) and j < len(other) and one[i] == other[j]:
                i, j = i + 1, j + 1
            reach[diagonal] = i
            if i >= len(one) and j >= len(other):
                return _walk_back(history, len(one), len(other))
    raise AssertionError


def _walk_back(history: list[dict[int, int]], i: int, j: int) -> list[tuple[int, int]]:
    pairs = []
    for differences in range(len(history) - 1, -1, -1):
        reach, diagonal = history[differences], i - j
        down = diagonal == -differences or (diagonal != differences and reach[diagonal - 1] < reach[diagonal + 1])
        before = diagonal + 1 if down else diagonal - 1
        start = reach[before]
        while i > start + (not down) and i > 0 and j > 0:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        if differences:
            i, j = start, start - before
    return pairs[::-1]


def _by_running_number(one: list[Hashable], other: list[Hashable]) -> list[tuple[int, int]]:
    waiting: dict[Hashable, list[int]] = {}
    for j in reversed(range(len(other))):
        waiting.setdefault(other[j], []).append(j)
    return [(i, waiting[name].pop()) for i, name in enumerate(one) if waiting.get(name)]
