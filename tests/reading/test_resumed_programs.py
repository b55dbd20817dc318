"""`tp.diff` of a run that is recorded with `--steps N:`, and of a new process that goes on from its checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_promote.observe.places import RunningModules
from torch_promote.reading.difference import Difference
from torch_promote.reading.trace import Tracer
from torch_promote.reading.trace_report import TraceReport

FIRST = 3
Checkpoint = dict[str, Any]
#: A training from a step on. It yields after each step of its optimizer, and saves what it saves.
Training = Callable[[int, Checkpoint], Iterator[None]]


def recorded(training: Training, start: int, saved: Checkpoint) -> TraceReport:
    """The steps from `FIRST` on, as `torch-promote trace --steps` records them; or a new process, all of it."""
    torch.manual_seed(0)
    modules = RunningModules()
    window = "" if start else f"{FIRST}:"
    tracer = Tracer(None, True, False, 50_000, None, window, modules=modules)
    if window:
        modules.watch_for_the_first()
    steps = training(start, saved)
    for _ in range(FIRST if window else 0):
        next(steps)
    with tracer as report:
        for _ in steps:
            pass
    return report


def difference(training: Training) -> Difference:
    saved: Checkpoint = {}
    return recorded(training, 0, saved).diff(recorded(training, FIRST, saved))


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def averaging(forgets: bool) -> Training:
    """An average of the weights whose warm-up counts updates, and which is tried on data after each step."""

    def training(start: int, saved: Checkpoint) -> Iterator[None]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        average = copy.deepcopy(model)
        updates = 0
        if start:
            for one, name in ((model, "model"), (optimizer, "optimizer"), (average, "average")):
                one.load_state_dict(saved[name])
            updates = 0 if forgets else start
        for step in range(start, FIRST + 3):
            x, y = data(step)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield
            optimizer.zero_grad()
            updates += 1
            decay = 1 - math.exp(-updates / 8)
            with torch.no_grad():
                for one, other in zip(average.parameters(), model.parameters(), strict=True):
                    one.mul_(decay).add_(other, alpha=1 - decay)
                average(torch.ones(9, 8)).square().mean().item()
            if step == FIRST - 1 and not start:
                parts = {"model": model, "optimizer": optimizer, "average": average}
                saved.update({name: copy.deepcopy(one.state_dict()) for name, one in parts.items()})

    return training


def sampling(epoch_is_kept: bool) -> Training:
    """A sampler that starts anew, of a program that prints its loss behind each step."""

    def training(start: int, saved: Checkpoint) -> Iterator[None]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if start:
            model.load_state_dict(saved["model"])
        rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(9))
        torch.empty((), dtype=torch.int64).random_().item()  # as a DataLoader draws its seed
        order = torch.randperm(60, generator=torch.Generator().manual_seed(0 if epoch_is_kept else start)).tolist()
        for step in range(start, FIRST + 3):
            x = torch.stack([rows[i] for i in order[6 * step : 6 * step + 6]])
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            yield
            optimizer.zero_grad()
            loss.item()
            if step == FIRST - 1 and not start:
                saved["model"] = copy.deepcopy(model.state_dict())

    return training


def scaling(is_loaded: bool, first_batch: int = FIRST) -> Training:
    """A GradScaler that may not be in the checkpoint, so that all steps of the new process are skipped."""

    def training(start: int, saved: Checkpoint) -> Iterator[None]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60 if start else 4.0)
        if start:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            if is_loaded:
                scaler.load_state_dict(saved["scaler"])
        for step in range(start, FIRST + 3):
            x, y = data(first_batch if start and step == start else step)
            with torch.autocast("cpu", torch.float16):
                loss = functional.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            yield
            scaler.update()
            optimizer.zero_grad()
            if step == FIRST - 1 and not start:
                parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
                saved.update({name: copy.deepcopy(one.state_dict()) for name, one in parts.items()})

    return training


@pytest.mark.parametrize(
    "training", [averaging(False), sampling(True), scaling(True)], ids=["average", "rows", "scaler"]
)
def test_a_right_resume_is_equal(training: Training) -> None:
    found = difference(training)
    assert found.equal, str(found)
    assert (found.only_in_a, found.unmatched) == ([], 0)
    assert {one.op for one in found.only_in_b} <= {"aten::full"}  # the scale that GradScaler makes at its first use
    assert found.compared > 60


def test_a_number_of_an_average_is_the_cause_and_no_state_of_the_optimizer_is_missing() -> None:
    """The average runs first in the recording that starts behind a step, and second in the other one."""
    found = difference(averaging(True))
    decays = [1 - math.exp(-updates / 8) for updates in (FIRST + 1, 1)]
    assert found.arguments == {"other": tuple(decays)}, str(found)
    assert found.first is not None
    assert (found.kind, found.first.op) == ("arguments", "aten::mul_")
    assert {one.kind for one in found.facts} == {"arguments"}, str(found)
    assert [one.parameters for one in found.steps] == [0.0] * 3


def test_other_rows_are_the_cause_and_no_number_that_was_printed() -> None:
    found = difference(sampling(False))
    assert found.first is not None
    assert (found.kind, found.first.op, *found.arguments) == ("arguments", "aten::select", "index"), str(found)
    assert "aten::item" not in str(found)
    assert "relative L2 0)" not in str(found)
    assert not any(what == "inputs" for _, _, what, *_ in found.changes)


def test_skipped_steps_are_steps_and_the_scale_is_the_cause() -> None:
    found = difference(scaling(False))
    assert found.kind == "state", str(found)
    assert "scale of GradScaler" in found.state
    assert f"scale of GradScaler is 4 in A and {2.0**60:g} in B" in found.facts[0].text
    assert len(found.steps) == 3  # B's were skipped
    assert not any(one and other and one.op == "aten::full" for one, other, *_ in found.changes), (
        "of the scale, of what counts its steps, of inf"
    )
    assert not any(one.kind == "structure" and one.step == 0 and "aten::mul" in one.text for one in found.facts)


def test_what_the_first_step_alone_calls_does_not_hide_its_forward() -> None:
    """GradScaler makes its scale behind the first forward."""
    found = difference(scaling(True, first_batch=9))
    assert found.first is not None
    assert (found.kind, found.first.op) == ("input", "aten::randn"), str(found)


def test_a_window_without_a_common_step_is_compared_as_a_whole() -> None:
    """With one step in the new process, nothing tells its set-up from the end of a step."""

    def training(start: int, saved: Checkpoint) -> Iterator[None]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(FIRST + 1):
            if step >= start:
                model(data(step)[0]).square().mean().backward()
                optimizer.step()
                yield
                optimizer.zero_grad()

    found = difference(training)
    assert found.kind == "weight", str(found)


@pytest.mark.parametrize("generator_is_kept", [True, False])
def test_the_two_programs_may_stand_in_two_files(generator_is_kept: bool) -> None:
    """Autograd's own calls have no line, and are no sign of where a step begins."""

    def training(start: int, saved: Checkpoint) -> Iterator[None]:
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 3, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if start:
            model.load_state_dict(saved["model"])
            if generator_is_kept:
                torch.set_rng_state(saved["generator"])
        for step in range(start, FIRST + 3):
            loss = model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield
            if step == FIRST - 1 and not start:
                saved["model"] = copy.deepcopy(model.state_dict())
                saved["generator"] = torch.get_rng_state()

    saved: Checkpoint = {}
    whole = recorded(training, 0, saved)
    training.__code__ = training.__code__.replace(co_filename="resumed.py")
    found = whole.diff(recorded(training, FIRST, saved))
    assert (found.only_in_a, found.only_in_b) == ([], []), str(found)
    assert found.equal == generator_is_kept, str(found)
    if not generator_is_kept:
        assert [(one.kind, one.text[:22]) for one in found.facts] == [("input", "aten::dropout in 2 dra")], str(found)
