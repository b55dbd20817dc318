"""Laws of all promotion rules over all dtypes, PyTorch's own rule, errors and remedies."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_promote.errors import DtypeError
from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name, is_complex, is_floating, kind
from torch_promote.reference.promotion import CODES, TABLE_DTYPES, Operand, PromotionError, result_type
from torch_promote.reference.promotion_rules import (
    RULE_NAMES,
    PromotionRule,
    PromotionRuleError,
    RuleDefinitionError,
    make_rule,
    promotion_rule,
)
from torch_promote.reference.promotion_rules.rule import NUMBER_TYPES
from torch_promote.reference.promotion_rules.user import PAIR_DTYPES

DEFAULT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ARITHMETIC = tuple(CODES.values())
NUMBERS: tuple[Any, ...] = (True, 3, 2.5, 1j)
rules = pytest.mark.parametrize("name", RULE_NAMES)
defaults = pytest.mark.parametrize("default_dtype", DEFAULT_DTYPES, ids=dtype_name)

OPERANDS = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from([Operand(d, shape) for d in ALL_DTYPES for shape in ((), (2,), (3, 1))])
)


def answer(rule: PromotionRule, operands: Sequence[Any]) -> torch.dtype | str:
    try:
        return rule.common(operands)
    except PromotionRuleError:
        return "raises"


def folded(rule: PromotionRule, *dtypes: torch.dtype | None) -> torch.dtype | None:
    common, *others = dtypes
    for dtype in others:
        common = None if common is None or dtype is None else rule.of_pair(common, dtype)
    return common


@rules
@defaults
def test_two_dtypes_promote_whichever_comes_first_and_one_to_itself(name: str, default_dtype: torch.dtype) -> None:
    rule = promotion_rule(name, default_dtype)
    for a, b in itertools.product(ALL_DTYPES, repeat=2):
        assert rule.of_pair(a, b) is rule.of_pair(b, a), (a, b)
    assert all(rule.of_pair(dtype, dtype) is dtype for dtype in ALL_DTYPES)


@rules
@defaults
def test_the_tables_are_total(name: str, default_dtype: torch.dtype) -> None:
    rule = promotion_rule(name, default_dtype)
    known = {dtype for pair in rule.tensors for dtype in pair}
    assert set(rule.tensors) == set(itertools.product(known, repeat=2))
    assert set(itertools.product(NUMBER_TYPES, known)) <= set(rule.numbers)
    assert known <= set(rule.floats)
    assert set(rule.zero_dims) == (set(rule.tensors) if rule.zero_dim_is_weak else set())
    for dtype in ARITHMETIC:
        floating = rule.of_float(dtype)
        assert floating is None or is_floating(floating) or is_complex(floating)
        for number in NUMBER_TYPES:
            found = rule.of_number(number, dtype)
            assert found is None or kind(found) >= max(kind(dtype), NUMBER_TYPES.index(number))
    results = {*rule.tensors.values(), *rule.numbers.values(), *rule.floats.values(), *rule.zero_dims.values()} - {None}
    assert results <= set(ALL_DTYPES)


@pytest.mark.parametrize("name", [name for name in RULE_NAMES if promotion_rule(name).associative])
def test_an_associative_rule_is_associative(name: str) -> None:
    rule = promotion_rule(name)
    # PyTorch's is so within its table. Outside of it, it folds in the order of the operands, and errors are final.
    dtypes = TABLE_DTYPES if name == "torch" else ALL_DTYPES
    for a, b, c in itertools.product(dtypes, repeat=3):
        assert folded(rule, folded(rule, a, b), c) is folded(rule, a, folded(rule, b, c)), (a, b, c)


@pytest.mark.parametrize("name", [name for name in RULE_NAMES if not promotion_rule(name).associative])
def test_a_rule_that_is_not_associative_differs_from_folding(name: str) -> None:
    rule = promotion_rule(name)
    triples = list(itertools.permutations(ARITHMETIC, 3))
    differing = [t for t in triples if answer(rule, t) != (folded(rule, *t) or "raises")]
    assert differing
    # Where every order of folding agrees, so does common.
    assert [t for t in differing if len({folded(rule, *order) for order in itertools.permutations(t)}) == 1] == []


@pytest.mark.parametrize("name", [name for name in RULE_NAMES if name != "torch"])
@given(st.lists(OPERANDS, min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_the_order_of_operands_does_not_matter(name: str, operands: list[Any], rng: Any) -> None:
    rule = promotion_rule(name)
    found = answer(rule, operands)
    shuffled = list(operands)
    rng.shuffle(shuffled)
    assert answer(rule, shuffled) == found
    assert answer(rule, [*operands, operands[0]]) == found


@given(st.lists(OPERANDS, min_size=1, max_size=4), st.sampled_from(DEFAULT_DTYPES))
@settings(max_examples=300, deadline=None)
def test_the_torch_rule_is_result_type(operands: list[Any], default_dtype: torch.dtype) -> None:
    try:
        expected: Any = result_type(*operands, default_dtype=default_dtype)
    except PromotionError:
        expected = "raises"
    rule = promotion_rule("torch", default_dtype)
    assert answer(rule, operands) == expected
    # The tables alone say the same, but for bits, which the next operand overwrites.
    if not any(isinstance(o, Operand) and dtype_name(o.dtype).startswith("bits") for o in operands):
        assert answer(dataclasses.replace(rule, whole=None), operands) == expected


def follow(remedy: str, operands: list[torch.dtype]) -> list[torch.dtype]:
    """Applies a remedy."""
    either = re.fullmatch(r"Cast one of the two: x\.to\(torch\.(\w+)\) or x\.to\(torch\.(\w+)\)\.", remedy)
    if either:
        return [getattr(torch, either.group(1))] * 2
    told = re.fullmatch(r"Write x\.to\(torch\.(\w+)\) for the (\w+) tensor(?: and the (\w+) tensor)?\.", remedy)
    assert told is not None, remedy
    target, *sources = told.groups()
    return [getattr(torch, target) if dtype_name(dtype) in sources else dtype for dtype in operands]


@pytest.mark.parametrize("name", [name for name in RULE_NAMES if name != "torch"])
def test_a_remedy_works(name: str) -> None:
    rule = promotion_rule(name)
    for a, b in itertools.product(ARITHMETIC, (*ALL_DTYPES, *NUMBERS)):
        if answer(rule, [a, b]) == "raises":
            with pytest.raises(PromotionRuleError) as raised:
                rule.common([a, b])
            if b is True:
                assert raised.value.remedy == "Write int(x) for the Python bool."
                continue
            tensors, numbers = ([a, b], []) if isinstance(b, torch.dtype) else ([a], [b])
            assert answer(rule, [*follow(raised.value.remedy, tensors), *numbers]) != "raises", raised.value


@pytest.mark.parametrize(
    ("name", "operands", "message"),
    [
        ("jax", (torch.float8_e5m2, torch.float16), "no node of JAX's lattice is above both float8_e5m2 and float16."),
        ("jax", (torch.complex32, torch.float16), "JAX has no dtype complex32."),
        ("numpy", (torch.complex32, torch.int8), "NumPy has no complex32."),
        ("numpy", (torch.int8, torch.float16, torch.float8_e5m2), "NumPy has no float8_e5m2."),
        ("array_api", (torch.uint64, torch.int8), "the standard has no dtype for uint64 with signed integers."),
        ("array_api", (torch.float16, torch.float32), "the standard has no float16."),
        ("array_api", (torch.bool, torch.int8), "the standard does not mix kinds: bool is bool, int8 is integer."),
        ("array_api", (torch.int8, 2.5), "the standard does not mix a Python float with integer arrays such as int8."),
        ("strict", (torch.int8, 2.5), "a Python float would change the dtype of int8."),
        ("torch", (torch.uint16, torch.int8), "uint64 and uint1 to uint7 promote only with floating dtypes."),
    ],
)
def test_an_error_says_why(name: str, operands: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PromotionRuleError) as raised:
        promotion_rule(name).common(operands, "mul")
    assert message.rstrip(".") in str(raised.value)
    assert str(raised.value).startswith(f'mul: the promotion rule "{name}" has no common dtype for ')
    assert isinstance(raised.value, RuntimeError)  # a TypeError in `x + y` is dropped by PyTorch


def test_an_error_can_be_pickled() -> None:
    error = PromotionRuleError("strict", ["int8[2]", "int16[]"], "they differ", "Cast one.", "add")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("dtype", ["int8", torch.float8_e5m2, torch.complex64])
def test_a_default_dtype_that_pytorch_would_not_take_is_refused(dtype: Any) -> None:
    with pytest.raises(DtypeError, match=r"^default_dtype is .*, got .*Legal: float16"):
        promotion_rule("numpy", dtype)


@pytest.mark.parametrize("rule", ["jaxx", None, 3])
def test_an_unknown_rule_is_refused(rule: Any) -> None:
    with pytest.raises(RuleDefinitionError, match=r"Legal: torch, jax, numpy, array_api, strict\."):
        promotion_rule(rule)


# --- make_rule


I8, I32, F16, BF16, F32, F64 = torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64


def test_a_table_over_a_rule_changes_its_pairs_and_no_others() -> None:
    base = promotion_rule("numpy")
    rule = make_rule("mine", {(I32, F32): F32}, over="numpy")
    changed = [pair for pair in base.tensors if rule.tensors[pair] is not base.tensors[pair]]
    assert sorted(map(str, changed)) == sorted(map(str, [(I32, F32), (F32, I32)]))
    assert (rule.numbers, rule.floats) == (base.numbers, base.floats)


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


def test_jax_joins_integers_of_both_signs_to_a_float_that_gives_way() -> None:
    assert promotion_rule("jax").common([torch.uint64, torch.int64, F16]) is F16


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
    ("arguments", "message"),
    [
        ({"name": ""}, "the name of a rule is a str that is not empty, got ''."),
        ({"name": "jax"}, "'jax' is the name of an existing rule. Choose another."),
        ({"tensors": 3}, "tensors is a mapping of pairs of dtypes to dtypes, or a function of two dtypes, got 3 of"),
        ({"tensors": {I8: F32}}, "rule 'mine': a key of the table is a pair of dtypes, got torch.int8."),
        ({"tensors": {(I8, "float23"): F32}}, "rule 'mine': 'float23' is not a dtype."),
        ({"tensors": {(I8, F32): "float23"}}, "rule 'mine': int8 with float32 is 'float23'. Legal: a torch.dtype, or"),
        ({"tensors": {(I8, I8): I32}}, "rule 'mine': int8 with itself is int32. It must be int8."),
        (
            {"tensors": {(I8, F32): F32, (F32, I8): F64}},
            "int8 with float32 is float32, but float32 with int8 is float64",
        ),
        ({"tensors": lambda a, b: a}, "rule 'mine': bool with uint8 is bool, but uint8 with bool is uint8."),
        ({"tensors": torch.promote_types}, "Return None for two dtypes without a common dtype."),
        ({"over": "jacks"}, "no promotion rule is called 'jacks'. Legal: torch, jax, numpy, array_api, strict."),
        ({"numbers": [1]}, "rule 'mine': numbers is a mapping, or None, got [1] of type list."),
        ({"numbers": {(str, I8): I8}}, "a key of numbers is bool, int, float or complex with a dtype, got (<class"),
        ({"numbers": {(float, I8): 4}}, "rule 'mine': a Python float with int8 is 4. Legal: a torch.dtype"),
        ({"floats": {I8: I32}}, "rule 'mine': the floating dtype of int8 is int32, which is not floating."),
        ({"default_dtype": "int8"}, "default_dtype is the dtype of Python floats, got int8. Legal: float16, bfloat16,"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DtypeError if "default_dtype" in arguments else RuleDefinitionError) as raised:
        make_rule(**({"name": "mine", "tensors": {}} | arguments))
    assert message in str(raised.value)
