"""User-defined rules: the extension computes in the dtype that the rule's `common` returns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.promoting_calls import DTYPES, operand
from torch_promote.errors import PromotionRuleError
from torch_promote.reference.promotion_rules import PromotionRule

REAL = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)


def widest(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if a is b else max(a, b, key=DTYPES.index) if {a, b} <= set(DTYPES) else torch.float64


RULES: dict[str, Callable[[], PromotionRule]] = {
    "a table over strict": lambda: tp.make_rule("half", {(torch.float16, torch.bfloat16): torch.bfloat16}),
    "a table over torch": lambda: tp.make_rule("low", {(torch.float16, torch.float32): torch.float16}, over="torch"),
    "a table over numpy": lambda: tp.make_rule("ints", {(torch.int32, torch.float32): torch.float32}, over="numpy"),
    "a function": lambda: tp.make_rule("widest", widest, over="torch"),
}


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except PromotionRuleError:
        return "raises"


@pytest.mark.parametrize("name", RULES)
def test_ops_compute_in_what_the_rule_says(name: str) -> None:
    rule, generator = RULES[name](), random.Random(0)
    results = set()
    for _ in range(400):
        operands: list[Any] = [
            operand(generator.choice(REAL), generator.choice([(3,), ()])) for _ in range(generator.choice([2, 2, 3]))
        ]
        if len(operands) == 2 and generator.random() < 0.3:
            operands[1] = generator.choice([True, 3, 2.5])
        calls = [torch.mul] if len(operands) == 2 else [torch.addcmul]
        if all(isinstance(x, torch.Tensor) and x.dim() for x in operands):
            calls.append(lambda *given: torch.cat(given))
        for call in calls:
            wanted = outcome(lambda operands=operands: rule.common(operands))
            with tp.promotion(rule):
                got = outcome(lambda call=call, operands=operands: call(*operands).dtype)
            assert got == wanted, (name, operands)
            results.add(got)
    assert len(results) > 2


def test_a_narrow_common_dtype_has_the_values_of_a_cast_by_hand() -> None:
    rule = tp.make_rule("low", {(torch.float16, torch.float32): torch.float16}, over="torch")
    a, b = operand(torch.float32, (3,)), operand(torch.float16, (3,))
    x = a.clone()
    with tp.promotion(rule):
        product = a * b
        x *= b
    assert torch.equal(product, a.half() * b)
    assert torch.equal(x, (a.half() * b).float())


def test_a_number_is_cast_to_the_kind_of_the_dtype() -> None:
    numbers = {(int, torch.bool): torch.bool, (complex, torch.float32): torch.float32}
    truths, floats = torch.ones(3, dtype=torch.bool), torch.ones(3)
    assert not (truths == 2).any()
    assert not (floats == 1 + 3j).any()
    with tp.promotion(tp.make_rule("kinds", {}, over="torch", numbers=numbers)):
        assert (truths == 2).all()
        assert (floats == 1 + 3j).all()
