"""Under the rule "torch", every op that promotes equals stock in dtype, strides, bits, gradients and errors."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.promoting_calls import (
    DTYPES,
    NUMBERS,
    SHAPES,
    UNSIGNED,
    Arguments,
    arguments_of,
    elementwise_ops,
    operand,
    outcome,
    outcome_in,
    run,
    writes,
)
from torch_promote.regions.promotion_tables import PromotingOp

ALL = (*DTYPES, *UNSIGNED)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def differences(op: PromotingOp, arguments: Arguments, gradients: bool) -> str | None:
    stock = outcome(lambda: run(op, arguments, gradients))
    ours = outcome_in(tp.promotion("torch"), op, arguments, gradients)
    return None if ours == stock else f"{op.name} {arguments}: {ours} where stock has {stock}"


def random_call(op: PromotingOp, generator: random.Random) -> Arguments | None:
    a, b = generator.choice(ALL), generator.choice(ALL)
    first, second = generator.choice(SHAPES)
    operands: list[Any] = [operand(a, first, strided=generator.random() < 0.3), operand(b, second)]
    if generator.random() < 0.3:
        operands[generator.randrange(2)] = generator.choice(NUMBERS)
    out: Any = torch.empty(0, dtype=generator.choice(DTYPES))
    mode = generator.choice([None, "floor", "trunc"])
    for order in (operands, operands[::-1]):
        found = arguments_of(op, *order, mode, [out, out.clone()] if op.each else out)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("part", range(4))
def test_random_calls_of_every_op(part: int) -> None:
    generator = random.Random(part)
    compared, wrong = 0, []
    for op in elementwise_ops():
        for _ in range(10):
            arguments = random_call(op, generator)
            if arguments is not None:
                compared += 1
                wrong.append(differences(op, arguments, not writes(op) and generator.random() < 0.5))
    assert [difference for difference in wrong if difference] == []
    assert compared > 4000
