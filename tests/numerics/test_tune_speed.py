"""`tune` with direction="speed": lowers ops within the tolerance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_promote as tp
from helpers.planted_steps import Calls, Planted, planted_step, registered_meanwhile


@pytest.fixture(autouse=True)
def policies_of_ops() -> Iterator[None]:
    with registered_meanwhile():
        yield


def test_all_but_planted_ops_are_lowered() -> None:
    step = planted_step(6, 2, seed=51, policy="fp32")
    model = step.model
    assert isinstance(model, Planted)
    tuning = tp.tune(step, model=model, tolerance=0.05, direction="speed")
    assert tuning.met
    custom = {name for name in tuning.overrides if not name.startswith("aten::")}
    assert custom == {one.name for one in tuning.candidates if not one.name.startswith("aten::")} - model.planted
    assert set(tuning.overrides.values()) == {"lower_precision_fp"}
    assert not model.planted & set(tuning.overrides)
    assert tuning.certificate.kind == "1-minimal"
    assert "1-maximal" in tuning.certificate.text
    lowered = [site.bytes for site in tuning.comparison.sites if site.op in tuning.overrides]
    assert tuning.gain["bytes"] == sum(lowered) / 2
    assert "seconds" in tuning.gain
    assert step.count == tuning.runs <= 60


def test_sites_are_lowered_by_tables() -> None:
    step = planted_step(4, 1, seed=52, policy="fp32", same_op=True)
    model = step.model
    assert isinstance(model, Planted)
    tuning = tp.tune(step, model=model, tolerance=0.05, direction="speed", level="site")
    assert tuning.met
    [place] = model.places
    assert not any(op in model.planted for table in tuning.overrides.values() for op in table)
    assert place not in tuning.overrides


def test_everything_may_be_lowered() -> None:
    step = planted_step(3, 0, seed=53, policy="fp32")
    tuning = tp.tune(step, model=step.model, tolerance=0.05, direction="speed", budget=7)
    assert tuning.met
    assert len(tuning.overrides) == len(tuning.candidates)
    assert tuning.certificate.text.startswith("It is 1-maximal: all candidates are lowered.")


@pytest.mark.parametrize("budget", [7, 9, 12])
def test_a_small_budget_leaves_what_passed(budget: int) -> None:
    step = planted_step(6, 2, seed=54, policy="fp32")
    model = step.model
    assert isinstance(model, Planted)
    tuning = tp.tune(step, model=model, tolerance=0.05, direction="speed", budget=budget)
    assert tuning.met
    assert step.count <= budget
    assert not model.planted & set(tuning.overrides)


def test_a_policy_that_does_not_meet_the_tolerance_is_refused() -> None:
    step = planted_step(3, 1, seed=55)
    with pytest.raises(
        tp.errors.Fp32FailsError, match=r'even before more ops are lowered: loss .* direction="accuracy" first'
    ):
        tp.tune(step, model=step.model, tolerance=0.05, direction="speed")


def test_nothing_in_float32_is_refused() -> None:
    import torch

    model = torch.nn.Linear(8, 1)
    step = Calls(model)
    with pytest.raises(tp.errors.NothingToTuneError, match="no op that may be lowered"):
        tp.tune(step, model=model, tolerance=0.5, direction="speed", metric=lambda result: result.float().sum())
