"""The errors of `tune`: its gates, and invalid arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.overflowing_steps import scaled


def test_a_tolerance_below_the_noise_floor_is_refused() -> None:
    model, step = scaled()
    count = 0

    def noisy() -> torch.Tensor:
        nonlocal count
        count += 1
        return step() * (1 + 0.01 * count)

    with pytest.raises(
        tp.errors.NoiseFloorError, match=r"differ by more than the tolerance: loss 0.0\d+ \(tolerance 1e-3\)"
    ):
        tp.tune(noisy, model=model, tolerance=1e-3)


def test_the_first_call_that_differs_is_named() -> None:
    model, step = scaled()
    seeds = iter(range(100))

    def noisy() -> torch.Tensor:
        return step() * torch.rand((), generator=torch.Generator().manual_seed(next(seeds)))

    with pytest.raises(tp.TorchPromoteError, match=r"first: the results of aten::rand\.generator in the model, call 1"):
        tp.tune(noisy, model=model, tolerance=1e-3)


def test_a_step_with_little_noise_is_tuned() -> None:
    model, step = scaled()
    count = 0

    def noisy() -> torch.Tensor:
        nonlocal count
        count += 1
        return step() * (1 + 1e-6 * count)

    tuning = tp.tune(noisy, model=model, tolerance=0.01)
    assert tuning.met
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert 0 < tuning.noise_floor["loss"] < 1e-4
    assert any("not exactly repeatable" in note for note in tuning.notes)


def test_a_step_that_float32_does_not_cure_is_refused() -> None:
    model, step = scaled()
    calls = iter(range(100))

    def other() -> torch.Tensor:
        return step() + (1 if next(calls) > 2 else 0)

    with pytest.raises(
        tp.errors.Fp32FailsError, match=r"with all 6 candidates in float32 .*: loss \S+ \(tolerance 1e-4\)"
    ):
        tp.tune(other, model=model, tolerance=1e-4)


def test_a_policy_that_meets_the_tolerance_is_refused() -> None:
    model, step = scaled(torch.bfloat16)
    with pytest.raises(tp.errors.NothingToTuneError, match=r"without an override: loss \S+ \(tolerance 0.5\)"):
        tp.tune(step, model=model, tolerance=0.5)


def test_a_policy_that_casts_nothing_is_refused() -> None:
    model, step = scaled()
    before = tp.set_default_policy("off")
    try:
        with pytest.raises(tp.errors.NothingToTuneError, match="which casts no op"):
            tp.tune(step, model=model, tolerance=0.5)
    finally:
        tp.set_default_policy(before)


def test_a_step_without_a_region_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(tp.errors.NothingToTuneError, match="No call ran in another dtype"):
        tp.tune(lambda: model(torch.ones(1, 2)).sum(), model=model, tolerance=0.5)


def test_errors_of_the_reference_come_through() -> None:
    def step() -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        tp.tune(step, model=nn.Linear(2, 2), tolerance=0.5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tolerance": 0}, "finite number above 0"),
        ({"tolerance": math.nan}, "finite number above 0"),
        ({"tolerance": {}}, "finite number above 0"),
        ({"tolerance": True}, "finite number above 0"),
        ({"tolerance": {"los": 1e-3}}, r"tolerance names 'los', and step\(\) returned 'loss'. Closest: loss."),
        ({"budget": 5}, "6 or more, got 5"),
        ({"budget": 6, "direction": "speed"}, "7 or more, got 6"),
        ({"budget": 60.0}, "6 or more, got 60.0"),
        ({"level": "ops"}, r"level is 'op' or 'module' or 'site', got 'ops'. Closest: op."),
        ({"direction": "fast"}, "direction is 'accuracy' or 'speed', got 'fast'."),
        ({"metric": "los"}, r"metric='los': step\(\) returned no such name. Closest: loss. Legal: loss."),
        ({"metric": 3}, "metric must be a function"),
        ({"check": 3}, "check must be a function"),
        ({"seed": 0.5}, "seed is an int"),
        ({"batches": 0}, "1 or more, got 0"),
        ({"dtype": torch.float32}, r"dtype must be torch.float16, torch.bfloat16 or None"),
        ({"model": "model"}, "model must be the nn.Module"),
        ({"resume": "/no/such/folder/file.json"}, "there is no folder of that name"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], text: str) -> None:
    model, step = scaled()
    with pytest.raises(tp.errors.OptionError, match=text):
        tp.tune(step, **{"model": model, "tolerance": 0.1, **arguments})
