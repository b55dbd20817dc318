"""`tune`: judging, budget, restored state, and the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.overflowing_steps import scaled
from helpers.planted_steps import Calls, Planted, make_op, planted_step, registered_meanwhile
from torch_promote.numerics.tuning.tuning import Trial


@pytest.fixture(autouse=True)
def policies_of_ops() -> Iterator[None]:
    with registered_meanwhile():
        yield


# --- budget


@pytest.mark.parametrize("budget", [6, 7, 10, 60])
def test_no_budget_is_exceeded_and_a_set_that_passed_is_returned(budget: int) -> None:
    step = planted_step(8, 2, seed=21)
    tuning = tp.tune(step, model=step.model, tolerance=0.04, budget=budget, batches=2)
    assert step.count <= 2 * budget
    assert tuning.runs <= budget
    assert step.count == 2 * tuning.runs
    assert isinstance(step.model, Planted)
    assert tuning.met
    assert set(tuning.overrides) >= step.model.planted
    assert tuning.certificate.held_out is not None
    if budget == 6:
        assert len(tuning.overrides) == 9
        assert tuning.certificate.kind == "passes"
        assert "budget of 6 runs was exhausted" in tuning.certificate.text
    if budget == 60:
        assert set(tuning.overrides) == step.model.planted


# --- what is judged


def test_metrics_by_name_and_their_own_tolerances() -> None:
    model, _ = scaled()

    def step() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.float16):
            y = model.linear(torch.ones(2, 4))
            return {"loss": y.square().mean(), "far": y * 1e6}

    tuning = tp.tune(step, model=model, tolerance={"far": 0.01})
    assert tuning.tolerance == {"far": 0.01}
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert set(tuning.errors) == {"loss", "far"}
    with pytest.raises(tp.errors.NothingToTuneError):
        tp.tune(step, model=model, tolerance={"loss": 0.01})
    with pytest.raises(tp.errors.NothingToTuneError):
        tp.tune(step, model=model, tolerance=0.01, metric="loss")
    assert tp.tune(step, model=model, tolerance=0.01, metric="far").tolerance == {"far": 0.01}


def test_a_function_as_metric() -> None:
    model, step = scaled()
    results = []

    def twice(result: Any) -> torch.Tensor:
        results.append(result)
        return 2 * result

    tuning = tp.tune(step, model=model, tolerance=0.01, metric=twice)
    assert tuning.tolerance == {"twice": 0.01}
    assert len(results) == tuning.runs
    assert tp.tune(step, model=model, tolerance={"mine": 0.01}, metric=lambda loss: loss).tolerance == {"mine": 0.01}
    assert tp.tune(step, model=model, tolerance=0.01, metric=lambda loss: loss).tolerance == {"metric": 0.01}


def test_check_has_to_agree() -> None:
    model, _ = scaled()

    def step() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.float16):
            y = model.linear(torch.ones(2, 4))
            return {"loss": y.square().mean(), "far": y * 1e6}

    def check(result: dict[str, torch.Tensor]) -> bool:
        return bool(result["far"].isfinite().all())

    tuning = tp.tune(step, model=model, tolerance={"loss": 0.5}, check=check)
    assert tuning.overrides == {"aten::mul": "fp32"}
    with pytest.raises(tp.errors.Fp32FailsError, match="check returns false for the result of step"):
        tp.tune(step, model=model, tolerance={"loss": 0.5}, check=lambda result: False)


def test_all_batches_are_judged() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def step(number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return (model(torch.ones(1, 4)) * (1e6 if number == 2 else 1.0)).square().mean()

    with pytest.raises(tp.errors.NothingToTuneError):
        tp.tune(step, model=model, tolerance=0.01, batches=2)
    tuning = tp.tune(step, model=model, tolerance=0.01, batches=3)
    assert tuning.overrides == {"aten::mul": "fp32"}


# --- held-out batches


class Growing:
    """A step whose batch 0 needs one override, batch 1 two, and later batches three."""

    def __init__(self, namespace: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8)
        self.names = [f"{namespace}::op{number}" for number in range(3)]
        self._ops = [make_op(name, planted=True) for name in self.names]
        self.count = 0

    def __call__(self, number: int) -> torch.Tensor:
        self.count += 1
        with torch.autocast("cpu"):
            y = self.model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
            results = [op(y if index <= number else torch.zeros(4, 8)) for index, op in enumerate(self._ops)]
            return torch.stack([one.float().square().mean() for one in results]).sum()


def test_held_out_batches_that_fail_are_reported() -> None:
    step = Growing("reported")
    tuning = tp.tune(step, model=step.model, tolerance=0.01, budget=10)
    assert not tuning.met
    assert tuning.overrides == {step.names[0]: "fp32"}
    assert tuning.certificate.held_out is not None
    assert tuning.certificate.held_out["loss"] > 0.1
    assert "does not meet the tolerance" in tuning.certificate.text
    assert any("Tune with more batches" in note for note in tuning.notes)


@pytest.mark.parametrize("level", ["op", "site"])
def test_held_out_batches_that_fail_become_part_of_the_tuning(level: Any) -> None:
    step = Growing(f"growing_{level}")
    tuning = tp.tune(step, model=step.model, tolerance=0.01, level=level)
    assert tuning.met
    assert set(tuning.overrides if level == "op" else tuning.overrides[""]) == set(step.names)
    assert step.count == tuning.runs <= 60
    assert len([note for note in tuning.notes if "became part of the tuning" in note]) == 2
    assert tuning.certificate.held_out is not None
    assert tuning.certificate.held_out["loss"] <= 0.01
    assert tuning.certificate.kind in ("minimum", "1-minimal")


@pytest.mark.parametrize("budget", [6, 12, 18, 25])
def test_no_budget_is_exceeded_with_batches_that_become_part_of_the_tuning(budget: int) -> None:
    step = Growing(f"growing_{budget}")
    tuning = tp.tune(step, model=step.model, tolerance=0.01, budget=budget)
    assert step.count <= budget
    assert step.names[0] in tuning.overrides
    assert tuning.certificate.held_out is not None
    assert tuning.met == (tuning.certificate.held_out["loss"] <= 0.01)


def test_a_step_without_other_batches_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return (model(torch.ones(1, 4)) * 1e6).square().mean()

    tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.met
    assert tuning.certificate.held_out is None
    assert "There are no held-out batches" in tuning.certificate.text


def test_other_random_numbers_are_held_out() -> None:
    model, step = scaled()
    tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.certificate.held_out is not None
    assert tuning.certificate.held_out != tuning.errors


# --- the rest


def test_a_step_that_raises_under_an_override_is_a_failed_trial() -> None:
    model, _ = scaled()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            far = model.linear(torch.ones(2, 4) + 0.1 * torch.randn(2, 4)) * 1e6
            if far.dtype is torch.float32 and model.head(torch.ones(1, 4)).dtype is torch.float16 and _regions_cast():
                raise TypeError("far and head differ")
            return model.head(torch.tanh(far * 1e-6)).square().mean()

    tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.met
    assert set(tuning.overrides) >= {"aten::linear"}
    raised = [trial for trial in tuning.trials if trial.error]
    assert raised
    assert all("TypeError: far and head differ" in trial.error and not trial.passed for trial in raised)


def _regions_cast() -> bool:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16


def test_ctrl_c_returns_what_is_known() -> None:
    for last in (5, 9):
        step = planted_step(5, 2, seed=33)
        state = {name: value.clone() for name, value in step.model.state_dict().items()}
        calls = iter(range(1000))

        def interrupted(
            number: int, step: Calls = step, calls: Iterator[int] = calls, last: int = last
        ) -> torch.Tensor:
            if next(calls) == last:
                raise KeyboardInterrupt
            return step(number)

        tuning = tp.tune(interrupted, model=step.model, tolerance=0.04)
        assert tuning.interrupted
        assert "interrupted" in tuning.certificate.text
        assert isinstance(step.model, Planted)
        assert set(tuning.overrides) >= step.model.planted
        assert tuning.policy != tp.Policy.stock()
        assert all(torch.equal(value, state[name]) for name, value in step.model.state_dict().items())


def test_ctrl_c_before_anything_is_known() -> None:
    model, step = scaled()
    calls = iter(range(100))

    def interrupted(last: int) -> torch.Tensor:
        if next(calls) == last:
            raise KeyboardInterrupt
        return step()

    with pytest.raises(KeyboardInterrupt):
        tp.tune(lambda: interrupted(1), model=model, tolerance=0.04)
    calls = iter(range(100))
    tuning = tp.tune(lambda: interrupted(3), model=model, tolerance=0.04)
    assert tuning.interrupted
    assert not tuning.met
    assert tuning.overrides == {}
    assert tuning.policy == tp.Policy.stock()


def test_overrides_come_on_top_of_the_policy_in_force() -> None:
    model, step = scaled()
    present = tp.Policy.stock().override({"tanh": "fp32"}).override_modules({"head": {"linear": "fp32"}})
    with present.apply_to(model), tp.installed_as(policy=present):
        tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert tuning.policy == present.override({"aten::mul": "fp32"})


def test_a_table_of_the_policy_gives_way_to_an_override() -> None:
    model, step = scaled()
    present = tp.Policy.stock().override_modules({"*": {"mul": "fp16"}, "": {"mul": "fp16"}})
    with present.apply_to(model), tp.installed_as(policy=present):
        tuning = tp.tune(step, model=model, tolerance=0.01)
    assert tuning.met
    assert dict(tuning.policy.modules)[""] != dict(present.modules)[""]


def test_training_steps_are_tuned_and_leave_no_trace() -> None:
    model, _ = scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(2, 4) + 0.1 * torch.randn(2, 4))
        loss.backward()
        optimizer.step()
        return loss

    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_numbers = torch.get_rng_state()
    tuning = tp.tune(step, model=model, tolerance=0.05, batches=3)
    assert tuning.met
    assert "aten::mul" in tuning.overrides
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert not optimizer.state


def test_predictions_are_beside_what_was_measured() -> None:
    step = planted_step(8, 2, seed=41)
    tuning = tp.tune(step, model=step.model, tolerance=0.04)
    by_names = {names: (predicted, measured) for names, predicted, measured in tuning.predicted_against_measured}
    none, everything = by_names[()], by_names[max(by_names, key=len)]
    assert everything[0] == 0.0
    assert none[0] > 0.05
    assert none[1] > 0.05
    assert isinstance(tuning.trials[0], Trial)
    assert {trial.why for trial in tuning.trials} >= {"gate", "prefix", "held out"}


def test_the_dtype_of_regions() -> None:
    model, _ = scaled()

    def step() -> torch.Tensor:
        with torch.autocast("cpu"):
            return model(torch.ones(2, 4))

    with pytest.raises(tp.errors.NothingToTuneError):
        tp.tune(step, model=model, tolerance=0.1)
    assert tp.tune(step, model=model, tolerance=0.1, dtype=torch.float16).overrides == {"aten::mul": "fp32"}


def test_a_compiled_step_is_verified_compiled() -> None:
    model, _ = scaled()
    compiled = torch.compile(model, backend="eager")

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return compiled(torch.ones(2, 4) + 0.1 * torch.randn(2, 4))

    seen = []

    def check(result: torch.Tensor) -> bool:
        seen.append(torch.compiler.is_compiling())
        return True

    tuning = tp.tune(step, model=model, tolerance=0.01, check=check)
    assert tuning.met
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert tuning.certificate.compiled is not None
    assert "compiled step meets the tolerance" in tuning.certificate.text
    assert tuning.trials[-1].why == "compiled"
    with pytest.raises(tp.errors.OptionError, match="7 or more"):
        tp.tune(step, model=model, tolerance=0.01, budget=6)


def test_a_bar_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    model, step = scaled()
    tp.tune(step, model=model, tolerance=0.01)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    tp.tune(step, model=model, tolerance=0.01, progress=False)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    tp.tune(step, model=model, tolerance=0.01)
    assert "tune" in capsys.readouterr().err
