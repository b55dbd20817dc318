"""`tune` finds exactly the planted ops, within its budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.planted_steps import Calls, Planted, make_op, planted_step, registered_meanwhile
from helpers.subprocesses import Program
from torch_promote.numerics.candidates import Overriding
from torch_promote.numerics.step_runs import distance


@pytest.fixture(autouse=True)
def policies_of_ops() -> Iterator[None]:
    with registered_meanwhile():
        yield


MANY = [(5, 1), (5, 2), (8, 3), (20, 2), (40, 1), (40, 3), (60, 1), (60, 2), (60, 3)]


def check_found(tuning: tp.Tuning, step: Calls) -> None:
    assert tuning.met
    assert step.count == tuning.runs <= tuning.budget
    model = step.model
    assert isinstance(model, Planted)
    if tuning.level == "op":
        assert tuning.overrides == dict.fromkeys(model.planted, "fp32")
    else:
        places = {place for place, op in lowered_sites(tuning, model) if op in model.planted}
        assert places == model.places
        assert len(list(lowered_sites(tuning, model))) == len(places)  # nothing besides
    assert tuning.certificate.kind in ("1-minimal", "minimum")
    assert tuning.certificate.violations == ()
    assert tuning.certificate.held_out is not None


def lowered_sites(tuning: tp.Tuning, model: nn.Module) -> list[tuple[str, str]]:
    """The sites that the overrides reach, and that ran in a low dtype without them."""
    overriding = Overriding(tp.Policy.stock(), model, tuning.level, "fp32")
    overriding.choose_from(site for site in tuning.comparison.sites if "bfloat16" in site.dtypes)
    return [place for place, value in overriding.effect(tuning.overrides).items() if value]


@pytest.mark.parametrize("level", ["op", "module", "site"])
@pytest.mark.parametrize(("sites", "planted"), [(5, 1), (9, 3)])
def test_planted_ops_are_found(sites: int, planted: int, level: str) -> None:
    step = planted_step(sites, planted, seed=sites * 7 + planted, same_op=level != "op")
    check_found(tp.tune(step, model=step.model, tolerance=0.4 / sites, level=level), step)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["op", "module", "site"])
@pytest.mark.parametrize(("sites", "planted"), MANY)
@pytest.mark.parametrize("seed", range(3))
def test_many_planted_ops_are_found(sites: int, planted: int, level: str, seed: int) -> None:
    step = planted_step(sites, planted, seed=1000 * seed + 10 * sites + planted, same_op=level != "op")
    check_found(tp.tune(step, model=step.model, tolerance=0.4 / sites, level=level), step)  # type: ignore[arg-type]


def test_pairs_that_pass_only_together() -> None:
    step = Calls(Planted([[False, False], [True, True], [False, False]], seed=5))
    tuning = tp.tune(step, model=step.model, tolerance=0.1)
    check_found(tuning, step)
    assert len(tuning.overrides) == 2
    alone = [trial for trial in tuning.trials if len(trial.overrides) == 1]
    assert not any(trial.passed for trial in alone)


def test_the_minimum_is_that_of_all_sets() -> None:
    step = Calls(Planted([[True], [False], [True], [True]], seed=11))
    tuning = tp.tune(step, model=step.model, tolerance=0.1, budget=200)
    assert tuning.certificate.kind == "minimum"
    names = [candidate.name for candidate in tuning.candidates]
    assert len(names) == 5

    def passes(some: tuple[str, ...]) -> bool:
        return error_of(step, tp.Policy.stock().override(dict.fromkeys(some, "fp32")), 0) <= 0.1

    sets = [some for size in range(6) for some in itertools.combinations(names, size)]
    smallest = min(len(some) for some in sets if passes(some))
    assert len(tuning.overrides) == smallest == 3


def error_of(step: Calls, policy: tp.Policy, number: int) -> float:
    before = tp.set_default_policy(policy)
    try:
        with tp.installed_as(policy=policy):
            ours = step(number)
        with tp.installed_as(policy="off"):
            return distance(ours, step(number))
    finally:
        tp.set_default_policy(before)


class TwoThatCancel(nn.Module):
    """The errors of two ops cancel: running only one of them in float32 is worse than none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.first = make_op("cancels::first", True)
        self.second = make_op("cancels::second", True)
        self.third = make_op("cancels::third", True)
        self.fourth = make_op("cancels::fourth", False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        apart = self.first(y).float() - self.second(y).float()
        return apart.abs().mean() + self.third(y).float().square().mean() + self.fourth(y).float().square().mean()


def test_what_is_not_monotone_is_reported_and_not_claimed() -> None:
    torch.manual_seed(0)
    step = Calls(TwoThatCancel())
    tuning = tp.tune(step, model=step.model, tolerance=0.1)
    assert tuning.met
    assert tuning.overrides == {"cancels::third": "fp32"}
    assert tuning.certificate.kind == "minimum"  # of one member
    seen = [trial for trial in tuning.trials if "cancels::third" in trial.overrides and not trial.passed]
    assert bool(seen) == bool(tuning.certificate.violations)


def test_the_file_meets_the_tolerance_on_batches_that_tuning_never_saw(tmp_path: Path) -> None:
    step = planted_step(6, 2, seed=4)
    tuning = tp.tune(step, model=step.model, tolerance=0.05)
    tuning.policy.save(tmp_path / "mine.toml")
    policy = tp.Policy.load(tmp_path / "mine.toml")
    assert policy == tuning.policy
    for number in range(100, 105):
        assert error_of(step, policy, number) <= 0.05 < error_of(step, tp.Policy.stock(), number)


@pytest.mark.slow
def test_the_file_alone_meets_the_tolerance_in_a_fresh_process(tmp_path: Path) -> None:
    step = planted_step(6, 2, seed=3)
    tuning = tp.tune(step, model=step.model, tolerance=0.05)
    tuning.policy.save(tmp_path / "mine.toml")
    program = Program(
        f"""
        import torch, torch_promote as tp
        from helpers.planted_steps import planted_step
        step = planted_step(6, 2, seed=3)
        policy = tp.Policy.load({str(tmp_path / "mine.toml")!r})
        for number in range(100, 105):
            with tp.installed_as(policy="off"):
                reference = float(step(number))
            with tp.installed_as(policy=policy):
                tuned = float(step(number))
            with tp.installed_as():
                untuned = float(step(number))
            assert abs(tuned - reference) <= 0.05 * abs(reference) < abs(untuned - reference)
        print("met")
        """
    )
    done = program.wait()
    assert done.stdout == "met\n", done.stderr
