"""`compare`: impacts, the effects of a site's errors on the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.planted_sites import INPUTS, Cancels, by_place, chain, half, ranks_agree, step_of
from torch_promote.numerics.comparison import Site
from torch_promote.numerics.impacts import Impacts
from torch_promote.numerics.step_runs import StepRuns


def effects(model: nn.Module, step: Callable[..., Any], sites: list[Site], batches: int) -> list[float]:
    """The change of the loss if only one site runs in float16."""
    all_wide = tp.Policy.stock().override(dict.fromkeys({site.op for site in sites}, "fp32"))
    found = []
    with StepRuns(step, model, batches=batches) as runs:

        def losses(policy: tp.Policy) -> torch.Tensor:
            return torch.stack([one["loss"].double() for one in runs.run(policy)])

        wide = losses(all_wide)
        for site in sites:
            narrow = all_wide.override_modules({site.module: {site.op: torch.float16}})
            found.append(float((losses(narrow) - wide).square().sum().sqrt()))
    return found


def random_network(seed: int, batches: int) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for number in range(5):
        linear = nn.Linear(16, 16)
        linear.weight.data *= 10 ** (torch.rand(()) * 2 - 1)
        layers += [linear, (nn.ReLU, nn.GELU, nn.Tanh)[int(torch.randint(3, ()))]()]
        layers += [nn.LayerNorm(16)] * (number % 2)
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    inputs, labels = torch.randn(batches, 32, 16), torch.randint(4, (batches, 32))

    def step(number: int) -> torch.Tensor:
        with half():
            return nn.functional.cross_entropy(model(inputs[number]), labels[number])

    return model, step


@pytest.mark.parametrize(("seed", "batches"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_impacts_rank_as_the_effects_of_single_sites(seed: int, batches: int) -> None:
    model, step = random_network(seed, batches)
    sites = [site for site in tp.compare(step, model=model, batches=batches).sites if site.impact]
    assert len(sites) > 10
    impacts = [site.impact or 0.0 for site in sites]
    assert ranks_agree(impacts, effects(model, step, sites, batches)) >= 0.9


def test_impacts_of_shuffled_gradients_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Impacts._multiply
    generator = torch.Generator().manual_seed(0)

    def shuffled(self: Impacts, site: Any, gradient: torch.Tensor, error: torch.Tensor) -> None:
        scale = 10 ** (torch.rand((), generator=generator) * 4 - 2)
        order = torch.randperm(gradient.numel(), generator=generator)
        plain(self, site, gradient.reshape(-1)[order].reshape(gradient.shape) * scale, error)

    monkeypatch.setattr(Impacts, "_multiply", shuffled)
    agreements = []
    for seed in range(4):
        model, step = random_network(seed, 1)
        sites = [site for site in tp.compare(step, model=model).sites if site.impact]
        impacts = [site.impact or 0.0 for site in sites]
        agreements.append(ranks_agree(impacts, effects(model, step, sites, 1)))
    assert abs(sum(agreements) / len(agreements)) < 0.4


def test_an_impact_is_the_change_of_the_loss_to_first_order() -> None:
    model = chain(0, 3, {1: Cancels(16.0)})
    step = step_of(model)
    comparison = tp.compare(step, model=model)
    site = by_place(comparison)["4", "planted_sites::cancel"]
    wide = tp.Policy.stock().override(dict.fromkeys({one.op for one in comparison.sites}, "fp32"))
    with StepRuns(step, model) as runs:
        [of_wide] = runs.run(wide)
        [of_narrow] = runs.run(wide.override_modules({"4": {site.op: "float16"}}))
    change = float(of_narrow["loss"].double() - of_wide["loss"].double())
    assert site.signed_impact == pytest.approx(change, rel=0.1)
    assert site.impact == abs(site.signed_impact or 0.0)


SAME_IMPACTS: dict[str, Callable[[nn.Module], Callable[[], Any]]] = {}


def same(function: Callable[[nn.Module], Callable[[], Any]]) -> Callable[[nn.Module], Callable[[], Any]]:
    SAME_IMPACTS[function.__name__] = function
    return function


@same
def its_own_backward(model: nn.Module) -> Callable[[], Any]:
    def step() -> torch.Tensor:
        loss = step_of(model)()
        loss.backward()
        return loss.detach()

    return step


@same
def a_scaled_backward_and_a_number(model: nn.Module) -> Callable[[], Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> dict[str, float]:
        optimizer.zero_grad()
        loss = step_of(model)()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss.item(), "lr": 0.1}

    return step


@same
def without_gradients(model: nn.Module) -> Callable[[], Any]:
    return torch.no_grad()(step_of(model))


@same
def frozen(model: nn.Module) -> Callable[[], Any]:
    model.requires_grad_(False)
    return step_of(model)


@same
def checkpointed(model: nn.Module) -> Callable[[], Any]:
    def step() -> torch.Tensor:
        with half():
            return checkpoint(model, INPUTS, use_reentrant=False).square().mean()  # type: ignore[no-any-return]

    return step


@pytest.mark.parametrize("name", SAME_IMPACTS)
def test_a_step_may_be_of_any_kind(name: str) -> None:
    model = chain(1, 4, {2: Cancels()})
    wanted = by_place(tp.compare(step_of(model), model=model))
    found = by_place(tp.compare(SAME_IMPACTS[name](model), model=model))
    for place, site in wanted.items():
        assert found[place].local == site.local
        assert found[place].accumulated == site.accumulated
        assert found[place].signed_impact == pytest.approx(site.signed_impact, rel=1e-4)


def mean_squared(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - target).square().mean()


def divergence(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_p = outputs.log_softmax(-1)
    return nn.functional.kl_div(log_p, target.log_softmax(-1), log_target=True, reduction="batchmean")


@pytest.mark.parametrize("loss_of", [nn.functional.mse_loss, mean_squared, divergence])
@pytest.mark.parametrize("outside", [True, False])
def test_where_gradients_are_zero_random_cotangents_rank(loss_of: Callable[..., torch.Tensor], outside: bool) -> None:
    model = chain(2, 4, {1: Cancels()})
    target = model(INPUTS).detach()

    def step() -> torch.Tensor:
        with half():
            outputs = model(INPUTS)
            if not outside:
                return loss_of(outputs, target)
        return loss_of(outputs.float(), target)

    comparison = tp.compare(step, model=model)
    assert comparison.random_cotangents
    assert (comparison.runs, comparison.backwards) == (4, 8)
    assert comparison.sites[0].op == "planted_sites::cancel"
    assert all(site.impact for site in comparison.sites if site.module)
    assert {site.signed_impact for site in comparison.sites} == {None}


def test_gradients_that_are_rounding_errors_count_as_zero() -> None:
    model = chain(2, 6, {1: Cancels()})
    target = model(INPUTS).softmax(-1).detach()

    def step() -> torch.Tensor:
        with half():
            outputs = model(INPUTS)
        return nn.functional.kl_div(outputs.float().log_softmax(-1), target, reduction="batchmean")

    comparison = tp.compare(step, model=model)
    assert comparison.random_cotangents
    assert comparison.sites[0].op == "planted_sites::cancel"
    assert (comparison.sites[0].impact or 0) > 1e-3  # of outputs of about 1


@pytest.mark.parametrize("seed", range(3))
def test_where_gradients_are_zero_impacts_rank_as_effects_do(seed: int) -> None:
    model, _ = random_network(seed, 1)
    inputs = torch.randn(32, 16)
    target = model(inputs).detach()

    def step(number: int) -> torch.Tensor:
        with half():
            outputs = model(inputs)
        return nn.functional.mse_loss(outputs.double(), target.double())

    comparison = tp.compare(step, model=model)
    assert comparison.random_cotangents
    sites = [site for site in comparison.sites if site.impact and site.module]
    impacts = [site.impact or 0.0 for site in sites]
    assert ranks_agree(impacts, effects(model, step, sites, 1)) >= 0.9


def test_outputs_take_the_place_of_a_loss() -> None:
    model = chain(2, 4, {1: Cancels()})

    def step() -> torch.Tensor:
        with half():
            return model(INPUTS)  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model)
    assert comparison.random_cotangents
    assert comparison.sites[0].op == "planted_sites::cancel"
    assert [metric.name for metric in comparison.metrics] == ["output"]


def test_inference_mode_has_no_impacts_and_says_so() -> None:
    model = chain(2, 4, {1: Cancels()})
    comparison = tp.compare(torch.inference_mode()(step_of(model)), model=model)
    assert {site.impact for site in comparison.sites} == {None}
    assert comparison.sites[0].op == "planted_sites::cancel"  # by local error
    assert any("The impacts are unknown" in note for note in comparison.notes)
