"""The search of `tune`, on oracles with known answers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_promote.numerics.search import Memo, OutOfBudgetError, minimise, prove

Oracle = Callable[[frozenset[str]], bool]


def names(number: int) -> list[str]:
    return [f"op{index:02}" for index in range(number)]


def memo_of(oracle: Oracle, order: Sequence[str], budget: int = 10**6) -> tuple[Memo, list[frozenset[str]]]:
    """A memo like that of `tune`: all together passed, none failed. Also returns the sets that it runs."""
    ran: list[frozenset[str]] = []

    def passes(subset: frozenset[str]) -> bool:
        if len(ran) == budget:
            raise OutOfBudgetError
        ran.append(subset)
        return oracle(subset)

    memo = Memo(passes)
    memo.known.update({frozenset(order): True, frozenset(): False})
    return memo, ran


def brute_force(oracle: Oracle, order: Sequence[str]) -> int:
    sets = (frozenset(some) for size in range(len(order) + 1) for some in itertools.combinations(order, size))
    return min(len(some) for some in sets if some == frozenset(order) or (some and oracle(some)))


def needs(*sets: Iterable[str]) -> Oracle:
    """Monotone: passes with any of some sets inside."""
    return lambda subset: any(frozenset(one) <= subset for one in sets)


@st.composite
def monotone(draw: st.DrawFn) -> tuple[list[str], Oracle]:
    order = draw(st.permutations(names(draw(st.integers(1, 12)))))
    some = st.sets(st.sampled_from(order), min_size=1, max_size=min(4, len(order)))
    return list(order), needs(*draw(st.lists(some, min_size=1, max_size=3)))


@st.composite
def arbitrary(draw: st.DrawFn) -> tuple[list[str], Oracle]:
    """Passes for sets drawn at random, whatever is inside of them."""
    order = draw(st.permutations(names(draw(st.integers(1, 8)))))
    seed, share = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.05, 0.3, 0.7]))

    def oracle(subset: frozenset[str]) -> bool:
        key = f"{seed} {sorted(subset)}"
        return len(subset) == len(order) or (bool(subset) and random.Random(key).random() < share)

    return list(order), oracle


@given(st.one_of(monotone(), arbitrary()), st.integers(0, 3))
@settings(max_examples=120, deadline=None)
def test_the_minimum_of_an_oracle_with_few_candidates(instance: tuple[list[str], Oracle], pinned: int) -> None:
    order, oracle = instance
    memo, ran = memo_of(oracle, order)
    minimise(order, memo, pinned=min(pinned, len(order)))
    best = memo.best()
    assert best is not None
    assert len(best) == brute_force(oracle, order)
    assert prove(best, order, memo.known) == "minimum"
    assert len(ran) == len(set(ran))  # memoised


@given(st.one_of(monotone(), arbitrary()), st.integers(0, 25), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_budget_leaves_a_set_that_passed_and_no_claim_beyond_the_runs(
    instance: tuple[list[str], Oracle], budget: int, spare: bool
) -> None:
    order, oracle = instance
    memo, ran = memo_of(oracle, order, budget)
    try:
        minimise(order, memo, spare=(lambda: budget - len(ran)) if spare else (lambda: math.inf))
    except OutOfBudgetError:
        assert len(ran) == budget
    best = memo.best()
    assert best is not None
    assert best == frozenset(order) or oracle(best)
    kind = prove(best, order, memo.known)
    if kind != "passes":
        assert not any(oracle(best - {one}) for one in best if len(best) > 1)
        assert all(best - {one} in ran or len(best) == 1 or best - {one} == frozenset() for one in best)
    if kind == "minimum":
        assert len(best) == brute_force(oracle, order)


@pytest.mark.parametrize(("number", "needed"), [(60, 3), (60, 1), (30, 3), (12, 3), (5, 2), (150, 3)])
def test_the_default_budget_is_enough_with_any_order(number: int, needed: int) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        order = names(number)
        draw.shuffle(order)
        wanted = frozenset(draw.sample(order, needed))
        memo, ran = memo_of(needs(wanted), order)
        minimise(order, memo, spare=lambda: 0)
        assert memo.best() == wanted
        assert len(ran) <= 60 - 7
        assert prove(wanted, order, memo.known) == ("minimum" if needed == 1 else "1-minimal")


def test_a_good_order_takes_few_runs() -> None:
    order = names(200)
    for needed in range(1, 5):
        memo, ran = memo_of(needs(order[:needed]), order)
        minimise(order, memo)
        assert memo.best() == frozenset(order[:needed])
        assert len(ran) <= 4 * needed


def test_those_that_overflow_are_pinned() -> None:
    order = names(50)
    memo, ran = memo_of(needs(order[:8]), order)
    minimise(order, memo, pinned=8)
    assert memo.best() == frozenset(order[:8])
    assert len(ran) == 9  # the pinned ones, and each removed once
