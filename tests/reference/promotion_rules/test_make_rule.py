"""User-defined rules: the arguments of make_rule, and the errors that it raises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_promote.reference.promotion import Operand
from torch_promote.reference.promotion_rules import (
    RULE_NAMES,
    PromotionRuleError,
    RuleDefinitionError,
    make_rule,
    promotion_rule,
)
from torch_promote.reference.promotion_rules.user import PAIR_DTYPES

I8, I32, F16, BF16, F32, F64 = torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64


def test_a_table_over_a_rule_changes_its_pairs_and_no_others() -> None:
    base = promotion_rule("numpy")
    rule = make_rule("mine", {(I32, F32): F32}, over="numpy")
    changed = [pair for pair in base.tensors if rule.tensors[pair] is not base.tensors[pair]]
    assert sorted(map(str, changed)) == sorted(map(str, [(I32, F32), (F32, I32)]))
    assert (rule.numbers, rule.floats) == (base.numbers, base.floats)


def test_a_table_alone_has_nothing_but_its_pairs() -> None:
    rule = make_rule("mine", {(I8, I32): I32})
    assert rule.common([I32, I8]) is I32
    assert rule.common([F32, 2]) is F32
    with pytest.raises(
        PromotionRuleError, match='rule "mine" has no common dtype for int8 and float32: the rule has no'
    ):
        rule.common([I8, F32])
    with pytest.raises(PromotionRuleError, match="the rule has no entry for a Python float with int8"):
        rule.common([I8, 2.5])


def test_numbers_and_floats_can_be_given() -> None:
    rule = make_rule("mine", {}, numbers={(float, I8): F16}, floats={I8: F16, I32: None})
    assert rule.common([I8, 2.5]) is F16
    assert rule.common([I8, I8], floats=True) is F16
    with pytest.raises(PromotionRuleError, match="int32 is not floating"):
        rule.common([I32, I32], floats=True)


@pytest.mark.parametrize("name", RULE_NAMES)
def test_a_function_that_asks_a_rule_makes_that_rule(name: str) -> None:
    base = promotion_rule(name)
    rule = make_rule("copy", base.of_pair, over=name)
    assert all(rule.of_pair(*pair) is base.of_pair(*pair) for pair in itertools.product(PAIR_DTYPES, repeat=2))
    assert (rule.zero_dim_is_weak, rule.zero_dims) == (base.zero_dim_is_weak, base.zero_dims)


def test_a_rule_follows_the_default_dtype_of_the_one_under_it() -> None:
    rule = make_rule("mine", {(I32, F32): F64}, over="torch", default_dtype=F32)
    assert rule.common([I8, 2.5]) is F32
    assert rule.under(F64).common([I8, 2.5]) is F64
    assert rule.under(F64).common([I32, F32]) is F64
    assert promotion_rule(rule, F64) is rule.under(F64)


def test_zero_dim_tensors_are_weak_over_pytorchs_rule() -> None:
    rule = make_rule("mine", {(I32, F32): F64, (F16, BF16): None}, over="torch")
    assert rule.common([Operand(I32, (2,)), Operand(F32)]) is F64  # of a higher kind: the table decides
    assert rule.common([Operand(F32, (2,)), Operand(I32)]) is F32  # of a lower kind: it gives way
    assert rule.common([Operand(F16, (2,)), Operand(BF16)]) is F16
    with pytest.raises(PromotionRuleError):
        rule.common([Operand(F16, (2,)), Operand(BF16, (2,))])


def test_a_rule_over_numpys_still_promotes_three_as_numpy_does() -> None:
    rule = make_rule("mine", {(I32, F16): F32}, over="numpy")
    assert not rule.associative
    assert rule.common([torch.int16, torch.uint16, F32]) is F32
    assert rule.common([I32, F16, F64]) is F64


def test_where_the_order_would_decide_three_raise() -> None:
    rule = make_rule(
        "mine", {(I8, I32): I32, (I32, F32): F32, (I8, F32): F64, **{(x, F64): F64 for x in (I8, I32, F32)}}
    )
    assert not rule.associative
    assert rule.common([I8, I32]) is I32
    assert rule.common([I8, F32, F64]) is F64
    with pytest.raises(PromotionRuleError):
        rule.common([I8, I32, F32])


def test_whether_a_rule_is_associative_is_found_out() -> None:
    assert make_rule("mine", {(I8, I32): I32}).associative
    assert make_rule("mine", {(I8, I32): I32, (I32, F32): F32, (I8, F32): F32}).associative
    assert not make_rule("mine", {(I8, I32): I32, (I32, F32): F32, (I8, F32): F64}).associative


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({(I8, I8): I32},), "rule 'mine': int8 with itself is int32. It must be int8."),
        (({(I8, I8): None},), "rule 'mine': int8 with itself is None. It must be int8."),
        (
            ({(I8, F32): F32, (F32, I8): F64},),
            "rule 'mine': int8 with float32 is float32, but float32 with int8 is float64. The order must not",
        ),
        (
            ({(I8, F32): "float23"},),
            "rule 'mine': int8 with float32 is 'float23'. Legal: a torch.dtype, or None for no common dtype.",
        ),
        (({(I8, "float23"): F32},), "rule 'mine': 'float23' is not a dtype."),
        (({I8: F32},), "rule 'mine': a key of the table is a pair of dtypes, got torch.int8."),
        ((lambda a, b: a,), "rule 'mine': bool with uint8 is bool, but uint8 with bool is uint8."),
        ((lambda a, b: F32,), "rule 'mine': bool with itself is float32. It must be bool."),
        (
            (lambda a, b: "f" if a is not b else a,),
            "rule 'mine': bool with uint8 is 'f'. Legal: a torch.dtype, or None",
        ),
        (
            (torch.promote_types,),
            "Return None for two dtypes without a common dtype.",
        ),
    ],
)
def test_a_fault_is_found_and_its_pair_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuleDefinitionError) as raised:
        make_rule("mine", *arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"numbers": {(str, I8): I8}},
            "a key of numbers is bool, int, float or complex with a dtype, got (<class 'str'>",
        ),
        ({"numbers": {(float, I8): 4}}, "rule 'mine': a Python float with int8 is 4. Legal: a torch.dtype"),
        ({"floats": {I8: "hal"}}, "rule 'mine': the floating dtype of int8 is 'hal'. Legal: a torch.dtype"),
        ({"floats": {I8: I32}}, "rule 'mine': the floating dtype of int8 is int32, which is not floating."),
        ({"over": "jacks"}, "no promotion rule is called 'jacks'"),
    ],
)
def test_a_fault_of_an_option_is_found(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuleDefinitionError) as raised:
        make_rule("mine", {}, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", RULE_NAMES)
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(RuleDefinitionError, match="is the name of an existing rule"):
        make_rule(name, {})


PAIRS = st.tuples(st.sampled_from(PAIR_DTYPES), st.sampled_from(PAIR_DTYPES))


@given(st.dictionaries(PAIRS, st.sampled_from([*PAIR_DTYPES, None]), max_size=4), st.sampled_from(RULE_NAMES))
@settings(max_examples=60, deadline=None)
def test_a_table_is_a_rule_or_is_refused(table: dict[Any, Any], over: str) -> None:
    sound = all((a is not b or answer is a) and table.get((b, a), answer) is answer for (a, b), answer in table.items())
    try:
        rule = make_rule("mine", table, over=over)
    except RuleDefinitionError:
        assert not sound
        return
    assert sound
    assert all(rule.of_pair(a, b) is rule.of_pair(b, a) for a, b in itertools.product(PAIR_DTYPES, repeat=2))
    assert all(rule.of_pair(dtype, dtype) is dtype for dtype in PAIR_DTYPES)
    assert all(rule.of_pair(*pair) is answer for pair, answer in table.items())


def test_dtypes_by_name() -> None:
    by_name: dict[str, Any] = {"numbers": {(float, "int8"): "bf16"}, "floats": {"int8": "float64"}}
    rule = make_rule("mine", {("int8", "half"): "float32"}, over="torch", **by_name, default_dtype="float64")
    same = make_rule(
        "mine", {(I8, F16): F32}, over="torch", numbers={(float, I8): BF16}, floats={I8: F64}, default_dtype=F64
    )
    assert rule is same
    assert rule.common(["float16", "int8"]) is F32
    assert promotion_rule("torch", "float64") is not None
    assert make_rule("all", lambda a, b: "float32" if a is not b else a).common([I8, I32]) is F32


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": 3}, "the name of a rule is a str that is not empty, got 3."),
        ({"name": ""}, "the name of a rule is a str that is not empty, got ''."),
        (
            {"tensors": 3},
            "rule 'mine': tensors is a mapping of pairs of dtypes to dtypes, or a function of two dtypes, got 3 of "
            "type int.",
        ),
        ({"over": 3}, "no promotion rule is called 3. Legal: torch, jax, numpy, array_api, strict."),
        ({"numbers": [1]}, "rule 'mine': numbers is a mapping, or None, got [1] of type list."),
        ({"floats": 3}, "rule 'mine': floats is a mapping, or None, got 3 of type int."),
        ({"default_dtype": "int8"}, "rule 'mine': default_dtype is a floating dtype, got int8."),
        (
            {"default_dtype": 3},
            "rule 'mine': default_dtype is a torch.dtype or the name of one, such as torch.bfloat16 or 'bfloat16'; got "
            "3 of type int.",
        ),
        ({"tensors": {("int8", "int9"): "int8"}}, "rule 'mine': 'int9' is not a dtype."),
        (
            {"tensors": {("int8", "int16"): "int32", (I8, torch.int16): torch.int16}},
            "rule 'mine': int16 with int8 is int32, but int8 with int16 is int16. The order must not matter.",
        ),
    ],
    ids=str,
)
def test_arguments_of_another_type(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(RuleDefinitionError) as error:
        make_rule(**({"name": "mine", "tensors": {}} | arguments))
    assert str(error.value) == text
