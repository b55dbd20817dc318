"""`compare`: local and accumulated errors of sites, and restored state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.planted_sites import INPUTS, Cancels, Overflows, by_place, chain, half, step_of
from torch_promote.numerics.compare import Rounds
from torch_promote.numerics.step_runs import StepRuns


@pytest.mark.parametrize("seed", range(4))
def test_the_planted_op_is_to_blame_and_those_behind_it_show_it(seed: int) -> None:
    places = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:2].tolist()
    model = chain(seed, 6, {place: Cancels() for place in places})
    comparison = tp.compare(step_of(model), model=model)
    planted = [site for site in comparison.sites if site.op == "planted_sites::cancel"]
    others = [site for site in comparison.sites if site.op != "planted_sites::cancel"]
    assert len(planted) == 2
    assert min(site.local for site in planted) > 10 * max(site.local for site in others)
    first = min(int(site.module) for site in planted)
    for site in others:
        if not site.module:  # the loss
            continue
        assert site.accumulated is not None
        behind = int(site.module) > first
        assert (site.accumulated > 1.5e-3) == behind, site
    assert {site.op for site in comparison.sites[:2]} == {"planted_sites::cancel"}  # by impact
    assert (comparison.runs, comparison.backwards) == (3, 1)


def test_an_overflow_is_infinite_where_it_happens() -> None:
    model = chain(0, 3, {1: Overflows()})
    comparison = tp.compare(step_of(model), model=model)
    sites = by_place(comparison)
    assert comparison.sites[0] is sites["4", "aten::square"]  # before those that get what it made
    assert (comparison.sites[0].local, comparison.sites[0].impact) == (math.inf, math.inf)
    assert comparison.sites[0].nonfinite > 0
    assert math.isfinite(sites["5", "aten::linear"].local)
    assert comparison.metrics[0].error == math.inf


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_masks_are_no_overflow(lowest: float) -> None:
    linear = nn.Linear(16, 8)
    mask = torch.full((8, 8), lowest).triu(1)

    def step() -> torch.Tensor:
        with half():
            return (linear(INPUTS) + mask.to(torch.get_autocast_dtype("cpu"))).softmax(-1).square().sum()

    def masked() -> torch.Tensor:
        with half():
            return (linear(INPUTS) + mask).softmax(-1).square().sum()

    for one in (step, masked):
        comparison = tp.compare(one, model=linear)
        assert all(math.isfinite(site.local) and math.isfinite(site.impact or 0) for site in comparison.sites)


def test_calls_draw_the_same_random_numbers_in_both_runs() -> None:
    """Also after a call that draws other numbers in another dtype."""
    linear = nn.Linear(16, 16)

    def step() -> torch.Tensor:
        with half():
            hidden = linear(INPUTS)
            if hidden.dtype is torch.float16:
                torch.rand(7)
            return nn.functional.dropout(hidden, 0.5).square().mean()

    site = by_place(tp.compare(step, model=linear))["", "aten::dropout"]
    assert site.accumulated is not None
    assert site.accumulated < 1e-3
    assert site.local < 1e-3


def test_a_step_that_is_not_repeatable_is_an_error() -> None:
    model, seeds = chain(0, 2, {}), iter(range(100))

    def step() -> torch.Tensor:
        with half():
            noise = torch.randn(8, 16, generator=torch.Generator().manual_seed(next(seeds)))
            return model(noise).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(
        tp.errors.StepError, match=r"differ in loss by .*aten::randn\.generator.*test_compare\.py.*restore="
    ):
        tp.compare(step, model=model)


def test_what_the_step_changes_is_restored() -> None:
    model = chain(0, 3, {}).train()
    optimizer = torch.optim.AdamW(model.parameters())
    drawn: list[int] = []

    def step() -> torch.Tensor:
        drawn.append(len(drawn))
        loss = step_of(model)()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step()
    in_force = tp.installed(), tp.default_policy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, random = torch.get_rng_state(), [one["step"].item() for one in optimizer.state.values()]
    tp.compare(step, model=model, restore=[drawn], gradients=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [one["step"].item() for one in optimizer.state.values()] == random
    assert drawn == [0]
    assert (tp.installed(), tp.default_policy()) == in_force
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C._dispatch_key_parse("PythonTLSSnapshot"))


def test_an_error_in_the_step_leaves_nothing_on() -> None:
    model = chain(0, 2, {})
    weight, in_force = model[0].weight.detach().clone(), (tp.installed(), tp.default_policy())

    def step() -> torch.Tensor:
        with torch.no_grad():
            model[0].weight.add_(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tp.compare(step, model=model)
    assert torch.equal(model[0].weight, weight)
    assert (tp.installed(), tp.default_policy()) == in_force


def test_gradients_are_those_that_the_runs_gave() -> None:
    model = chain(0, 3, {1: Cancels(256.0)})
    comparison = tp.compare(step_of(model), model=model, gradients=True)
    grads = {}
    for policy in ("off", "stock"):
        model.zero_grad()
        with tp.installed_as(policy=policy):
            step_of(model)().backward()
        grads[policy] = {name: one.grad.clone() for name, one in model.named_parameters()}
    assert {one.name for one in comparison.gradients} == set(grads["off"])
    for one in comparison.gradients:
        wanted, found = grads["off"][one.name].double(), grads["stock"][one.name].double()
        assert one.error == pytest.approx(float((found - wanted).norm() / wanted.norm()), rel=1e-6)
        assert one.norm == pytest.approx(float(wanted.norm()))
    assert [one.error for one in comparison.gradients] == sorted(one.error for one in comparison.gradients)[::-1]


def test_gradients_of_several_batches_are_those_of_all_of_them() -> None:
    model = chain(0, 2, {})
    inputs = torch.randn(3, *INPUTS.shape)

    def step(number: int) -> torch.Tensor:
        with half():
            return model(inputs[number]).square().mean()

    comparison = tp.compare(step, model=model, gradients=True, batches=3)
    assert comparison.gradients
    assert all(one.error < 0.01 for one in comparison.gradients)


def test_fp32_is_a_candidate_as_well() -> None:
    model = chain(0, 2, {})
    comparison = tp.compare(step_of(model), model=model, reference="stock", candidate="fp32")
    assert comparison.candidate == tp.Policy.named("off")
    assert comparison.reference == tp.Policy.stock()


def test_few_bytes_at_a_time_give_the_same_sites() -> None:
    model = chain(0, 3, {1: Cancels()})
    step = step_of(model)
    wanted = tp.compare(step, model=model)
    off, stock = tp.Policy.named("off"), tp.Policy.stock()
    with StepRuns(step, model) as runs:
        found = Rounds(runs, off, stock, False, None, True, most_bytes=1000).compare()
        assert found.sites == wanted.sites
        assert found.runs > 3
        short = Rounds(runs, off, stock, False, 3, True, most_bytes=1000).compare()
    assert short.runs == 3
    assert any("are unknown" in note for note in short.notes)


def test_tables_for_modules_hold_in_the_candidate() -> None:
    model = chain(0, 3, {1: Cancels()})
    policy = tp.Policy.stock().override_modules({"4": {"planted_sites::cancel": "fp32"}})
    site = by_place(tp.compare(step_of(model), model=model, candidate=policy))["4", "planted_sites::cancel"]
    assert (site.dtypes, site.policy) == ("float32", "fp32")
    assert site.local < 1e-5


def test_regions_with_a_policy_of_their_own_are_told() -> None:
    model = chain(0, 2, {})

    def step() -> torch.Tensor:
        with tp.my_autocast("cpu", policy="stock", dtype=torch.float16):
            return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model)
    assert any("No call ran in another dtype" in note for note in comparison.notes)


def test_the_candidate_is_the_policy_in_force() -> None:
    model = chain(0, 2, {})
    with tp.installed_as(policy="fp32_safe", overrides={"tanh": "fp32"}):
        comparison = tp.compare(step_of(model), model=model)
    assert comparison.candidate == tp.Policy.named("fp32_safe").override({"tanh": "fp32"})
    assert by_place(comparison)["1", "aten::tanh"].dtypes == "float32"


def test_inside_of_a_trace_and_of_crosscheck() -> None:
    model = chain(0, 2, {})
    with tp.crosscheck() as report, tp.trace(model) as trace:
        comparison = tp.compare(step_of(model), model=model)
    assert comparison.sites == tp.compare(step_of(model), model=model).sites
    assert trace.calls
    assert not report.mismatches


def test_calls_of_one_run_only_are_told() -> None:
    linear = nn.Linear(16, 16)

    def step() -> torch.Tensor:
        with half():
            hidden = linear(INPUTS)
            hidden = hidden.float().exp() if hidden.dtype is torch.float16 else hidden.exp()
            return (hidden.tanh() if linear(INPUTS).dtype is torch.float32 else hidden.tanh().sin()).mean()

    comparison = tp.compare(step, model=linear)
    assert "1 call of aten::sin in the model was made by the candidate only." in comparison.not_aligned


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": 3}, "model must be the nn.Module"),
        ({"batches": 0}, "number of times a run calls step"),
        ({"candidate": "fp33"}, "no policy is called 'fp33'"),
        ({"restore": [object()]}, r"restore\[0\] is a object, whose state cannot be restored"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    model = chain(0, 2, {})
    with pytest.raises(tp.TorchPromoteError, match=text):
        tp.compare(step_of(model), **{"model": model, **arguments})


@pytest.mark.parametrize("returned", [None, "loss", object()])
def test_a_step_that_returns_nothing_to_compare(returned: object) -> None:
    model = chain(0, 2, {})

    def step() -> object:
        step_of(model)()
        return returned

    with pytest.raises(tp.errors.StepError, match="no tensor or number to compare"):
        tp.compare(step, model=model)
