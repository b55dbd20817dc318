"""Derivations: dtypes and errors compared with PyTorch on the same expressions, their texts, and the command."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from torch_promote.reference.derivation.derivation import why
from torch_promote.reference.derivation.expression import ExpressionError, parse
from torch_promote.reference.derivation.nodes import TensorTerm
from torch_promote.reference.derivation.operators import OPERATORS
from torch_promote.reference.dtypes import ALL_DTYPES, TYPECODES, Kind, dtype_name, kind
from torch_promote.reference.promotion import TABLE_DTYPES
from torch_promote.reference.promotion_rules import (
    RULE_NAMES,
    PromotionRule,
    PromotionRuleError,
    make_rule,
    promotion_rule,
)

SHAPES = ((2,), ())
NUMBERS = ("True", "3", "2.5", "1j", "1000", "0", "(-1)")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def stock(left: Any, symbol: str, right: Any) -> torch.Tensor | str:
    """PyTorch's result for an operator on operands of ones."""
    try:
        result: torch.Tensor = eval(f"left {symbol} right", {"left": left, "right": right})
    except (RuntimeError, TypeError) as error:
        return str(error)
    return result


def operands(dtypes: tuple[torch.dtype, ...]) -> list[tuple[str, Any]]:
    tensors: list[tuple[str, Any]] = []
    for dtype, shape in itertools.product(dtypes, SHAPES):
        term = TensorTerm(dtype, shape)
        tensors.append((str(term), torch.ones(shape, dtype=torch.uint8).to(dtype)))
    return tensors + [(number, eval(number)) for number in NUMBERS]


def agrees(derivation: Any, result: torch.Tensor | str) -> bool:
    if isinstance(result, str):
        return derivation.error is not None
    return (derivation.dtype, derivation.shape) == (result.dtype, tuple(result.shape))


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("symbol", OPERATORS)
def test_every_operator_on_every_pair(symbol: str, default_dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)
    try:
        differing = []
        for (left, x), (right, y) in itertools.product(operands(TABLE_DTYPES), repeat=2):
            if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
                derivation, result = why(f"{left} {symbol} {right}"), stock(x, symbol, y)
                if not agrees(derivation, result):
                    differing.append((str(derivation), result))
        assert differing == []
    finally:
        torch.set_default_dtype(before)


YOUNGER = tuple(d for d in ALL_DTYPES if d not in TABLE_DTYPES and kind(d) is not Kind.OPAQUE)


@pytest.mark.parametrize("symbol", OPERATORS)
def test_every_operator_with_the_younger_dtypes(symbol: str) -> None:
    """Empty tensors: their kernels are asked for all the same, and there is nothing to divide by zero."""
    differing = []
    for a, b in itertools.product((*TABLE_DTYPES, *YOUNGER), repeat=2):
        if a in YOUNGER or b in YOUNGER:
            result = stock(torch.empty(0, dtype=a), symbol, torch.empty(0, dtype=b))
            derivation = why(f"{dtype_name(a)}[0] {symbol} {dtype_name(b)}[0]")
            # A conversion that is not implemented says nothing about the operator.
            if isinstance(result, str) and "copy_" in result:
                continue
            if not agrees(derivation, result):
                differing.append((str(derivation), result))
    assert differing == []


@pytest.mark.parametrize(
    "expression",
    ["(int8[3] + 2) * int64[2, 1] / uint8[]", "int8[3] + int8[] * 2.5", "-(1) + int8[1]", "int32[2] < 2 ** 3 + 0.5"],
)
def test_nested_expressions(expression: str) -> None:
    runnable = re.sub(r"(\w+)\[([^\]]*)\]", r"torch.ones([\2], dtype=torch.\1)", expression)
    result = eval(runnable, {"torch": torch})
    derivation = why(expression)
    assert (derivation.dtype, derivation.shape) == (result.dtype, tuple(result.shape))


def test_a_derivation_of_two_operators() -> None:
    assert_expected_inline(
        str(why("int8[3] * (uint8[] + int8[]) + 2 * 1.5", default_dtype=torch.float32)),
        """\
(int8[3] * (uint8[] + int8[])) + (2 * 1.5)
1. uint8[] is a 0-dim tensor: state zero, uint8.
2. int8[] is a 0-dim tensor: state zero, int8.
3. Both are in state zero, so the two are promoted. The table has int16 for them (row u1, column
   i1).
4. + computes in int16 and returns int16.
5. int8[3] is a tensor with dimensions: state dim, int8.
6. (uint8[] + int8[]) is a 0-dim tensor: state zero, int16.
7. dim int8 with zero int16: int16 is not of a higher kind than int8, so int8 stays: a weaker state
   does not widen.
8. * computes in int8 and returns int8. A value of (uint8[] + int8[]) that does not fit int8 wraps
   around.
9. 2 * 1.5 contains no tensor: Python computes 3.0 before PyTorch is called.
10. (int8[3] * (uint8[] + int8[])) is a tensor with dimensions: state dim, int8.
11. 3.0 is a Python float: state wrapped. It counts as the default dtype, float32.
12. dim int8 with wrapped float32: float32 is floating, a higher kind than integral, so the two are
    promoted. The table has float32 for them (row i1, column f4).
13. + computes in float32 and returns float32.
Result: float32 of shape [3]""",
    )


def test_a_derivation_that_ends_in_an_error() -> None:
    assert_expected_inline(
        str(why("uint16[3] + int32[3]")),
        """\
uint16[3] + int32[3]
1. uint16[3] is a tensor with dimensions: state dim, uint16.
2. int32[3] is a tensor with dimensions: state dim, int32.
PyTorch raises: uint16 and int32 have no common dtype: uint16, uint32, uint64 and uint1 to uint7
promote only with floating dtypes. Convert one of them first.""",
    )
    assert_expected_inline(
        str(why("int8[3] + int8[2]")),
        """\
int8[3] + int8[2]
1. int8[3] is a tensor with dimensions: state dim, int8.
2. int8[2] is a tensor with dimensions: state dim, int8.
3. Both are int8 in state dim: nothing is promoted.
PyTorch raises: shapes [3] and [2] do not broadcast: dimension 0 has sizes 3 and 2, which are
neither equal nor 1.""",
    )


def runs_under(rule: PromotionRule, left: Any, symbol: str, right: Any) -> torch.Tensor | str:
    """PyTorch's result after the tensors are cast to a rule's common dtype."""
    numbers = not isinstance(left, torch.Tensor), not isinstance(right, torch.Tensor)
    if symbol == "/" and numbers[0]:
        try:
            right = right.to(rule.common([right], floats=True)).reciprocal()
        except (PromotionRuleError, RuntimeError) as error:
            return str(error)
        return runs_under(rule, right, "*", left)
    try:
        common = rule.common([left, right], floats=OPERATORS[symbol].preset == "binary_float")
    except PromotionRuleError as error:
        return str(error)
    cast = (x if number else x.to(common) for x, number in zip((left, right), numbers, strict=True))
    return stock(next(cast), symbol, next(cast))


@pytest.mark.parametrize("name", RULE_NAMES[1:])
@pytest.mark.parametrize("symbol", OPERATORS)
def test_every_operator_under_a_rule_on_every_pair(symbol: str, name: str) -> None:
    """The dtype is that of the op on cast operands. Errors are those for the uncast operands."""
    rule = promotion_rule(name)
    differing = []
    some = tuple(TYPECODES[code] for code in ["b1", "u1", "i4", "i8", "bf", "f2", "f4", "f8", "c4"])
    for (left, x), (right, y) in itertools.product(operands(some), repeat=2):
        if not (isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor)):
            continue
        derivation, result = why(f"{left} {symbol} {right}", rule=name), runs_under(rule, x, symbol, y)
        # A bool is refused before it would be cast.
        refused = symbol == "-" and "subtraction with a bool" in str(derivation.error)
        if not refused and not agrees(derivation, result):
            differing.append((str(derivation), result))
    assert differing == []


@pytest.mark.parametrize("name", RULE_NAMES)
def test_a_derivation_says_what_the_rule_says(name: str) -> None:
    rule = promotion_rule(name)
    for a, b in itertools.product(ALL_DTYPES, repeat=2):
        derivation = why(f"{dtype_name(a)}[2] == {dtype_name(b)}[2]", rule=name)
        raises = isinstance(answer(rule, a, b), str)
        assert derivation.by_rule == (raises and name != "torch"), derivation
        assert derivation.rule == name
        if raises and name != "torch":
            assert derivation.error is not None
            assert derivation.error.startswith(f'eq: the promotion rule "{name}" has no common dtype for ')


def answer(rule: PromotionRule, *dtypes: torch.dtype) -> torch.dtype | str:
    try:
        return rule.common(dtypes)
    except PromotionRuleError as error:
        return str(error)


def test_a_derivation_by_jaxs_rule() -> None:
    assert_expected_inline(
        str(why("uint8[3] * (uint64[] + int64[2, 1]) / 3", torch.float64, rule="jax")),
        """\
(uint8[3] * (uint64[] + int64[2, 1])) / 3, by the rule jax
1. uint64[] is a 0-dim tensor of uint64, which counts like any other tensor.
2. int64[2, 1] is a tensor of int64.
3. In JAX's lattice, float* is the least node above uint64 and int64 and stands for the default
   dtype, float64.
4. uint64[] and int64[2, 1] are cast to float64.
5. + computes in float64 and returns float64.
6. uint8[3] is a tensor of uint8.
7. (uint64[] + int64[2, 1]) is a tensor of float64.
8. In JAX's lattice, uint8 is below float64, which stays.
9. uint8[3] is cast to float64.
10. * computes in float64 and returns float64.
11. (uint8[3] * (uint64[] + int64[2, 1])) is a tensor of float64.
12. 3 is a Python int: it is weak, so a tensor's dtype takes precedence.
13. In JAX's lattice, int* is below float64, which stays.
14. / computes in float64 and returns float64.
Result: float64 of shape [2, 3]""",
    )


def test_a_derivation_by_numpys_rule() -> None:
    assert_expected_inline(
        str(why("3 / int8[] + True", torch.float32, rule="numpy")),
        """\
(3 / int8[]) + True, by the rule numpy
1. 3 / int8[] is computed as int8[].reciprocal() times the number. The reciprocal is float64: the
   rule takes float64 for int8 in floating point.
2. int8[].reciprocal() is a 0-dim tensor of float64, which counts like any other tensor.
3. 3 is a Python int: it is weak, so a tensor's dtype takes precedence.
4. A Python int is not of a higher kind than float64, so float64 stays.
5. * computes in float64 and returns float64.
6. (3 / int8[]) is a 0-dim tensor of float64, which counts like any other tensor.
7. True is a Python bool: it is weak, so a tensor's dtype takes precedence.
8. A Python bool is not of a higher kind than float64, so float64 stays.
9. + computes in float64 and returns float64.
Result: float64, 0-dim""",
    )


def test_a_derivation_by_the_standards_rule_that_ends_in_an_error() -> None:
    assert_expected_inline(
        str(why("int8[3] * 2 + 2.5", rule="array_api")),
        """\
(int8[3] * 2) + 2.5, by the rule array_api
1. int8[3] is a tensor of int8.
2. 2 is a Python int: it is weak, so a tensor's dtype takes precedence.
3. A Python int is not of a higher kind than int8, so int8 stays.
4. * computes in int8 and returns int8.
5. (int8[3] * 2) is a tensor of int8.
6. 2.5 is a Python float: it is weak, so a tensor's dtype takes precedence.
The rule raises: add: the promotion rule "array_api" has no common dtype for int8[3] and 2.5 (a
Python float): the standard does not mix a Python float with integer arrays such as int8. Write
x.to(torch.float32) for the int8 tensor.""",
    )


def test_a_derivation_by_a_rule_of_ones_own() -> None:
    rule = make_rule("mine", {(torch.int32, torch.float32): torch.float64}, over="torch")
    assert_expected_inline(
        str(why("int32[3] + float32[] + 1j", torch.float32, rule=rule)),
        """\
(int32[3] + float32[]) + 1j, by the rule mine
1. int32[3] is a tensor of int32.
2. float32[] is a 0-dim tensor of float32, which is weaker than a tensor with dimensions.
3. The rule has float64 for int32 with a weaker float32.
4. int32[3] and float32[] are cast to float64.
5. + computes in float64 and returns float64.
6. (int32[3] + float32[]) is a tensor of float64.
7. 1j is a Python complex: it is weak, so a tensor's dtype takes precedence.
8. A Python complex is of a higher kind than float64, and the two give complex128.
9. (int32[3] + float32[]) is cast to complex128.
10. + computes in complex128 and returns complex128.
Result: complex128 of shape [3]""",
    )


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("int32[3] +", "'int32[3] +' is not a valid expression: invalid syntax."),
        ("int33[3] + 1", "'int33' in 'int33[3] + 1' is not a dtype of this PyTorch. Closest:"),
        ("int32 + 1", "int32 in 'int32 + 1' has no sizes. Write int32[3], or int32[] for a 0-dim tensor."),
        ("int32[-1] + 1", "'-1' in 'int32[-1] + 1' is not a size. Sizes are integers, 0 or more."),
        (
            "int32[3] < 1 < 2",
            "'int32[3] < 1 < 2' chains comparisons, which tensors do not support. Use parentheses and &.",
        ),
        ("int32[3] @ 1", "int32[3] @ 1 is not an operator that promotes its operands"),
        ("-int8[1] + 1", "-int8[1] is not an operator that promotes its operands"),
        ("int32[3] + 'a'", "\"'a'\" in \"int32[3] + 'a'\" is neither an operand nor a supported operator."),
        ("int32[3]", "'int32[3]' has no operator or function with a tensor operand, so nothing is promoted."),
        ("1 + 2", "'1 + 2' has no operator or function with a tensor operand, so nothing is promoted."),
        ("1 / 0 + int8[1]", "Python cannot compute 1 / 0: division by zero."),
        ("9 ** 9 ** 9 + int8[1]", "is too large a number to compute."),
        ("f2[2](1)", "'f2[2]' in 'f2[2](1)' is not the name of a function."),
    ],
)
def test_an_expression_that_cannot_be_read(expression: str, message: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        why(expression)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("expression", "call", "error"),
    [
        (
            "float16[3] ** 70000.0",
            lambda: torch.ones(3).half() ** 70000.0,
            "the exponent 70000.0 does not fit float16.",
        ),
        (
            "bits8[3] + float32[]",
            lambda: torch.empty(3, dtype=torch.bits8) + torch.ones(()),
            "bits8 and float32 have no common dtype: bits promote only with themselves.",
        ),
    ],
)
def test_what_pytorch_raises_for(expression: str, call: Callable[[], object], error: str) -> None:
    with pytest.raises(RuntimeError):
        call()
    assert why(expression).error == error


def test_an_expression_is_read_with_pythons_precedence() -> None:
    assert str(parse("int8[3]+int64[ ]*2.5**2")) == "int8[3] + (int64[] * (2.5 ** 2))"
    assert parse("torch.half[2]+0") == parse("float16[2] + 0")


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
