"""Laws of all policies: overriding, difference, equality, and round trips."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.policies import KEYS, LEGAL, POLICIES, STEPS, VALUES, WAYS, made_of, selected
from torch_promote.policy.named_policies import stock_policy
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.policy import Difference, Policy


@given(STEPS)
@settings(max_examples=80, deadline=None)
def test_a_policy_is_what_its_overrides_say_and_the_later_wins(steps: list[Any]) -> None:
    model: dict[tuple[str, str], Any] = {}
    for (key, value), device in steps:
        on = DEVICE_TYPES if device is None else (device,)
        model.update({(op, name): value for op in selected(key, value) for name in on})
    policy = made_of(steps)
    for op, device in {*model, ("aten::mm", "cpu"), ("aten::exp", "cuda")}:
        expected = model.get((op, device), stock_policy(op, device))
        assert policy.lookup(exact_key(op), device) == expected
    assert policy.changes == tuple(
        (*place, model[place]) for place in sorted(model) if model[place] != stock_policy(*place)
    )


@given(POLICIES, st.sampled_from(LEGAL), st.sampled_from([None, *DEVICE_TYPES]))
@settings(max_examples=80, deadline=None)
def test_overriding_twice_is_overriding_once(policy: Policy, entry: tuple[str, Any], device: str | None) -> None:
    once = policy.override(dict([entry]), device)
    assert once.override(dict([entry]), device) == once


@given(POLICIES, POLICIES)
@settings(max_examples=80, deadline=None)
def test_diff_and_equality_agree(first: Policy, second: Policy) -> None:
    assert first.diff(first) == ()
    there, back = first.diff(second), second.diff(first)
    assert (there == ()) == (first == second)
    assert back == tuple(Difference(op, device, theirs, mine) for op, device, mine, theirs in there)
    for op, device, mine, theirs in there:
        assert mine != theirs
        assert (mine, theirs) == (first.lookup(exact_key(op), device), second.lookup(exact_key(op), device))
    if first == second:
        assert hash(first) == hash(second)


@given(POLICIES, POLICIES)
@settings(max_examples=60, deadline=None)
def test_what_a_diff_says_leads_from_one_policy_to_the_other(first: Policy, second: Policy) -> None:
    changed = second
    for device in DEVICE_TYPES:
        wanted = {exact_key(op): mine for op, on, mine, _ in first.diff(second) if on == device and mine is not None}
        changed = changed.override(wanted, device)
    left = first.diff(changed)
    assert all(mine is None for _, _, mine, _ in left), "what a policy says of an op without a row cannot be unsaid"


@given(STEPS, st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_of_overrides_of_different_ops_makes_no_difference(steps: list[Any], random: Any) -> None:
    exact = {(op, device): value for op, device, value in made_of(steps).changes}
    shuffled = list(exact)
    random.shuffle(shuffled)
    policy = Policy.stock()
    for op, device in shuffled:
        policy = policy.override({exact_key(op): exact[op, device]}, device)
    assert (policy, hash(policy)) == (made_of(steps), hash(made_of(steps)))


@given(POLICIES)
@settings(max_examples=60, deadline=None)
def test_it_comes_back_from_everything_that_it_is_turned_into(policy: Policy) -> None:
    for way in WAYS.values():
        assert way(policy) == policy
    text = repr(policy)
    if "more" not in text:
        assert eval(text) == policy


def test_the_laws_are_tried_on_every_kind_of_policy() -> None:
    assert {value for _, value in LEGAL} == set(VALUES)
    assert {key for key, _ in LEGAL} == set(KEYS)
