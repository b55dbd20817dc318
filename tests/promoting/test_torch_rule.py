"""Under the rule "torch", every op that promotes equals stock in dtype, strides, bits, gradients and errors."""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

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
from torch_promote.regions.promotion_tables import PromotingOp, promoting_ops

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


def database_ops() -> list[Any]:
    names = {op.name.removeprefix("aten::").partition(".")[0] for op in promoting_ops() if not op.name.endswith("_")}
    return [entry for entry in op_db if entry.name.rpartition(".")[2] in names]


def test_samples_of_the_op_database() -> None:
    entries = database_ops()
    assert len(entries) > 100
    compared, wrong = 0, []
    for entry in entries:
        for dtype, other in (
            (torch.float32, torch.float16),
            (torch.bfloat16, torch.int64),
            (torch.int32, torch.float64),
        ):
            if dtype not in entry.dtypes:
                continue
            # Not through entry.sample_inputs, which walks the stack for each sample to name the test that it is for.
            for sample in itertools.islice(entry.sample_inputs_func(entry, "cpu", dtype, False), 6):
                # The first tensor among the other arguments gets another dtype.
                args = [x.to(other) if isinstance(x, torch.Tensor) else x for x in sample.args]

                def call(entry: Any = entry, sample: Any = sample, args: Any = args) -> Any:
                    torch.manual_seed(0)
                    return entry(sample.input, *args, **sample.kwargs)

                stock = outcome(call)
                with tp.promotion("torch"):
                    ours = outcome(call)
                compared += 1
                if ours != stock:
                    wrong.append((entry.name, dtype, other, ours, stock))
    assert wrong == []
    assert compared > 500
