"""Under the rule "torch", every op that promotes equals stock in dtype, strides, bits, gradients and errors."""

from __future__ import annotations

import functools
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
BY_NAME = {op.name: op for op in promoting_ops()}
SPOKEN = (
    "add.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "eq.Tensor",
    "add_.Tensor",
    "where.self",
    "cat",
    "maximum",
    "fmod.Tensor",
)


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


@pytest.mark.parametrize("name", SPOKEN)
def test_every_pair_of_dtypes_in_every_state(name: str) -> None:
    op = BY_NAME[f"aten::{name}"]
    wrong, compared = [], 0
    for (a, b), (first, second) in itertools.product(itertools.product(ALL, ALL), SHAPES):
        arguments = arguments_of(op, operand(a, first), operand(b, second))
        assert arguments is not None
        wrong.append(differences(op, arguments, gradients=False))
        compared += 1
    assert [difference for difference in wrong if difference] == []
    assert compared == len(ALL) ** 2 * len(SHAPES)


@pytest.mark.parametrize("name", ["add.Tensor", "mul.Tensor", "div.Tensor", "lt.Scalar", "pow.Tensor_Scalar", "clamp"])
def test_every_dtype_with_every_number(name: str) -> None:
    op = BY_NAME[f"aten::{name}"]
    functions = {
        "add.Tensor": torch.add, "mul.Tensor": torch.mul, "div.Tensor": torch.div, "lt.Scalar": torch.lt,
        "pow.Tensor_Scalar": torch.pow, "clamp": torch.clamp,
    }  # fmt: skip
    function = functions[name]
    assert op.participants
    for dtype, number, shape in itertools.product(ALL, NUMBERS, [(2, 3), ()]):
        tensor = operand(dtype, shape)
        stock = outcome(functools.partial(function, tensor, number))
        with tp.promotion("torch"):
            ours = outcome(functools.partial(function, tensor, number))
        assert ours == stock, (name, dtype, number, shape)


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


def test_gradients_of_mixed_operands() -> None:
    pairs = itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64), repeat=2)
    for (a, b), name in itertools.product(
        pairs, ("mul", "div", "pow", "atan2", "hypot", "logaddexp", "xlogy", "maximum")
    ):
        op = next(
            op for key, op in BY_NAME.items() if key.startswith(f"aten::{name}") and key.endswith(("Tensor", name))
        )
        arguments = arguments_of(op, operand(a, (4, 3)).abs() + 0.1, operand(b, (3,)).abs() + 0.1)
        assert arguments is not None
        assert differences(op, arguments, gradients=True) is None


def test_operands_without_gradients_are_cast_by_us() -> None:
    """Below our key the op gets operands of one dtype, which shows that the rule acts."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        dtypes: list[Any] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                self.dtypes.append([arg.dtype for arg in args])
            return func(*args, **(kwargs or {}))

    with Seen() as seen, tp.promotion("torch"):
        _ = torch.ones(3, dtype=torch.int32) + torch.ones(3, dtype=torch.bfloat16)
    assert seen.dtypes == [[torch.bfloat16, torch.bfloat16]]
