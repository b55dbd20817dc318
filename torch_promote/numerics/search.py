"""The search for a small set that passes, as functions of an oracle.

The oracle is a `Memo`. Assumptions about it, such as that a superset of a passing set passes, only save runs: the
functions return only sets that ran.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["MOST_FOR_MINIMUM", "Memo", "OutOfBudgetError", "minimise", "prove", "quick_xplain", "shortest_prefix"]


#: Up to this number of candidates, all smaller sets are run if the budget allows.
MOST_FOR_MINIMUM = 12

Passes = Callable[[frozenset[str]], bool]  # a Memo, too


class OutOfBudgetError(Exception):
    """The oracle has no runs left."""


class Memo:
    """Tests whether a set of names passes. Runs each set once.

    Attributes:
        known: The results, in the order of the runs.
        stage: The stage of `minimise`: "prefix", "shrink", "certify" or "smaller set".
    """

    def __init__(self, passes: Passes, weight: Callable[[frozenset[str]], float] = len) -> None:
        self._passes, self._weight = passes, weight
        self.known: dict[frozenset[str], bool] = {}
        self.stage = ""

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
    """Searches for a smallest set that passes. `passes.best()` returns the result.

    Args:
        order: The names, likeliest member first. All of them together have passed.
        passes: The oracle.
        pinned: The number of names at the start that are most likely members.
        spare: Returns the number of runs left.

    Raises:
        OutOfBudgetError: The oracle has no runs left.

    Example:
        >>> passes = Memo(lambda names: {"b", "d"} <= names)
        >>> minimise("abcde", passes)
        >>> sorted(passes.best())
        ['b', 'd']
    """
    passes.stage = "prefix"
    end = shortest_prefix(order, passes, pinned)
    passes.stage = "shrink"
    prefix = list(order[:end])
    background = prefix[:pinned]
    passes([*background, *quick_xplain(background, prefix[pinned:], passes)])
    _certify(order, passes)
    if len(order) <= MOST_FOR_MINIMUM:
        _run_smaller_sets(order, passes, spare)


def shortest_prefix(order: Sequence[str], passes: Passes, start: int = 0) -> int:
    """Returns the length of the shortest prefix that passes, if prefixes are monotone.

    Lengths double from `start` until one passes, then a bisection follows. All names together are assumed to pass.
    """
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


def quick_xplain(background: Sequence[str], items: Sequence[str], passes: Passes) -> list[str]:
    """Returns a subset of `items` that passes with `background`. It is minimal if the oracle is monotone.

    Source: U. Junker, QUICKXPLAIN: Preferred Explanations and Relaxations for Over-Constrained Problems, AAAI 2004. The
    background and all items together are assumed to pass. Earlier items are preferred.
    """
    if not items or passes(frozenset(background)):
        return []
    return _explain(list(background), False, list(items), passes)


def _explain(background: list[str], has_grown: bool, items: list[str], passes: Passes) -> list[str]:
    if has_grown and passes(frozenset(background)):
        return []
    if len(items) == 1:
        return items
    half = (len(items) + 1) // 2
    first, second = items[:half], items[half:]
    of_second = _explain(background + first, True, second, passes)
    of_first = _explain(background + of_second, bool(of_second), first, passes)
    return of_first + of_second


def _certify(order: Sequence[str], passes: Memo) -> None:
    """Tries to remove each member of the best set, and continues from a smaller set that passes."""
    passes.stage = "certify"
    done = False
    while not done:
        best = passes.best() or frozenset(order)
        done = True
        for name in reversed(order):
            if name in best and passes(best - {name}):
                done = False
                break


def _run_smaller_sets(order: Sequence[str], passes: Memo, spare: Callable[[], float]) -> None:
    """Runs the sets that are smaller than the best one.

    First, for each member, the set of all names except it: if these fail, a monotone oracle has no other solution. Then
    sets that are not a subset of a failed set. The others, which should fail, run only if the budget covers all of
    them.
    """
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
    """Returns the property of a passing set that the runs have proved: "minimum", "1-minimal" or "passes".

    Example:
        >>> known = {frozenset("ab"): True, frozenset("a"): False, frozenset("b"): False}
        >>> prove(frozenset("ab"), "abc", known), prove(frozenset("ab"), "abc", {**known, frozenset("c"): True})
        ('1-minimal', '1-minimal')
        >>> prove(frozenset("ab"), "ab", {**known, frozenset(): False})
        'minimum'
    """
    if any(known.get(found - {name}) is not False for name in found):
        return "passes"
    number = sum(math.comb(len(order), size) for size in range(len(found)))
    members = frozenset(order)
    smaller = [passed for subset, passed in known.items() if len(subset) < len(found) and subset <= members]
    return "minimum" if len(smaller) == number and not any(smaller) else "1-minimal"
