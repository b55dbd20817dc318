"""`compare` and steps whose calls fail or differ: in one run only, or when they are run alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.counted_collectives import counted_collective
from helpers.planted_sites import INPUTS, Cancels, by_place, chain, half, step_of
from torch_promote.numerics import compare as rounds
from torch_promote.numerics.call_observers import CallKey, ForwardCalls
from torch_promote.observe.dispatch import observe_dispatch
from torch_promote.observe.places import RunningModules


@torch.library.custom_op("failing_calls::needs_grad", mutates_args=())
def needs_grad(x: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        raise ValueError("not like this")
    return x * 2


@torch.library.custom_op("failing_calls::of_size", mutates_args=())
def of_size(x: torch.Tensor) -> torch.Tensor:
    """Its shape depends on the dtype."""
    return x.sum(1) if x.dtype is torch.float32 else x.sum()


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with (
        tp.register_policy("failing_calls::needs_grad", "lower_precision_fp"),
        tp.register_policy("failing_calls::of_size", "lower_precision_fp"),
    ):
        yield


@pytest.mark.parametrize(
    ("op", "why"),
    [(needs_grad, "ValueError: not like this"), (of_size, "the shapes of its results differ in these dtypes")],
)
def test_a_call_that_cannot_be_run_alone_is_named(op: Any, why: str) -> None:
    model = chain(0, 2, {})

    def step() -> torch.Tensor:
        with half():
            found = model(INPUTS)
            with torch.enable_grad():
                return found.float().mean() + op(found.detach()).float().mean()  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model)
    name = op._opoverload._schema.name
    assert f"{name} was not run alone: {why}. Its local error is unknown." in comparison.notes
    site = by_place(comparison)["", name]
    assert (site.local, site.impact) == (0.0, None)
    assert by_place(comparison)["0", "aten::linear"].impact


def test_a_step_that_cannot_be_recorded_has_errors_and_no_impacts() -> None:
    """In-place ops: what the layer before returns is a leaf, because the layer has no trainable weights."""
    model = chain(0, 2, {1: Cancels()})
    model.insert(1, nn.ReLU(inplace=True))
    model.requires_grad_(False)

    def step() -> torch.Tensor:
        with torch.no_grad(), half():
            return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model)
    [note] = comparison.notes
    assert note.startswith("The impacts are unknown: the step fails when its calls are recorded for a backward: a leaf")
    assert comparison.runs == 4
    assert {site.impact for site in comparison.sites} == {None}
    assert comparison.sites[0].op == "planted_sites::cancel"


def test_a_call_that_raises_leaves_gradients_off_where_the_step_has_none() -> None:
    model, seen = chain(0, 2, {}), []

    def step() -> torch.Tensor:
        with torch.no_grad(), half():
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                torch.mm(INPUTS, INPUTS)
            seen.append(torch.is_grad_enabled())
            return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model)
    assert seen == [False] * comparison.runs
    assert by_place(comparison)["0", "aten::linear"].impact


def test_an_error_of_one_run_of_the_reference_is_the_steps() -> None:
    model, calls = chain(0, 2, {}), iter(range(100))

    def step() -> torch.Tensor:
        if next(calls) == 2:
            raise RuntimeError("mine")
        return step_of(model)()

    with pytest.raises(RuntimeError, match="mine"):
        tp.compare(step, model=model)


def test_collectives_are_not_compared_and_not_run_alone() -> None:
    """Every rank has to make as many calls of them."""
    model = chain(0, 2, {})

    def step() -> torch.Tensor:
        with half():
            return (model(INPUTS).square().mean() + op(model(INPUTS).detach()).mean()).float()  # type: ignore[no-any-return]

    with counted_collective() as (op, calls):
        comparison = tp.compare(step, model=model)
        assert len(calls) == comparison.runs == 3
    assert by_place(comparison)["0", "aten::linear"].impact
    assert not [site for site in comparison.sites if "counted" in site.op]
    assert comparison.notes == comparison.not_aligned == []


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (0, r"aten::exp in the model, call 1, was made only in the first run"),
        (2, r"aten::exp in the model, call 1, was made only in the second run"),
    ],
)
def test_a_call_of_one_run_of_the_reference_is_named(run: int, text: str) -> None:
    model, calls = chain(0, 2, {}), iter(range(100))

    def step() -> torch.Tensor:
        with half():
            found = model(INPUTS).float().mean()
            return found.exp() if next(calls) == run else found  # type: ignore[no-any-return]

    with pytest.raises(tp.errors.StepError, match=rf"differ in loss by .* What differed first: {text}\."):
        tp.compare(step, model=model)


class Once(torch.autograd.Function):
    """Its backward works once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.has_run = False
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if ctx.has_run:
            raise RuntimeError("a second time")
        ctx.has_run = True
        return gradient


def test_outputs_whose_backward_works_once_have_one_random_direction() -> None:
    model = chain(0, 2, {1: Cancels()})

    def step(once: bool) -> torch.Tensor:
        with half():
            return Once.apply(model(INPUTS)) if once else model(INPUTS)  # type: ignore[no-any-return, no-untyped-call]

    comparison = tp.compare(lambda: step(True), model=model)
    assert comparison.random_cotangents
    assert comparison.notes == []
    assert comparison.sites[0].op == "planted_sites::cancel"
    often = by_place(tp.compare(lambda: step(False), model=model))
    for place, site in by_place(comparison).items():
        assert site.impact == pytest.approx(often[place].impact, rel=0.5)


def test_random_gradients_replace_those_of_outputs_that_have_any() -> None:
    """A model may also return numbers of other kinds, which stay the objects that they are."""
    counts = torch.arange(3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = chain(2, 4, {1: Cancels()})

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
            return self.inner(x), counts, 3

    model = Model()
    target = model(INPUTS)[0].detach()

    def step() -> torch.Tensor:
        with half():
            outputs, same, number = model(INPUTS)
        assert same is counts
        assert number == 3
        return nn.functional.mse_loss(outputs.float(), target)

    comparison = tp.compare(step, model=model)
    assert comparison.random_cotangents
    assert comparison.sites[0].op == "planted_sites::cancel"


def test_an_interrupt_before_a_call_leaves_no_call_open() -> None:
    names: list[str] = []

    class Interrupted(ForwardCalls):
        def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> None:
            names.append(key.name)
            if len(names) == 1:
                raise KeyboardInterrupt

    with observe_dispatch(Interrupted(RunningModules(nn.Module()))):
        with pytest.raises(KeyboardInterrupt):
            torch.exp(INPUTS)
        torch.sin(INPUTS)
    assert names == ["aten::exp", "aten::sin"]


def test_where_the_system_does_not_say_how_much_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysconf(name: str) -> int:
        raise ValueError(f"unrecognized configuration name: {name}")

    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 20)
    assert rounds._room() == 1 << 38
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert rounds._room() == 256 << 20
