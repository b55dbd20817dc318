"""StepRuns calls a step and restores all state after each run, also after errors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.nothing_left import nothing_left_behind
from helpers.step_products import BFLOAT16, FLOAT16, FLOAT32, OFF, STOCK, X, dtype_of, product
from torch_promote.errors import OptionError, RegionError, StepError
from torch_promote.numerics.step_runs import StepRuns

__all__ = ["nothing_left_behind"]  # a fixture


# --- calls of the step


def test_batches_and_their_numbers() -> None:
    seen: list[Any] = []

    def numbered(number: int) -> float:
        seen.append(number)
        return float(number)

    with StepRuns(numbered, None, batches=3) as runs:
        assert [result["loss"].item() for result in runs.run(STOCK)] == [0, 1, 2]
        assert [result["loss"].item() for result in runs.run(STOCK, held_out=True)] == [3, 4, 5]
    assert seen == [0, 1, 2, 3, 4, 5]


def test_batches_that_are_random() -> None:
    def step() -> torch.Tensor:
        return torch.rand(4)

    with StepRuns(step, None, batches=2) as runs:
        first, again, other, other_again = (
            runs.run(STOCK, held_out=held_out) for held_out in (False, False, True, True)
        )
    for number in range(2):
        assert torch.equal(first[number]["output"], again[number]["output"])
        assert torch.equal(other[number]["output"], other_again[number]["output"])
        assert not torch.equal(first[number]["output"], other[number]["output"])
    assert not torch.equal(first[0]["output"], first[1]["output"])


class Numbered:
    def __call__(self, number: int) -> int:
        return number

    def method(self, number: int) -> int:
        return number

    @classmethod
    def of_class(cls, number: int = 5) -> int:
        return number


@pytest.mark.parametrize(
    ("step", "takes_number"),
    [
        (Numbered(), True),
        (Numbered().method, True),
        (Numbered.of_class, False),
        (functools.partial(lambda a, b: a + b, 1), True),
        (functools.partial(lambda a, b: a + b, 1, b=2), False),
        (lambda number=3: number, False),
        (lambda *numbers: 1, False),
        (lambda **names: 1, False),
        (float, False),
        (int, False),  # has no signature
    ],
)
def test_whether_the_step_takes_a_number(step: Any, takes_number: bool) -> None:
    with StepRuns(step, None) as runs:
        assert runs.takes_number is takes_number
        runs.run(STOCK)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": 5}, "step must be a function that runs a step and returns its loss, got 5"),
        ({"step": X}, "returns its loss, got a Tensor. Pass the function itself."),
        (
            {"restore": 5},
            "restore must be a tuple or list of objects that the step changes, got int. For one object, write restore=",
        ),
        ({"restore": X}, "got Tensor"),
        ({"step": lambda a, b: 1}, "but this one needs a, b. Bind its arguments, with functools.partial or a lambda"),
        ({"step": lambda *, a: 1}, "but this one needs a. Bind"),
        ({"model": "a model"}, "model must be an nn.Module, got 'a model'"),
        ({"batches": 0}, r"batches \(the number of times a run calls step\) must be 1 or more, got 0"),
        ({"batches": True}, "1 or more, got True"),
        ({"dtype": torch.float32}, "dtype must be torch.float16, torch.bfloat16 or None"),
    ],
)
def test_invalid_arguments(arguments: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        StepRuns(**{"step": product, "model": None, **arguments})


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda: None, "step() returned NoneType, in which there is no tensor or number to compare"),
        (lambda: {"name": "text"}, "step() returned dict, in which"),
        (lambda: (yield), "step() returned generator, in which"),
    ],
)
def test_a_step_that_returns_nothing_to_compare(step: Any, text: str) -> None:
    with StepRuns(step, None) as runs, pytest.raises(StepError) as error:
        runs.run(STOCK)
    assert text in str(error.value)


def test_an_iterator_that_ends() -> None:
    batches = iter([torch.ones(1), torch.ones(1)])
    with StepRuns(lambda: next(batches), None) as runs:
        assert runs.iterators == ["batches"]
        for _ in range(2):
            runs.run(STOCK)
        with pytest.raises(StepError, match=r"the end of an iterator \(batches\), which does not restart.*step\(i\)"):
            runs.run(STOCK)


def test_on_result_and_around() -> None:
    seen: list[Any] = []
    result = torch.ones(2)

    class Around:
        def __enter__(self) -> None:
            seen.append(torch.get_autocast_dtype("cpu"))

        def __exit__(self, *error: object) -> None:
            seen.append("end")

    with StepRuns(lambda: result, None, dtype=FLOAT16) as runs:
        [found] = runs.run(STOCK, around=Around(), on_result=lambda number, one: seen.append((number, one is result)))
    assert seen == [FLOAT16, (0, True), "end"]
    assert found["output"].data_ptr() != result.data_ptr()


# --- errors and interrupts


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_step_that_raises_in_the_middle(error: type[BaseException]) -> None:
    model = nn.Linear(2, 2)
    optimizer, fails = torch.optim.AdamW(model.parameters()), [True]
    weight = model.weight.detach().clone()

    def step() -> torch.Tensor:
        with torch.autocast("cpu"):
            loss = model(torch.rand(1, 2)).sum()
            loss.backward()
            optimizer.step()
            if fails[0]:
                raise error
        return loss

    random = torch.get_rng_state()
    with StepRuns(step, model) as runs:
        with pytest.raises(error):
            runs.run(STOCK)
        assert torch.equal(model.weight, weight)
        assert model.weight.grad is None
        assert not optimizer.state
        assert tp.default_policy() is None
        fails[0] = False
        runs.run(STOCK)
    assert torch.equal(model.weight, weight)
    assert torch.equal(torch.get_rng_state(), random)

    fails[0] = True
    with pytest.raises(error), StepRuns(step, model) as runs:
        runs.run(STOCK)
    assert torch.equal(model.weight, weight)


def test_a_step_that_leaves_a_region_open() -> None:
    regions = []

    def step() -> torch.Tensor:
        regions.append(tp.my_autocast("cpu"))
        regions[-1].__enter__()
        return X @ X

    with StepRuns(step, None) as runs:
        with pytest.raises(StepError, match=r"has left a region open\. Open regions with `with`"):
            runs.run(STOCK)
        regions.pop().__exit__(None, None, None)


@pytest.mark.parametrize("region", [tp.my_autocast, tp.stock_autocast])
def test_inside_of_a_region(region: Callable[[str], Any]) -> None:
    runs = StepRuns(product, None)
    with (
        region("cpu"),
        pytest.raises(RegionError, match="cannot begin inside of an open region: the step's"),
    ):
        runs.__enter__()
    with runs:
        with region("cpu"), pytest.raises(RegionError, match="cannot run inside of an open region"):
            runs.run(STOCK)
        assert dtype_of(runs, OFF) is FLOAT32


def test_two_at_once() -> None:
    found: list[str] = []

    def other() -> None:
        try:
            StepRuns(product, None).__enter__()
        except StepError as error:
            found.append(str(error))

    with StepRuns(product, None) as runs:
        other()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert dtype_of(runs, OFF) is FLOAT32
    assert len(found) == 2
    assert "compare() and tune() cannot be nested" in found[0]
    with pytest.raises(StepError, match="lazy parameters"):
        StepRuns(product, nn.LazyLinear(2)).__enter__()
    with runs:  # neither an error nor the end of a block leaves it locked
        assert dtype_of(runs, STOCK) is BFLOAT16
    with pytest.raises(StepError, match="outside of its with block"):
        runs.run(STOCK)


def test_state_that_the_step_changed_between_runs() -> None:
    model = nn.Linear(1, 1)
    with (
        pytest.raises(StepError, match=r"restore\[0\] differs"),
        StepRuns(lambda: 1.0, model, restore=[_Odd()]) as runs,
    ):
        runs.run(STOCK)


class _Odd:
    def __init__(self) -> None:
        self.reads = 0

    def state_dict(self) -> Any:
        self.reads += 1
        return {"reads": self.reads}

    def load_state_dict(self, state: Any) -> None:
        pass


# --- compiled steps


def test_compiled_functions_run_uncompiled_unless_asked_for() -> None:
    compiled_calls = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled_calls.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x @ x + 1, backend=backend)

    def step() -> torch.Tensor:
        with torch.autocast("cpu"):
            return compiled(X)

    torch._dynamo.reset()
    try:
        with StepRuns(step, None) as runs:
            eager = runs.run(STOCK)
            assert not compiled_calls
            verified = runs.run(STOCK, eager=False)
            assert compiled_calls
            assert dtype_of(runs, OFF) is FLOAT32
            assert dtype_of(runs, OFF, eager=False) is FLOAT32
        assert torch.equal(eager[0]["output"], verified[0]["output"])
        with StepRuns(step, None, eager=False) as runs:
            count = len(compiled_calls)
            assert dtype_of(runs, STOCK.override({"matmul": torch.float16}), eager=None) is FLOAT16
            assert len(compiled_calls) > count
    finally:
        torch._dynamo.reset()


def test_an_optimizer_whose_step_is_compiled() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = torch.compile(optimizer.step, backend="eager")
    weight = model.weight.detach().clone()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).sum()
        loss.backward()
        update()
        return loss

    try:
        with StepRuns(step, model, eager=False) as runs:
            losses = [runs.run(STOCK)[0]["loss"].item() for _ in range(3)]
        assert len(set(losses)) == 1
        assert torch.equal(model.weight, weight)
    finally:
        torch._dynamo.reset()
