"""Laws of all promotion rules over all dtypes, PyTorch's own rule, errors and remedies."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_promote.reference.dtypes import ALL_DTYPES, Kind, dtype_name, is_complex, is_floating, kind
from torch_promote.reference.promotion import TABLE_DTYPES, Operand, PromotionError, result_type
from torch_promote.reference.promotion_rules import (
    RULE_NAMES,
    PromotionRule,
    PromotionRuleError,
    RuleDefinitionError,
    promotion_rule,
)
from torch_promote.reference.promotion_rules.jax_rule import joins
from torch_promote.reference.promotion_rules.rule import CODES, NUMBER_TYPES, read_table

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
    results = {*rule.tensors.values(), *rule.numbers.values(), *rule.floats.values(), *rule.zero_dims.values()} - {None}
    assert results <= set(ALL_DTYPES)


@rules
@defaults
def test_what_floats_gives_is_floating_and_stays(name: str, default_dtype: torch.dtype) -> None:
    rule = promotion_rule(name, default_dtype)
    for dtype in ARITHMETIC:
        found = rule.of_float(dtype)
        assert found is None or is_floating(found) or is_complex(found)
        assert found is None or rule.of_float(found) is found
        assert not (is_floating(dtype) or is_complex(dtype)) or found is dtype


@rules
@defaults
def test_a_weak_number_never_lowers_a_tensor(name: str, default_dtype: torch.dtype) -> None:
    rule = promotion_rule(name, default_dtype)
    for number, dtype in itertools.product(NUMBER_TYPES, ARITHMETIC):
        found = rule.of_number(number, dtype)
        assert found is None or kind(found) >= kind(dtype)
        assert found is None or kind(found) >= Kind(NUMBER_TYPES.index(number))


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
@settings(max_examples=1_000, deadline=None)
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


def test_the_torch_rule_is_pytorchs_own_for_every_pair() -> None:
    rule = promotion_rule("torch")
    with warnings.catch_warnings():  # complex32 is experimental
        warnings.simplefilter("ignore")
        operands: list[Any] = [torch.empty(shape, dtype=dtype) for shape in ((2,), ()) for dtype in ARITHMETIC]
    operands += [*NUMBERS, 2**63]
    for a, b in itertools.product(operands, repeat=2):
        try:
            expected: Any = torch.result_type(a, b)
        except RuntimeError:
            expected = "raises"
        assert answer(rule, [a, b]) == expected, (a, b)


def test_the_strict_rule_refuses_every_mixed_pair_and_nothing_else() -> None:
    rule = promotion_rule("strict")
    for a, b in itertools.product(ALL_DTYPES, repeat=2):
        operands = [Operand(a, (2,)), Operand(b)]
        if a is b:
            assert rule.common(operands) is a
            continue
        with pytest.raises(PromotionRuleError) as raised:
            rule.common(operands, "add")
        words = f'add: the promotion rule "strict" has no common dtype for {dtype_name(a)}[2] and {dtype_name(b)}[]: '
        assert str(raised.value).startswith(words)
        assert "x.to(torch." in str(raised.value)


def test_the_strict_rule_divides_tensors_of_one_dtype() -> None:
    for dtype in ARITHMETIC:
        assert promotion_rule("strict", torch.float64).common([dtype, dtype], floats=True) in (dtype, torch.float64)


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
    for a, b in itertools.product(ARITHMETIC, ALL_DTYPES):
        if answer(rule, [a, b]) == "raises":
            with pytest.raises(PromotionRuleError) as raised:
                rule.common([a, b])
            assert answer(rule, follow(raised.value.remedy, [a, b])) != "raises", raised.value


@pytest.mark.parametrize(
    ("pair", "casts"),
    [
        (("float8_e5m2", "float16"), ["Write x.to(torch.float16) for the float8_e5m2 tensor."] * 2),
        (("int8", "int32"), ["Write x.to(torch.int32) for the int8 tensor."] * 2),
        (
            ("bfloat16", "float16"),
            [
                "Write x.to(torch.float32) for the bfloat16 tensor and the float16 tensor.",
                "Write x.to(torch.float32) for the float16 tensor and the bfloat16 tensor.",
            ],
        ),
        (
            ("int64", "uint64"),
            [
                "Cast one of the two: x.to(torch.int64) or x.to(torch.uint64).",
                "Cast one of the two: x.to(torch.uint64) or x.to(torch.int64).",
            ],
        ),
    ],
)
def test_a_remedy_widens(pair: tuple[str, str], casts: list[str]) -> None:
    told = []
    for names in (pair, pair[::-1]):
        with pytest.raises(PromotionRuleError) as raised:
            promotion_rule("strict").common([getattr(torch, name) for name in names])
        told.append(raised.value.remedy)
    assert sorted(told) == sorted(casts)


@pytest.mark.parametrize("name", [name for name in RULE_NAMES if name != "torch"])
def test_a_remedy_for_a_number_works(name: str) -> None:
    rule = promotion_rule(name)
    for number, dtype in itertools.product(NUMBERS, ARITHMETIC):
        if answer(rule, [dtype, number]) == "raises":
            with pytest.raises(PromotionRuleError) as raised:
                rule.common([dtype, number])
            if isinstance(number, bool):
                assert raised.value.remedy == "Write int(x) for the Python bool."
                assert answer(rule, [dtype, int(number)]) != "raises"
            else:
                assert answer(rule, [*follow(raised.value.remedy, [dtype]), number]) != "raises", raised.value


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


def test_an_error_of_division_names_the_dtype() -> None:
    with pytest.raises(PromotionRuleError) as raised:
        promotion_rule("array_api", torch.float32).common(
            [torch.ones(2, dtype=torch.int8), 5], "true_divide", floats=True
        )
    assert str(raised.value) == (
        'true_divide: the promotion rule "array_api" has no common dtype for int8[2] and 5 (a Python int): int8 is not '
        "floating, and the rule defines no division for it. Write x.to(torch.float32) for the int8 tensor."
    )


def test_an_error_can_be_pickled() -> None:
    error = PromotionRuleError("strict", ["int8[2]", "int16[]"], "they differ", "Cast one.", "add")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_several_numbers_count_as_the_highest_kind_and_alone_as_pytorch_has_them() -> None:
    for name in RULE_NAMES:
        rule = promotion_rule(name, torch.float64)
        assert rule.common([1, 2.5]) is torch.float64
        assert rule.common([True]) is torch.bool
        assert rule.common([torch.float32, 1, 2.5]) is torch.float32


def test_no_operands_and_no_operand() -> None:
    with pytest.raises(ValueError, match="common takes at least one operand"):
        promotion_rule("jax").common([])
    with pytest.raises(TypeError, match=r"an operand is a tensor, a Python number, .* or an Operand, got 'a'"):
        promotion_rule("jax").common([torch.int8, "a"])  # type: ignore[list-item]


@pytest.mark.parametrize("rule", ["jaxx", None, 3])
def test_an_unknown_rule_is_refused(rule: Any) -> None:
    with pytest.raises(RuleDefinitionError, match=r"Legal: torch, jax, numpy, array_api, strict\."):
        promotion_rule(rule)


def test_a_rule_follows_the_default_dtype_that_it_is_asked_for() -> None:
    rule = promotion_rule("jax", torch.float32)
    assert promotion_rule(rule, torch.float64).common([torch.int8, 2.5]) is torch.float64
    assert rule.under(torch.float32) is rule
    assert promotion_rule("numpy", torch.float16).common([torch.int8, 2.5]) is torch.float64


def test_a_lattice_with_a_cycle_is_refused() -> None:
    with pytest.raises(RuleDefinitionError, match="the lattice has a cycle: a < b < a"):
        joins({"a": ("b",), "b": ("a",)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("i4 f4\ni4 i4 f4", "one row for each typecode"),
        ("i4 f4\ni4 i4 f4\nf4 f4", "one row for each typecode"),
        ("i4 f4\nf4 f4 f4\ni4 i4 f4", "one row for each typecode"),
        ("i4 f4\ni4 i4 f4\nf4 f8 f4", "the table has f4 for i4 with f4, but not for f4 with i4"),
        ("i4 f4\ni4 i8 f4\nf4 f4 f4", "the table has i8 for i4 with itself"),
        ("i4 f4\ni4 i4 xx\nf4 xx f4", "no dtype has the typecode xx"),
    ],
)
def test_a_faulty_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(RuleDefinitionError, match=message):
        read_table(text)
