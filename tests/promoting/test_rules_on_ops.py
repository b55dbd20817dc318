"""Under any rule, an op computes in the rule's common dtype, and gives the values of operands cast by hand."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.promoting_calls import DTYPES, UNSIGNED, operand, outcome
from torch_promote.errors import PromotionRuleError, PromotionWriteError
from torch_promote.reference.promotion_rules import promotion_rule

RULES = ("jax", "numpy", "array_api", "strict")
ALL = (*DTYPES, *UNSIGNED)
SHAPES = (((2, 3), (2, 3)), ((2, 3), ()), ((), (3,)), ((), ()))
FLOATS = (torch.true_divide, torch.atan2, torch.xlogy)
COMMON = (torch.add, torch.mul, torch.maximum, torch.eq, torch.logical_xor)


def expected(rule: str, function: Callable[..., Any], operands: list[Any], floats: bool) -> Any:
    """The rule's dtype by the reference, and the op on operands cast to it, run by stock."""
    try:
        dtype = promotion_rule(rule).common(operands, floats=floats)
    except PromotionRuleError:
        return "raises"
    return outcome(lambda: function(*[x.to(dtype) if isinstance(x, torch.Tensor) else x for x in operands]))


def got(rule: str, function: Callable[..., Any], operands: list[Any]) -> Any:
    with tp.promotion(rule):
        found = outcome(lambda: function(*operands))
    return "raises" if found[0] == "PromotionRuleError" else found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("function", [*FLOATS, *COMMON], ids=lambda function: function.__name__)
def test_every_pair(rule: str, function: Callable[..., Any]) -> None:
    kinds = set()
    for (a, b), (first, second) in itertools.product(itertools.product(ALL, ALL), SHAPES):
        operands = [operand(a, first), operand(b, second)]
        wanted = expected(rule, function, operands, function in FLOATS)
        assert got(rule, function, operands) == wanted, (rule, function, a, b, first, second)
        kinds.add(wanted if wanted == "raises" else wanted[0])
    assert "result" in kinds


@pytest.mark.parametrize("rule", ["torch", *RULES])
def test_numbers(rule: str) -> None:
    results = set()
    for dtype, number, shape in itertools.product(ALL, (True, 3, 2.5, 1j), ((3,), ())):
        tensor = operand(dtype, shape)
        for function in (operator.add, operator.mul, operator.eq):
            wanted = expected(rule, function, [tensor, number], floats=False)
            if rule == "torch" and wanted == "raises":
                continue
            assert got(rule, function, [tensor, number]) == wanted, (rule, dtype, number, shape)
            results.add(wanted[0])
    assert "result" in results


@pytest.mark.parametrize("rule", RULES)
def test_more_than_two_dtypes(rule: str) -> None:
    raised = 0
    for dtypes in itertools.product(ALL, repeat=3):
        operands = [operand(dtype, (3,)) for dtype in dtypes]
        try:
            wanted: Any = promotion_rule(rule).common(operands)
        except PromotionRuleError:
            wanted = "PromotionRuleError"
            raised += 1
        with tp.promotion(rule):
            try:
                found: Any = torch.cat(operands).dtype
            except PromotionRuleError as error:
                found = type(error).__name__
        assert found == wanted, (rule, dtypes)
    assert raised < len(ALL) ** 3


@pytest.mark.parametrize("rule", RULES)
def test_where_lists_and_three_operands(rule: str) -> None:
    condition = torch.tensor([True, False, True])
    a, b = operand(torch.float32, (3,)), operand(torch.float64, ())
    calls: dict[str, Callable[..., Any]] = {
        "where": lambda x, y: torch.where(condition, x, y),
        "stack": lambda x, y: torch.stack([x, y.expand(3)]),
        "hstack": lambda x, y: torch.hstack([x, y.expand(3)]),
        "concat": lambda x, y: torch.concat([x, y.expand(3)]),
        "lerp": lambda x, y: torch.lerp(x, y, y),
        "addcmul": torch.addcmul and (lambda x, y: torch.addcmul(x, x, y)),
        "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
        "clamp": lambda x, y: torch.clamp(x, y, x),
        "minimum": torch.minimum,
        "pow": torch.pow,
        "remainder": torch.remainder,
        "foreach": lambda x, y: torch._foreach_add([x, x], [y, x]),
    }
    for name, call in calls.items():
        wanted: Any
        if rule == "strict":
            wanted = "raises"
        elif name == "foreach":
            wanted = outcome(lambda: [a.double() + b, a + a])
        else:
            wanted = outcome(lambda call=call: call(a.double(), b))
        assert got(rule, call, [a, b]) == wanted, (rule, name)


def test_integers_divide_as_the_rule_has_it() -> None:
    ints = operand(torch.int32, (3,))
    dtypes = {}
    for rule in ("torch", "jax", "numpy", "strict"):
        with tp.promotion(rule):
            dtypes[rule] = (
                (ints / ints).dtype,
                torch.sqrt(ints.abs()).dtype,
                torch.div(ints, 2, rounding_mode="floor").dtype,
            )
    assert dtypes["torch"] == dtypes["jax"] == dtypes["strict"] == (torch.float32, torch.float32, torch.int32)
    assert dtypes["numpy"] == (torch.float64, torch.float64, torch.int32)


def test_the_default_dtype_counts_as_it_is_at_the_call() -> None:
    region, ints = tp.promotion("jax"), torch.ones(3, dtype=torch.int32)
    before = torch.get_default_dtype()
    with region:
        assert (ints + 0.5).dtype is torch.float32
        try:
            torch.set_default_dtype(torch.float64)
            assert (ints + 0.5).dtype is torch.float64
        finally:
            torch.set_default_dtype(before)


class TestWrites:
    def test_in_place_computes_in_the_common_dtype(self) -> None:
        for other_shape in ((3,), ()):
            x, y = operand(torch.float32, (3,)), operand(torch.float64, other_shape)
            wanted = (x.double() * y).float()
            version, address = x._version, x.data_ptr()
            with tp.promotion("numpy"):
                x *= y
            assert torch.equal(x, wanted)
            assert x._version > version
            assert x.data_ptr() == address

    @pytest.mark.parametrize("rule", ["jax", "numpy"])
    def test_a_higher_kind_is_not_written(self, rule: str) -> None:
        x = torch.ones(3, dtype=torch.int32)
        with tp.promotion(rule), pytest.raises(PromotionWriteError, match=r"aten::add_.Tensor .*int32.*does not write"):
            x += torch.ones(3)
        with tp.promotion(rule), pytest.raises(PromotionWriteError):
            x /= x
        with tp.promotion(rule), pytest.raises(PromotionWriteError, match=r"aten::add.out"):
            torch.add(x.float(), x.float(), out=x)
        assert torch.equal(x, torch.ones(3, dtype=torch.int32))
        assert x._version == 0

    def test_numpy_writes_unsigned_to_signed_and_not_back(self) -> None:
        x, y = torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.int8)
        with tp.promotion("numpy"):
            y += x
            assert torch.equal(y, torch.full((3,), 2, dtype=torch.int8))
            with pytest.raises(PromotionWriteError):
                x += y

    @pytest.mark.parametrize("rule", ["array_api", "strict"])
    def test_what_is_computed_is_what_is_written(self, rule: str) -> None:
        x = torch.ones(3)
        with tp.promotion(rule), pytest.raises(PromotionRuleError):
            x += torch.ones(3, dtype=torch.float64)
        with tp.promotion(rule):
            x += 2
            x += torch.ones(3)
        assert torch.equal(x, torch.full((3,), 4.0))

    @pytest.mark.parametrize(
        "call",
        [
            lambda x, y: torch._foreach_add([x, x], [y]),
            lambda x, y: torch._foreach_add([x], [y, y]),
            lambda x, y: torch._foreach_add_([y, y], [x]),
            lambda x, y: torch._foreach_add_([], []),
            lambda x, y: torch.cat([]),
            lambda x, y: torch.cat([], out=x),
        ],
    )
    def test_lists_that_the_op_refuses(self, call: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        x, y = operand(torch.int32, (3,)), operand(torch.float16, (3,))
        with pytest.raises((RuntimeError, ValueError)) as plain:
            call(x, y)
        with tp.promotion("numpy"), pytest.raises(type(plain.value)) as under_rule:
            call(x, y)
        assert str(under_rule.value) == str(plain.value)


WITHOUT_OPERANDS: dict[str, Callable[[], Any]] = {
    "no tensors": lambda: torch.cat([]),
    "numbers alone": lambda: torch.where(torch.ones(3) > 0, 1.0, 2),
    "empty lists": lambda: torch._foreach_add([], []),
    "lists of different lengths": lambda: torch._foreach_add([torch.ones(3)], [torch.ones(3), torch.ones(3)]),
    "an undefined tensor": lambda: torch.ops.aten.atan2.default(None, torch.ones(3)),
    "an undefined tensor of an op outside of the table": lambda: torch.ops.aten.add.Tensor(None, torch.ones(3)),
}


@pytest.mark.parametrize("rule", ["torch", *RULES])
@pytest.mark.parametrize("call", WITHOUT_OPERANDS.values(), ids=WITHOUT_OPERANDS)
def test_a_call_that_lacks_operands_is_left_to_pytorch(rule: str, call: Callable[[], Any]) -> None:
    def told() -> Any:
        try:
            return call().tolist()
        except (RuntimeError, ValueError) as error:
            return type(error), str(error).partition("Exception raised from")[0]

    expected = told()
    with tp.promotion(rule):
        assert told() == expected


class TestMatmul:
    products: dict[str, Callable[..., Any]] = {  # noqa: RUF012
        "matmul": operator.matmul,
        "mm": torch.mm,
        "bmm": lambda a, b: torch.bmm(a[None], b[None]),
        "linear": torch.nn.functional.linear,
        "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
        "tensordot": lambda a, b: torch.tensordot(a, b, 1),
        "addmm": lambda a, b: torch.addmm(a, a, b),
        "mv": lambda a, b: torch.mv(a, b[0]),
        "dot": lambda a, b: torch.dot(a[0], b[0]),
        "inner": torch.inner,
    }

    @pytest.mark.parametrize("name", products)
    def test_matmul_true_brings_products(self, name: str) -> None:
        call = self.products[name]
        a, b = operand(torch.float16, (3, 3)), operand(torch.bfloat16, (3, 3))
        with pytest.raises(RuntimeError):
            call(a, b)
        with tp.promotion("jax"), pytest.raises(RuntimeError):
            call(a, b)
        with tp.promotion("jax", matmul=True):
            assert torch.equal(call(a, b), call(a.float(), b.float()))
        with tp.promotion("strict", matmul=True), pytest.raises(PromotionRuleError, match="strict"):
            call(a, b)

    def test_the_rule_torch_promotes_products_too(self) -> None:
        a, b = operand(torch.float16, (3, 3)), operand(torch.float32, (3, 3))
        for gradients in (False, True):
            a.requires_grad_(gradients)
            with tp.promotion("torch", matmul=True):
                assert torch.equal(a @ b, a.float() @ b)

    def test_their_gradients_have_the_operands_dtypes(self) -> None:
        a, b = (operand(dtype, (3, 3)).requires_grad_() for dtype in (torch.float16, torch.bfloat16))
        with tp.promotion("jax", matmul=True):
            (a @ b).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad.dtype, b.grad.dtype) == (torch.float16, torch.bfloat16)


class TestStrict:
    def test_the_message_names_op_operands_and_the_cast(self) -> None:
        with tp.promotion("strict"), pytest.raises(PromotionRuleError) as caught:
            _ = torch.ones(2, 3) * torch.ones(3, dtype=torch.float16)
        message = str(caught.value)
        for part in ("aten::mul.Tensor", "strict", "float32[2, 3]", "float16[3]", ".to(torch.float32)"):
            assert part in message

    def test_fitting_numbers_do_not(self) -> None:
        with tp.promotion("strict"):
            assert (torch.ones(3) + 2).dtype is torch.float32
            assert (torch.ones(3, dtype=torch.int8) * 2).dtype is torch.int8
            with pytest.raises(PromotionRuleError):
                _ = torch.ones(3, dtype=torch.int8) * 2.5
