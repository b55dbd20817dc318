"""The state that StepState finds in a step, state that the caller lists, generators, and global modes."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote.errors import OptionError, StepError
from torch_promote.numerics.step_state import StepState, found_in, iterators_in


@pytest.fixture(autouse=True)
def global_generators() -> Iterator[None]:
    python, of_numpy = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(python)
    numpy.random.set_state(of_numpy)


MODEL = nn.Linear(2, 2)
GENERATOR = torch.Generator()


def helper() -> Any:
    return MODEL(torch.rand(1, 2, generator=GENERATOR))


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def __call__(self) -> None:
        self.step()


def test_where_it_looks() -> None:
    trainer, schedules = Trainer(), [random.Random(0), numpy.random.default_rng(0)]
    loader = torch.utils.data.DataLoader([1], generator=GENERATOR)

    def names(step: Any) -> list[str]:
        return sorted(name for name, _ in found_in(step))

    assert names(lambda: MODEL) == ["MODEL"]
    assert names(helper) == ["GENERATOR", "MODEL"]
    assert names(lambda: helper()) == ["GENERATOR", "MODEL"]
    assert names(lambda: [MODEL for _ in range(2)]) == ["MODEL"]
    assert names(trainer.step) == ["self.model"]
    assert names(trainer) == ["self.model"]
    assert names(lambda: trainer.step()) == ["trainer.model"]
    assert names(functools.partial(print, MODEL, end=GENERATOR)) == ["argument 0", "end"]
    assert names(lambda: schedules) == ["schedules[0]", "schedules[1]"]
    assert "loader.generator" in names(lambda: next(iter(loader)))
    assert names(print) == []
    assert names(lambda: never) == []
    never = 1


def test_iterators_it_finds() -> None:
    batches, rows = iter([1]), [1]
    assert iterators_in(lambda: (next(batches), rows)) == ["batches"]
    assert iterators_in(lambda: rows) == []


def test_generators() -> None:
    one, other, of_numpy = torch.Generator(), random.Random(0), numpy.random.default_rng(0)
    of_numpy_too = numpy.random.RandomState(0)

    def step() -> list[float]:
        found = [torch.rand(1, generator=one).item(), other.random(), of_numpy.random(), of_numpy_too.rand()]
        return [*found, random.random(), numpy.random.rand(), torch.rand(1).item()]

    state = StepState(None, step=step)
    first = step()
    state.restore()
    state.check()
    assert step() == first
    state.restore()
    state.use_other_random_numbers()
    held_out = step()
    assert not set(held_out) & set(first)
    state.restore()
    state.use_other_random_numbers()
    assert step() == held_out
    state.restore()
    assert step() == first


def test_what_the_caller_lists() -> None:
    class Loader:
        position = 0

        def state_dict(self) -> Any:
            return {"position": self.position}

        def load_state_dict(self, state: Any) -> None:
            self.position = state["position"]

    averages, loader, log, names = {"weight": torch.zeros(2)}, Loader(), [1], {"a"}
    array, tensor = numpy.zeros(2), torch.zeros(2)
    shadow = averages["weight"]
    state = StepState(None, [averages, loader, log, array, tensor, names])
    hashes = state.hashes()
    for _ in range(2):
        averages["weight"].add_(1)
        averages["bias"] = torch.ones(1)
        loader.position, array[0] = 7, 1
        tensor.add_(1)
        log.append(2)
        names.add("b")
        assert [name for name, now in state.hashes().items() if now != hashes[name]] == [
            f"restore[{number}]" for number in range(6)
        ]
        state.restore()
        state.check()
        assert (averages, names) == ({"weight": shadow}, {"a"})
        assert (shadow.tolist(), loader.position, log, array.tolist()) == ([0, 0], 0, [1], [0, 0])
        assert tensor.tolist() == [0, 0]


def test_what_it_cannot_restore() -> None:
    with pytest.raises(OptionError, match=r"restore\[1\] is a int, whose state cannot be restored. Legal: modules"):
        StepState(None, [nn.Linear(1, 1), 5])
    with pytest.raises(OptionError, match=r"restore\[0\] is a type, whose state cannot be restored."):
        StepState(None, [nn.Linear])  # which has the functions state_dict and load_state_dict


def test_a_state_that_cannot_be_restored_is_an_error() -> None:
    class Forgetful:
        steps = 0

        def state_dict(self) -> Any:
            return {"steps": self.steps}

        def load_state_dict(self, state: Any) -> None:
            pass

    one = Forgetful()
    state = StepState(None, [one])
    one.steps = 1
    state.restore()
    with pytest.raises(StepError, match=r"could not be restored: restore\[0\] differs. Pass the changed objects"):
        state.check()


def test_modes_of_the_process() -> None:
    state, dtype = StepState(None), torch.get_autocast_dtype("cpu")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_autocast_dtype("cpu", torch.float16)
    state.restore()
    assert torch.is_grad_enabled()
    assert (torch.get_default_dtype(), torch.get_autocast_dtype("cpu")) == (torch.float32, dtype)
    state.check()


def test_a_restored_weight_is_cast_again() -> None:
    weight = nn.Linear(2, 2, bias=False)
    state = StepState(weight)
    region = tp.my_autocast("cpu", cache="persistent")
    try:
        with region, torch.no_grad():
            first = weight(torch.ones(1, 2))
            weight.weight.add_(1)
            assert not torch.equal(weight(torch.ones(1, 2)), first)
        state.restore()
        with region, torch.no_grad():
            assert torch.equal(weight(torch.ones(1, 2)), first)
            weight.weight.data = torch.zeros(2, 2)
            weight(torch.ones(1, 2))
        state.restore()
        with region, torch.no_grad():
            assert torch.equal(weight(torch.ones(1, 2)), first)
    finally:
        tp.clear_cache()
