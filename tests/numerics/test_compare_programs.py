"""`compare` and `tune` do not change programs, also with unusual uses of autograd."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_promote as tp
from torch_promote.numerics.call_observers import ForwardCalls
from torch_promote.numerics.compare import Rounds
from torch_promote.numerics.step_runs import StepRuns

INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.float16)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1))


def impacts(comparison: tp.Comparison) -> dict[tuple[str, str], float | None]:
    return {(site.module, site.op): site.impact for site in comparison.sites}


def test_running_statistics_are_written_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    inputs = INPUTS.view(2, 1, 8, 8)

    def step() -> dict[str, Any]:
        with half():
            loss = model(inputs).square().mean()
        return {"loss": loss, "mean": model[1].running_mean}

    comparison = tp.compare(step, model=model)  # two runs of the reference agree
    assert impacts(comparison)["1", "aten::batch_norm"]


def test_no_hook_stays_on_parameters() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with half():
            loss = model(INPUTS).square().mean()
        loss.backward()
        optimizer.step()  # its in-place ops return the parameters; a bias of one element is a number
        return loss

    tp.compare(step, model=model, gradients=True)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_gradients_come_through_views_where_the_step_records_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 1))

    def step(record: bool) -> torch.Tensor:
        with torch.set_grad_enabled(record), half():
            return model(INPUTS.view(2, 1, 8, 8)).square().mean()  # type: ignore[no-any-return]

    with_graph, without = (tp.compare(lambda one=one: step(one), model=model) for one in (True, False))
    assert impacts(without) == impacts(with_graph)
    assert None not in impacts(without).values()
    assert torch.is_grad_enabled()


def test_only_the_backward_of_the_loss_counts() -> None:
    model, inputs = perceptron(), INPUTS.clone().requires_grad_()

    def step(penalty: bool, does_backward: bool) -> torch.Tensor:
        with half():
            out = model(inputs)
            loss = out.square().mean()
        if penalty:
            (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            loss = loss + 0 * slope.sum()
        if does_backward:
            loss.backward()
        return loss  # type: ignore[no-any-return]

    plain = impacts(tp.compare(lambda: step(False, True), model=model))
    for does_backward in (True, False):
        found = impacts(tp.compare(lambda: step(True, does_backward), model=model))  # noqa: B023
        assert {key: found[key] for key in plain} == plain


def test_backwards_through_one_graph_add_up() -> None:
    model = perceptron()

    def step(parts: tuple[float, ...]) -> torch.Tensor:
        with half():
            loss = model(INPUTS).square().mean()
        for number, part in enumerate(parts):
            torch.autograd.backward([loss], [torch.tensor(part)], retain_graph=number + 1 < len(parts))
        return loss  # type: ignore[no-any-return]

    once, twice = (impacts(tp.compare(lambda one=one: step(one), model=model)) for one in ((1.0,), (0.25, 0.75)))
    assert twice == pytest.approx(once)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_backward_that_is_recorded_counts_if_there_is_no_other() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(create_graph: bool) -> torch.Tensor:
        optimizer.zero_grad()
        with half():
            loss = model(INPUTS).square().mean()
        loss.backward(create_graph=create_graph)
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    plain, recorded = (impacts(tp.compare(lambda one=one: step(one), model=model)) for one in (False, True))
    assert recorded == plain


def test_gradients_where_there_is_no_error_are_no_impacts() -> None:
    model = perceptron()
    target = model(INPUTS).detach()

    def step() -> torch.Tensor:
        with half():
            return (model(INPUTS) - target).square().mean()  # the gradient of the square is not zero

    comparison = tp.compare(step, model=model)
    assert comparison.random_cotangents
    assert all(impacts(comparison)[place] for place in (("0", "aten::linear"), ("2", "aten::linear")))


def test_the_scale_of_several_backwards_does_not_count() -> None:
    model = perceptron()

    def step(scaler: torch.amp.GradScaler) -> float:
        total = 0.0
        for inputs in INPUTS.split(4):
            with half():
                loss = model(inputs).square().mean() / 2
            scaler.scale(loss).backward()
            total += loss.item()
        return total

    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, enabled=enabled) for enabled in (False, True)]
    plain, scaled = (impacts(tp.compare(functools.partial(step, one), model=model)) for one in scalers)
    assert {key: scaled[key] for key in plain} == pytest.approx(plain)


def test_a_generator_that_is_passed_draws_the_same_numbers() -> None:
    model, generator = perceptron(), torch.Generator().manual_seed(0)

    def step() -> torch.Tensor:
        with half():
            out = model(INPUTS)
            torch.rand(out.dtype.itemsize, generator=generator)  # as many as the dtype has bytes
            return torch.normal(out, 1.0, generator=generator).square().mean()

    [site] = [site for site in tp.compare(step, model=model).sites if site.op == "aten::normal"]
    assert site.local < 1e-2
    assert site.accumulated is not None
    assert site.accumulated < 1e-2


def test_tensors_without_data_of_their_own_are_not_run_alone() -> None:
    model = nn.Linear(16, 4)

    def step() -> torch.Tensor:
        with half():
            nested = torch.nested.as_nested_tensor([INPUTS, INPUTS[:2]], layout=torch.jagged)
            return torch.cat([one.float() for one in model(nested).unbind()]).square().mean()

    comparison = tp.compare(step, model=model)
    assert any("NestedTensor has no data of its own" in note for note in comparison.notes)
    assert impacts(comparison)["", "aten::linear"] is None


def test_policies_of_modules_do_not_hold_in_the_reference() -> None:
    model = perceptron()
    tp.set_module_policy(model, {"1": {"gelu": "lower_precision_fp"}})

    def step() -> torch.Tensor:
        with half():
            return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    site = next(site for site in tp.compare(step, model=model).sites if site.op == "aten::gelu")
    assert (site.dtypes, site.local > 0) == ("float16", True)
    assert tp.module_policies(model) == {"1": {"gelu": "lower_precision_fp"}}


@pytest.mark.parametrize("level", ["op", "site"])
def test_policies_of_modules_are_no_candidates(level: Any) -> None:
    model = perceptron()
    tp.set_module_policy(model, {"1": {"gelu": "lower_precision_fp"}})

    def step() -> torch.Tensor:
        with half():
            return (model(INPUTS) * 1e6).square().mean()  # type: ignore[no-any-return]

    tuning = tp.tune(step, model=model, tolerance=0.1, level=level, progress=False)
    assert tuning.met
    assert not any("gelu" in one.name for one in tuning.candidates)
    assert any("aten::gelu: set_module_policy has given '1' a policy" in note for note in tuning.notes)


def test_a_step_that_raises_where_the_loss_is_not_finite_is_tuned() -> None:
    model = perceptron()

    def step() -> torch.Tensor:
        with half():
            loss = (model(INPUTS) * 1e6).square().mean()
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        return loss

    tuning = tp.tune(step, model=model, tolerance=1e-2, progress=False)
    assert (tuning.overrides, tuning.met) == ({"aten::mul": "fp32"}, True)
    assert "the loss is not finite" in tuning.trials[0].error
    with pytest.raises(FloatingPointError):
        tp.compare(step, model=model)


@pytest.mark.parametrize("budget", [6, 7, 20])
def test_a_step_that_cannot_be_recorded_is_tuned(budget: int) -> None:
    model = perceptron()

    def step() -> Any:
        with torch.no_grad(), half():
            return model(INPUTS).numpy()  # raises if the tensor requires a gradient

    tuning = tp.tune(step, model=model, tolerance=1e-5, budget=budget, progress=False)
    assert (tuning.met, tuning.runs <= budget) == (True, True)


def test_calls_without_errors_do_not_end_the_rounds() -> None:
    model = perceptron()

    def step() -> torch.Tensor:
        before = INPUTS.exp().log()  # not in a region
        with half():
            return model(before).square().mean()  # type: ignore[no-any-return]

    wanted = tp.compare(step, model=model)
    with StepRuns(step, model) as runs:
        rounds = Rounds(runs, tp.Policy.named("off"), tp.Policy.stock(), False, None, True, most_bytes=256)
        assert rounds.compare().sites == wanted.sites


def test_ranks_make_as_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank lacks the memory for all results that this rank has."""
    model, asked = perceptron(), list[bool]()
    others = iter([False, True, False, False])  # whether gradients are zero, and whether there are more rounds

    def gather(into: list[bool], here: bool) -> None:
        asked.append(here)
        into[:] = [here, next(others)]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)

    def step() -> torch.Tensor:
        with half():
            return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    assert tp.compare(step, model=model).runs == 3  # it does not communicate: this rank may be alone
    communicates = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(ForwardCalls, "communicates", communicates, raising=False)
    assert tp.compare(step, model=model).runs == 6
    assert asked == [False] * 4


def test_sparse_results_are_tuned() -> None:
    model, eye = perceptron(), torch.eye(4).to_sparse()

    def step() -> dict[str, torch.Tensor]:
        with half():
            return {"sparse": eye * model(INPUTS).float().mean()}

    assert tp.tune(step, model=model, tolerance=1e-6, progress=False).met
