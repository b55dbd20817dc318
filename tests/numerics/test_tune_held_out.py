"""`tune` where its result cannot be verified, or fails: on held-out batches, compiled, and in a resumed tuning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.overflowing_steps import Scaled, scaled
from helpers.planted_steps import planted_step, registered_meanwhile


@pytest.fixture(autouse=True)
def policies_of_ops() -> Iterator[None]:
    with registered_meanwhile():
        yield


@pytest.fixture
def written() -> Iterator[Any]:
    """An op that writes float32 numbers to a float16 tensor. Its policy casts them first, and fp32 is not legal."""

    def kernel(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return out.copy_(x / 1e6)

    with torch.library._scoped_library("tuned_held_out", "DEF") as library:
        library.define("written_(Tensor(a!) out, Tensor x) -> Tensor(a!)")
        library.impl("written_", kernel, "CompositeExplicitAutograd")
        with tp.register_policy("tuned_held_out::written_", "match_self"):
            yield torch.ops.tuned_held_out.written_


def overflow(op: Any) -> torch.Tensor:
    out = torch.zeros(4, dtype=torch.float16)
    with torch.no_grad():
        return op(out, torch.full((4,), 1e6)).float().mean()  # type: ignore[no-any-return]


def test_an_op_that_no_override_reaches(written: Any) -> None:
    model = nn.Linear(2, 2)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return overflow(written)

    with pytest.raises(
        tp.errors.Fp32FailsError, match=r"no op that can get an override .* Not among them: tuned_held_out::w"
    ):
        tp.tune(step, model=model, tolerance=0.1)


def test_held_out_batches_that_float32_does_not_cure(written: Any) -> None:
    """The result is that of the batches that it does."""
    model, step = scaled()

    def numbered(number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            more = overflow(written) if number else torch.zeros(())
        return step() + more

    tuning = tp.tune(numbered, model=model, tolerance=0.01)
    assert not tuning.met
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert tuning.errors["loss"] <= 0.01
    assert tuning.certificate.kind == "minimum"
    assert tuning.certificate.held_out is not None
    assert tuning.certificate.held_out["loss"] > 0.01
    assert any("Held-out batches do not meet the tolerance" in note for note in tuning.notes)
    assert not any("became part of the tuning" in note for note in tuning.notes)


@pytest.mark.parametrize(
    ("raises", "why"),
    [
        (True, "the reference raised IndexError: 1 there."),
        (False, "the step gives the same results for the next numbers."),
    ],
)
def test_there_may_be_no_other_batches(raises: bool, why: str) -> None:
    model = Scaled()

    def step(number: int) -> torch.Tensor:
        if raises and number > 0:
            raise IndexError(number)
        with torch.autocast("cpu", torch.float16):
            return model(torch.ones(2, 4))

    tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.met
    assert tuning.certificate.held_out is None
    assert f"There are no held-out batches: {why}" in tuning.certificate.text


def test_a_step_that_returns_other_names_under_an_override_fails_there() -> None:
    """As a step that returns more for results in float32."""
    model, _ = scaled()

    def step() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.float16):
            far = model.linear(torch.ones(2, 4) + 0.1 * torch.randn(2, 4)) * 1e6
            found = {"loss": model.head(torch.tanh(far * 1e-6)).square().mean()}
            is_low = model.head(torch.ones(1, 4)).dtype is torch.float16
        return {**found, "far": far} if far.dtype is torch.float32 and is_low else found

    tuning = tp.tune(step, model=model, tolerance=0.01)
    failed = [trial for trial in tuning.trials if trial.error]
    assert failed
    assert all(trial.error.startswith("StepError: ") and not trial.passed for trial in failed)


def test_a_compiled_step_that_computes_something_else() -> None:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        return lambda *args: [2 * one for one in graph(*args)]

    model, _ = scaled()
    compiled = torch.compile(model, backend=backend)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return compiled(torch.ones(2, 4) + 0.1 * torch.randn(2, 4))

    tuning = tp.tune(step, model=model, tolerance=0.01)
    assert not tuning.met
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert tuning.certificate.compiled == {"loss": pytest.approx(1.0, abs=0.01)}
    assert tuning.certificate.text.endswith("The compiled step does not meet the tolerance.")
    assert any("does not meet the tolerance compiled: loss 1" in note for note in tuning.notes)


# --- resumed


class Killed(BaseException):
    pass


def test_a_smaller_budget_leaves_nothing_for_held_out_batches(tmp_path: Path) -> None:
    step = planted_step(8, 2, seed=71)
    whole = tp.tune(step, model=step.model, tolerance=0.04)
    total, step.count = step.count, 0

    def killed(number: int) -> torch.Tensor:
        if step.count == total - 2:  # the last two are those of held-out batches
            raise Killed
        return step(number)

    with pytest.raises(Killed):
        tp.tune(killed, model=step.model, tolerance=0.04, resume=tmp_path / "file.json")
    again = tp.tune(step, model=step.model, tolerance=0.04, resume=tmp_path / "file.json", budget=total - 2)
    assert (again.overrides, again.met) == (whole.overrides, True)
    assert again.certificate.held_out is None
    assert again.certificate.text.endswith("The budget left no run for held-out batches.")


def test_held_out_batches_that_failed_become_part_of_a_resumed_tuning(tmp_path: Path) -> None:
    model, _ = scaled()

    def step(number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            y = model.linear(torch.full((2, 4), 1.0 + number))
            return (y * 1e6).float().square().mean() + (y / 1e-6 if number else y).float().square().mean()

    def tune(budget: int) -> tp.Tuning:
        return tp.tune(step, model=model, tolerance=0.01, resume=tmp_path / "file.json", budget=budget)

    first = tune(8)
    assert (first.met, list(first.overrides)) == (False, ["aten::mul"])
    again = tune(60)
    assert (again.met, list(again.overrides)) == (True, ["aten::linear"])
    assert any("became part of the tuning" in note for note in again.notes)


@pytest.mark.parametrize(("more", "refused"), [(0.0, False), (1e-3, True)])
def test_a_resumed_step_with_noise_may_differ_by_it(tmp_path: Path, more: float, refused: bool) -> None:
    torch.manual_seed(0)
    model = Scaled()
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        count += 1
        with torch.autocast("cpu", torch.float16):
            return model(torch.ones(2, 4)) * (1 + 1e-6 * (count % 3))

    def tune() -> tp.Tuning:
        return tp.tune(step, model=model, tolerance=0.01, resume=tmp_path / "file.json")

    first = tune()
    assert first.noise_floor["loss"] > 0
    torch.manual_seed(1)  # a state that the step does not read
    with torch.no_grad():
        model.head.weight.mul_(1 + more)
    count = 1
    if refused:
        with pytest.raises(tp.errors.OptionError, match="the step gives other results than when the file"):
            tune()
    else:
        assert tune().overrides == first.overrides
