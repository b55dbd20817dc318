"""A crosscheck keeps no tensors or graphs of its second run alive, and leaves no garbage cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)

import torch_promote as tp

ROUNDS = 4


def weight() -> torch.Tensor:
    return torch.randn(8, 8, requires_grad=True)


def with_its_result_saved(op: Callable[[torch.Tensor], torch.Tensor], backward: bool) -> Callable[[], object]:
    """A step through an op that saves its own result for backward."""
    w, x = weight(), torch.randn(4, 8)

    def step() -> None:
        result = op(F.linear(x, w))
        if backward:
            result.float().sum().backward()

    return step


def through_an_lstm(backward: bool) -> Callable[[], object]:
    lstm, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)

    def step() -> None:
        result = lstm(x)[0]
        if backward:
            result.float().sum().backward()

    return step


TARGETS = torch.tensor([0, 1, 2, 3])
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "cross_entropy": lambda x: F.cross_entropy(x, TARGETS),
    "exp": torch.exp,
    "norm": torch.norm,
}


def step_of(name: str, backward: bool) -> Callable[[], object]:
    return through_an_lstm(backward) if name == "lstm" else with_its_result_saved(OPS[name], backward)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def run(step: Callable[[], object], rounds: int = ROUNDS) -> None:
    for _ in range(rounds):
        with tp.my_autocast("cpu"):
            step()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [*OPS, "lstm"])
def test_no_tensor_outlives_its_round(name: str, backward: bool) -> None:
    step = step_of(name, backward)
    run(step, rounds=1)  # gradients are made once
    before = live_tensors()
    with tp.crosscheck(level="bits") as report:
        run(step)
        assert live_tensors() <= before  # garbage of others may go
    assert report.mismatches == []
    assert report.with_stock.total() >= ROUNDS
    assert live_tensors() <= before


class Mark:
    """Something that a node of the graph holds."""


class Marked(torch.autograd.Function):
    """The identity, with a node whose lifetime can be checked."""

    marks: ClassVar[weakref.WeakSet[Mark]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark = Mark()
        Marked.marks.add(ctx.mark)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_no_graph_outlives_its_result() -> None:
    x, w = torch.randn(4, 8), weight()
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
        for _ in range(ROUNDS):
            result = F.log_softmax(F.linear(x, Marked.apply(w)), 1)
        assert len(Marked.marks) == 1
        del result
        assert len(Marked.marks) == 0
    assert report.with_stock["aten.log_softmax.int"] == ROUNDS


@pytest.fixture
def saved_garbage() -> Iterator[list[Any]]:
    """The objects that the garbage collector finds, while automatic collections are off."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("name", ["softmax", "norm", "lstm"])
def test_a_call_leaves_no_garbage_cycles(name: str, saved_garbage: list[Any]) -> None:
    step = step_of(name, backward=False)
    with tp.crosscheck(level="bits") as report:
        run(step)  # what is made once is made
        gc.collect()
        saved_garbage.clear()
        run(step)
        gc.collect()
    assert [type(each).__name__ for each in saved_garbage] == []
    assert report.with_stock.total() >= 2 * ROUNDS
