"""`compare`: local and accumulated errors of sites, impacts on the loss, and steps with unusual uses of autograd."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.counted_collectives import counted_collective
from torch_promote.errors import StepError
from torch_promote.numerics.comparison import Comparison, Site
from torch_promote.numerics.impacts import Errors, ErrorSums
from torch_promote.numerics.step_runs import StepRuns
from torch_promote.report.base import heat_shares

INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
OFF, STOCK = tp.Policy.named("off"), tp.Policy.stock()
CANCEL = "compared::cancel"


@torch.library.custom_op(CANCEL, mutates_args=())
def cancel(x: torch.Tensor, big: float) -> torch.Tensor:
    """X without its last digits, which are lost in a sum with a large number."""
    return (x + big) - big


cancel.register_fake(lambda x, big: torch.empty_like(x))
cancel.register_autograd(lambda ctx, gradient: (gradient, None), setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("compared::needs_grad", mutates_args=())
def needs_grad(x: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        raise ValueError("not like this")
    return x * 2


@torch.library.custom_op("compared::of_size", mutates_args=())
def of_size(x: torch.Tensor) -> torch.Tensor:
    """Its shape depends on the dtype."""
    return x.sum(1) if x.dtype is torch.float32 else x.sum()


class Cancels(nn.Module):
    """Adds a large number and takes it away again, hidden in a custom op."""

    def __init__(self, big: float = 64.0) -> None:
        super().__init__()
        self.big = big

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.compared.cancel(x, self.big)  # type: ignore[no-any-return]


class Overflows(nn.Module):
    """A square beyond float16's range, and its root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1000 + 300).square().sqrt() / 1000


def chain(seed: int, depth: int, planted: dict[int, nn.Module] | None = None) -> nn.Sequential:
    """Layers with activations; `planted[n]` follows layer n."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for number in range(depth):
        linear = nn.Linear(16, 16)
        nn.init.orthogonal_(linear.weight)
        layers += [linear, (nn.Tanh, nn.GELU, nn.SiLU)[number % 3]()]
        if planted and number in planted:
            layers.append(planted[number])
    return nn.Sequential(*layers)


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.float16)


def step_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    return half()(lambda: model(INPUTS).square().mean())  # type: ignore[no-any-return]


def by_place(comparison: Comparison) -> dict[tuple[str, str], Site]:
    return {(site.module, site.op): site for site in comparison.sites}


def impacts_of(step: Callable[..., Any], model: nn.Module) -> dict[tuple[str, str], float | None]:
    return {place: site.impact for place, site in by_place(tp.compare(step, model=model)).items()}


# --- errors of sites


@pytest.mark.parametrize("seed", range(4))
def test_the_planted_op_has_the_local_errors(seed: int) -> None:
    places = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:2].tolist()
    model = chain(seed, 6, {place: Cancels() for place in places})
    comparison = tp.compare(step_of(model), model=model)
    planted = [site for site in comparison.sites if site.op == CANCEL]
    others = [site for site in comparison.sites if site.op != CANCEL]
    assert len(planted) == 2
    assert min(site.local for site in planted) > 10 * max(site.local for site in others)
    first = min(int(site.module) for site in planted)
    for site in others:
        if site.module:  # not the loss
            assert site.accumulated is not None
            assert (site.accumulated > 1.5e-3) == (int(site.module) > first), site
    assert {site.op for site in comparison.sites[:2]} == {CANCEL}  # by impact
    assert (comparison.runs, comparison.backwards) == (3, 1)


def test_an_overflow_is_infinite_where_it_happens() -> None:
    model = chain(0, 3, {1: Overflows()})
    comparison = tp.compare(step_of(model), model=model)
    sites = by_place(comparison)
    assert comparison.sites[0] is sites["4", "aten::square"]  # before those that get its results
    assert (comparison.sites[0].local, comparison.sites[0].impact) == (math.inf, math.inf)
    assert comparison.sites[0].nonfinite > 0
    assert math.isfinite(sites["5", "aten::linear"].local)
    assert comparison.metrics[0].error == math.inf


def test_calls_draw_the_same_random_numbers_in_all_runs() -> None:
    """Also after a call that draws as many numbers as its dtype has bytes."""
    linear, generator = nn.Linear(16, 16), torch.Generator().manual_seed(0)

    def step() -> torch.Tensor:
        with half():
            hidden = linear(INPUTS)
            torch.rand(hidden.dtype.itemsize)
            torch.rand(hidden.dtype.itemsize, generator=generator)
            kept = hidden * torch.bernoulli(hidden, 0.5, generator=generator)  # the same numbers in every dtype
            return nn.functional.dropout(kept, 0.5).square().mean()

    sites = by_place(tp.compare(step, model=linear))
    for op in ("aten::dropout", "aten::mul"):
        site = sites["", op]
        assert max(site.local, site.accumulated or math.inf) < 1e-2


@pytest.mark.parametrize(
    ("result", "reference", "relative", "nonfinite"),
    [
        ([math.inf, 1.0], [70000.0, 1.0], math.inf, 1),
        ([math.nan, math.nan], [0.0, 1.0], math.inf, 2),
        ([-math.inf, 1.0], [-math.inf, 1.0], 0.0, 0),  # a mask
        ([-math.inf, 1.0], [torch.finfo(torch.float32).min, 1.0], 0.0, 0),  # a mask
        ([math.nan, 1.0], [math.nan, 1.0], 0.0, 0),
        ([1.0], [0.0], math.inf, 0),
        ([], [], 0.0, 0),
        ([3 + 4.5j], [3 + 4j], 0.1, 0),
    ],
)
def test_error_sums(result: list[Any], reference: list[Any], relative: float, nonfinite: int) -> None:
    sums = ErrorSums()
    sums.add(torch.tensor(result), torch.tensor(reference))
    errors = sums.total()
    assert errors[:2] == (pytest.approx(relative), nonfinite)
    assert (errors.ulp is None, errors.sqnr is None) == (nonfinite > 0, relative == math.inf)


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_error_sums_of_a_cast(numbers: list[float], dtype: torch.dtype) -> None:
    reference = torch.tensor(numbers)
    result, sums = reference.to(dtype), ErrorSums()
    for pieces in zip(result.split(2), reference.split(2), strict=True):
        sums.add(*pieces)
    errors, ours, theirs = sums.total(), result.double(), reference.double()
    difference = (ours - theirs).norm().item()
    if difference == 0:
        assert errors == Errors()
        return
    assert errors.relative == pytest.approx(difference / theirs.norm().item(), rel=1e-9)
    assert errors.sqnr == pytest.approx(-20 * math.log10(errors.relative))
    info = torch.finfo(dtype)
    units = [
        max(info.eps * 2.0 ** math.floor(math.log2(abs(x))), info.smallest_normal * info.eps) for x in numbers if x
    ]
    wanted = max(abs(a - b) / unit for a, b, unit in zip(ours[theirs != 0], theirs[theirs != 0], units, strict=True))
    assert errors.ulp == pytest.approx(float(wanted))


# --- impacts


def effects(model: nn.Module, step: Callable[..., Any], sites: list[Site], batches: int) -> list[float]:
    """The change of the loss, or of the outputs, if only one site runs in float16.

    A site without a policy runs in float16 because its input is in float16, which is so with and without the site then.
    """
    all_wide = STOCK.override(dict.fromkeys({site.op for site in sites}, "fp32"))
    found = []
    with StepRuns(step, model, batches=batches) as runs:

        def results(policy: tp.Policy) -> torch.Tensor:
            return torch.stack([value.double() for one in runs.run(policy) for value in one.values()])

        for one in sites:
            before = model.get_submodule(str(int(one.module) - 1)) if not one.policy else nn.Identity()
            handle = before.register_forward_hook(lambda module, args, output: output.half())
            narrow = results(all_wide.override_modules({one.module: {one.op: "float16"}}))
            found.append(float((narrow - results(all_wide)).square().sum().sqrt()))
            handle.remove()
    return found


def random_network(seed: int, batches: int, returns_outputs: bool) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
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
            outputs: torch.Tensor = model(inputs[number])
            return outputs if returns_outputs else nn.functional.cross_entropy(outputs, labels[number])

    return model, step


@pytest.mark.parametrize(("seed", "batches", "outputs"), [(0, 1, False), (2, 4, False), (0, 1, True), (1, 1, True)])
def test_impacts_rank_like_the_effects_of_single_sites(seed: int, batches: int, outputs: bool) -> None:
    model, step = random_network(seed, batches, outputs)
    comparison = tp.compare(step, model=model, batches=batches)
    assert comparison.random_cotangents is outputs
    sites = [site for site in comparison.sites if site.impact and site.module]
    assert len(sites) > 8
    ranks = [
        torch.tensor(values, dtype=torch.float64).argsort().argsort().double()
        for values in ([site.impact for site in sites], effects(model, step, sites, batches))
    ]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) >= 0.9


def test_an_impact_is_the_change_of_the_loss_to_first_order() -> None:
    model = chain(0, 3, {1: Cancels(16.0)})
    step = step_of(model)
    comparison = tp.compare(step, model=model)
    site = by_place(comparison)["4", CANCEL]
    wide = STOCK.override(dict.fromkeys({one.op for one in comparison.sites}, "fp32"))
    with StepRuns(step, model) as runs:
        [of_wide] = runs.run(wide)
        [of_narrow] = runs.run(wide.override_modules({"4": {site.op: "float16"}}))
    change = float(of_narrow["loss"].double() - of_wide["loss"].double())
    assert site.signed_impact == pytest.approx(change, rel=0.1)
    assert site.impact == abs(site.signed_impact or 0.0)


def test_impacts_of_batches_add_up() -> None:
    """The signed ones as they are, the others as the root of the sum of their squares."""
    model, step = random_network(2, 3, False)
    single = [tp.compare(lambda number=number: step(number), model=model) for number in range(3)]
    for site in tp.compare(step, model=model, batches=3).sites:
        parts = [by_place(one)[site.module, site.op] for one in single]
        assert site.signed_impact == pytest.approx(sum(one.signed_impact or 0.0 for one in parts), rel=1e-9, abs=1e-18)
        assert site.impact == pytest.approx(math.hypot(*(one.impact or 0.0 for one in parts)), rel=1e-9)


def with_backward(model: nn.Module, loss: torch.Tensor, **options: Any) -> torch.Tensor:
    loss.backward(**options)
    return loss.detach()


def scaled(scale: float) -> Callable[[nn.Module], Callable[[], Any]]:
    def make(model: nn.Module) -> Callable[[], Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)

        def step() -> dict[str, float]:
            loss = step_of(model)()
            scaler.scale(loss).backward()
            return {"loss": loss.item(), "lr": 0.1}

        return step

    return make


def twice_through_one_graph(model: nn.Module) -> torch.Tensor:
    loss = step_of(model)()
    loss.backward(torch.tensor(2.0), retain_graph=True)
    loss.backward(torch.tensor(-1.0))  # no part is rounded, and no sum
    return loss


def with_penalty(model: nn.Module, does_backward: bool) -> torch.Tensor:
    inputs = INPUTS.clone().requires_grad_()
    with half():
        outputs = model(inputs)
        loss = outputs.square().mean()
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    loss = loss + 0 * slope.sum()
    return with_backward(model, loss) if does_backward else loss


def checkpointed(model: nn.Module) -> torch.Tensor:
    with half():
        return checkpoint(model, INPUTS, use_reentrant=False).square().mean()  # type: ignore[no-any-return]


STEPS: dict[str, Callable[[nn.Module], Callable[[], Any]]] = {
    "own backward": lambda model: lambda: with_backward(model, step_of(model)()),
    "recorded backward": lambda model: lambda: with_backward(model, step_of(model)(), create_graph=True),
    "scaled backward": scaled(2.0**10),
    "backwards that add up": lambda model: functools.partial(twice_through_one_graph, model),
    "penalty": lambda model: functools.partial(with_penalty, model, False),
    "penalty and backward": lambda model: functools.partial(with_penalty, model, True),
    "without gradients": lambda model: torch.no_grad()(step_of(model)),
    "frozen": lambda model: step_of(model.requires_grad_(False)),
    "checkpointed": lambda model: functools.partial(checkpointed, model),
}


def test_impacts_are_those_on_the_outputs_if_the_gradient_of_the_loss_is_zero() -> None:
    """As of the ratio of probabilities, minus 1, of a policy and itself."""
    model = chain(1, 4, {2: Cancels()})
    before = model(INPUTS).detach()

    def step(returns: str) -> dict[str, torch.Tensor]:
        with half():
            outputs = model(INPUTS).float()
        return {
            name: one
            for name, one in {"outputs": outputs, "off": (outputs - before).abs().mean()}.items()
            if name in returns
        }

    one, other, alone = (
        tp.compare(functools.partial(step, names), model=model) for names in ("outputs off", "outputs", "off")
    )
    assert one.sites[0].module == other.sites[0].module
    assert one.sites[0].impact == pytest.approx(other.sites[0].impact, rel=0.5)  # from seven random directions
    assert not any("do not rank the ops" in note for note in one.notes)
    assert any("do not rank the ops" in note for note in alone.notes)


def test_steps_that_convert_to_float8_and_that_return_sparse_gradients() -> None:
    embedding = nn.Embedding(4, 16, sparse=True)
    model = nn.ModuleList([embedding, nn.Linear(16, 16)])

    def step() -> dict[str, torch.Tensor]:
        embedding.zero_grad()
        with half():
            outputs = model[1](embedding(torch.tensor([1, 2])))
        low = outputs.detach().to(torch.float8_e4m3fn)
        loss = outputs.float().square().mean()
        loss.backward()
        assert embedding.weight.grad is not None
        return {"loss": loss, "low": low.float(), "gradient": embedding.weight.grad}

    comparison = tp.compare(step, model=model)
    assert [metric.name for metric in comparison.metrics] == ["loss", "low", "gradient"]
    assert all(0 <= metric.error < 0.5 for metric in comparison.metrics)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("name", STEPS)
def test_impacts_do_not_depend_on_how_a_step_uses_autograd(name: str) -> None:
    model = chain(1, 4, {2: Cancels()})
    wanted = by_place(tp.compare(step_of(model), model=model))
    found = by_place(tp.compare(STEPS[name](model), model=model))
    for place, site in wanted.items():
        assert (found[place].local, found[place].accumulated) == (site.local, site.accumulated)
        assert found[place].signed_impact == site.signed_impact
    assert torch.is_grad_enabled()


def test_gradients_pass_through_views_if_the_step_records_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 1))

    def step(record: bool) -> torch.Tensor:
        with torch.set_grad_enabled(record), half():
            return model(INPUTS.view(2, 1, 8, 8)).square().mean()  # type: ignore[no-any-return]

    with_graph, without = (impacts_of(functools.partial(step, one), model) for one in (True, False))
    assert without == with_graph
    assert None not in without.values()


def divergence(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_p = outputs.log_softmax(-1)
    return nn.functional.kl_div(log_p, target.log_softmax(-1), log_target=True, reduction="batchmean")


def mean_of_squares(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).square().mean()  # the gradient of the square is not zero


@pytest.mark.parametrize(
    ("loss_of", "outside"),
    [
        (nn.functional.mse_loss, True),
        (nn.functional.mse_loss, False),
        (mean_of_squares, True),
        (mean_of_squares, False),
        (divergence, True),  # in a region, the error of its own log_softmax would explain the change
    ],
)
def test_a_note_says_that_impacts_are_zero(loss_of: Callable[..., Any], outside: bool) -> None:
    model = chain(2, 4, {1: Cancels()})
    target = model(INPUTS).detach()

    def step() -> torch.Tensor:
        with half():
            outputs = model(INPUTS)
            if not outside:
                return loss_of(outputs, target)  # type: ignore[no-any-return]
        return loss_of(outputs.float(), target)  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model)
    [note] = comparison.notes
    assert note.startswith("The impacts on the loss are zero, or too small to explain its change")
    assert note in " ".join(str(comparison).split())
    assert comparison.to_dict()["notes"] == [note]
    assert (comparison.runs, comparison.random_cotangents) == (3, False)
    assert max(site.impact or 0.0 for site in comparison.sites if site.module) < 1e-6
    assert not tp.compare(step_of(model), model=model).notes


def test_impacts_on_the_outputs_of_a_step_without_a_loss() -> None:
    model = chain(2, 4, {1: Cancels()})
    comparison = tp.compare(half()(lambda: model(INPUTS)), model=model)
    assert (comparison.random_cotangents, comparison.backwards, comparison.notes) == (True, 7, [])
    assert comparison.sites[0].op == CANCEL
    assert all(site.impact for site in comparison.sites if site.op in (CANCEL, "aten::linear"))
    assert {site.signed_impact for site in comparison.sites} == {None}


def test_impacts_are_measured_where_no_gradient_shows_them() -> None:
    model = chain(2, 4, {1: Cancels(16.0)})
    inplace = chain(0, 2, {1: Cancels(4.0)})  # its first result is a leaf, as no weight is trainable
    inplace.insert(1, nn.ReLU(inplace=True))
    inplace.requires_grad_(False)
    for step, of, note in (
        (torch.inference_mode()(step_of(model)), model, "No gradient reaches [0-9] sites, whose impacts are unknown."),
        (torch.no_grad()(step_of(inplace)), inplace, "the step fails when its calls are recorded for a backward: a"),
    ):
        comparison = tp.compare(step, model=of)
        first = comparison.sites[0]
        assert first.op == CANCEL
        wanted = by_place(tp.compare(step_of(of.requires_grad_()), model=of))[first.module, CANCEL]
        assert first.signed_impact == pytest.approx(wanted.signed_impact, rel=0.1)
        assert 3 < comparison.runs <= 19
        assert re.search(note, comparison.notes[0])


# --- gradients


def test_gradients_of_parameters() -> None:
    model = chain(0, 3, {1: Cancels(256.0)})
    comparison = tp.compare(step_of(model), model=model, gradients=True)
    grads = {}
    for policy in ("off", "stock"):
        model.zero_grad()
        with tp.install(policy=policy):
            step_of(model)().backward()
        grads[policy] = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert {one.name for one in comparison.gradients} == set(grads["off"])
    for one in comparison.gradients:
        wanted, found = grads["off"][one.name].double(), grads["stock"][one.name].double()
        assert one.error == pytest.approx(float((found - wanted).norm() / wanted.norm()), rel=1e-6)
        assert one.norm == pytest.approx(float(wanted.norm()))
    assert [one.error for one in comparison.gradients] == sorted(one.error for one in comparison.gradients)[::-1]
    assert len(tp.compare(lambda number: step_of(model)(), model=model, gradients=True, batches=2).gradients) == 6


def test_a_gradient_that_is_zero_by_mathematics_is_no_alarm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1))

    def step() -> torch.Tensor:
        with half():
            return model(INPUTS.view(2, 1, 8, 8)).square().mean()  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model, gradients=True)
    *others, bias = comparison.gradients
    assert (bias.name, bias.vanishes) == ("0.bias", True)
    assert not any(one.vanishes for one in others)
    assert max(one.error for one in others) < 0.1 < bias.error
    [table] = [part for part in comparison.content().parts if getattr(part, "title", "") == "Gradients"]
    assert "0.bias" not in [row[0] for row in table.rows]
    assert "Gradients that are zero up to rounding errors are not listed: 0.bias." in " ".join(str(comparison).split())
    assert Comparison.from_dict(comparison.to_dict()).gradients == comparison.gradients

    def returns_gradients(copied: bool) -> dict[str, Any]:
        model.zero_grad()
        loss = step()
        loss.backward()
        gradients = {name: one.grad for name, one in model.named_parameters()}
        return {"loss": loss, "of": copy.deepcopy(gradients) if copied else gradients}

    for batches, copied in ((1, False), (2, False), (1, True)):
        comparison = tp.compare(functools.partial(returns_gradients, copied), model=model, batches=batches)
        names = [f"of.{name}" for name, _ in model.named_parameters() if name != "0.bias"]
        assert [one.name for one in comparison.metrics] == ["loss", *names]
        assert [one.name for one in comparison.gradients] == ["of.0.bias"]
        assert max(one.error for one in comparison.metrics) < 0.1 < comparison.gradients[0].error
        assert "Gradients that are zero up to rounding errors are not listed: of.0.bias." in str(comparison)
    tuning = tp.tune(functools.partial(returns_gradients, True), model=model, tolerance=1e-3)
    assert list(tuning.tolerance) == ["loss", *names]
    assert "Gradients that are zero up to rounding errors are no metrics: of.0.bias." in tuning.notes


# --- what a person reads


def fact(comparison: Comparison, label: str) -> tuple[str, ...] | None:
    return next((tuple(rest) for name, *rest in comparison.content().facts if name == label), None)


def test_the_largest_local_error_is_compared_with_a_rounding() -> None:
    model = chain(0, 3)
    largest, text = fact(tp.compare(step_of(model), model=model), "local errors") or ("", "")
    assert re.fullmatch(r"up to [34]\.\de-4", largest)
    assert text == "as expected of float16: 4.9e-4"
    model = chain(0, 3, {1: Cancels(256.0)})
    place, text = fact(tp.compare(step_of(model), model=model), "largest local error") or ("", "")
    assert place == "compared::cancel in 4"
    assert re.fullmatch(r"\S+, \S+ times a rounding to float16: 4\.9e-4", text)
    assert float(text.split()[1]) > 10


def test_a_rounding_is_pale() -> None:
    model = chain(0, 6, {1: Cancels(256.0)})
    comparison = tp.compare(step_of(model), model=model)
    [chart] = [part for part in comparison.content().parts if getattr(part, "kind", "") == "heat"]
    shares = dict(zip(chart.labels, heat_shares(chart.series[0].y, chart.series[0].scale), strict=True))
    assert shares["4"] > 0.3
    assert max(share for module, share in shares.items() if module != "4") < 0.1


def test_of_infinite_impacts_the_first_in_the_run_is_named() -> None:
    model = chain(0, 4, {1: Overflows(), 2: Overflows()})
    comparison = tp.compare(step_of(model), model=model)
    assert [site.impact for site in comparison.sites[:2]] == [math.inf, math.inf]
    assert [site.module for site in comparison.sites[:2]] == ["4", "7"]
    assert fact(comparison, "largest impact") == ("square in 4", "estimated to change the loss by inf")


# --- state, policies and other tools


def test_the_state_is_restored() -> None:
    model = chain(0, 3).train()
    optimizer = torch.optim.AdamW(model.parameters())
    drawn: list[int] = []

    def step(fails: bool = False) -> torch.Tensor:
        drawn.append(len(drawn))
        loss = step_of(model)()
        loss.backward()
        optimizer.step()  # its in-place ops return the parameters
        optimizer.zero_grad()
        if fails:
            raise ZeroDivisionError
        return loss.detach()

    step()
    in_force = tp.installed(), tp.default_policy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, steps = torch.get_rng_state(), [one["step"].item() for one in optimizer.state.values()]
    tp.compare(step, model=model, restore=[drawn], gradients=True)
    with pytest.raises(ZeroDivisionError):
        tp.compare(lambda: step(True), model=model, restore=[drawn])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [one["step"].item() for one in optimizer.state.values()] == steps
    assert drawn == [0]
    assert (tp.installed(), tp.default_policy()) == in_force
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_running_statistics_are_written_once() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def step() -> dict[str, Any]:
        with half():
            loss = model(INPUTS.view(2, 1, 8, 8)).square().mean()
        return {"loss": loss, "mean": model[1].running_mean}

    assert impacts_of(step, model)["1", "aten::batch_norm"]  # two runs of the reference agree


def test_candidates_and_references() -> None:
    model = chain(0, 3, {1: Cancels()})
    tp.set_module_policy(model, {"1": {"tanh": "lower_precision_fp"}})
    comparison = tp.compare(step_of(model), model=model, reference="stock", candidate="fp32")
    assert (comparison.candidate, comparison.reference) == (OFF, STOCK)
    policy = STOCK.override_modules({"4": {CANCEL: "fp32"}})
    sites = by_place(tp.compare(step_of(model), model=model, candidate=policy))
    assert (sites["4", CANCEL].dtypes, sites["4", CANCEL].policy) == ("float32", "fp32")
    assert sites["4", CANCEL].local < 1e-5
    assert (sites["1", "aten::tanh"].dtypes, sites["1", "aten::tanh"].local > 0) == ("float16", True)  # module policies
    with tp.install(policy="fp32_safe", overrides={"silu": "fp32"}):
        comparison = tp.compare(step_of(model), model=model)
    assert comparison.candidate == tp.Policy.named("fp32_safe").override({"silu": "fp32"})
    assert by_place(comparison)["6", "aten::silu"].dtypes == "float32"


def test_inside_of_a_trace_and_of_crosscheck() -> None:
    model = chain(0, 2)
    with tp.crosscheck() as report, tp.trace(model) as trace:
        comparison = tp.compare(step_of(model), model=model)
    assert comparison.sites == tp.compare(step_of(model), model=model).sites
    assert trace.calls
    assert not report.mismatches


# --- memory, and ranks


def test_results_for_which_memory_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(0, 3, {1: Cancels()})
    wanted = by_place(tp.compare(step_of(model), model=model))
    monkeypatch.setattr("torch_promote.numerics.call_observers._free_bytes", lambda device: 1300)  # two results
    comparison = tp.compare(step_of(model), model=model)
    assert any("no room in memory" in note for note in comparison.notes)
    for place, site in by_place(comparison).items():
        assert site.local == wanted[place].local
        if site.module:  # the loss is small
            assert site.accumulated == (wanted[place].accumulated if site.module in ("0", "1") else None)
    assert [site.op for site in comparison.sites[:2]] == [CANCEL, "aten::linear"]  # measured


# --- calls that differ, or cannot run alone


@pytest.fixture
def policies() -> Iterator[None]:
    with (
        tp.register_policy("compared::needs_grad", "lower_precision_fp"),
        tp.register_policy("compared::of_size", "lower_precision_fp"),
    ):
        yield


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize(
    ("op", "why"),
    [(needs_grad, "ValueError: not like this"), (of_size, "the shapes of its results differ in these dtypes")],
)
def test_a_call_that_cannot_be_run_alone_is_named(op: Any, why: str) -> None:
    model = chain(0, 2)

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


def test_nested_tensors_are_not_run_alone() -> None:
    model = nn.Linear(16, 4)

    def step() -> torch.Tensor:
        with half():
            nested = torch.nested.as_nested_tensor([INPUTS, INPUTS[:2]], layout=torch.jagged)
            return torch.cat([one.float() for one in model(nested).unbind()]).square().mean()

    comparison = tp.compare(step, model=model)
    assert any("NestedTensor has no data of its own" in note for note in comparison.notes)
    [text] = [text for text in comparison.not_seen if "aten::linear" in text]
    assert text.startswith("The outputs of ")
    assert text.endswith(" were not compared: NestedTensor has no data of its own.")
    assert by_place(comparison)["", "aten::linear"].impact is None


def test_collectives_are_not_compared_and_not_run_alone() -> None:
    model = chain(0, 2)
    step = half()(lambda: (model(INPUTS).square().mean() + op(model(INPUTS).detach()).mean()).float())
    with counted_collective() as (op, calls):
        comparison = tp.compare(step, model=model)
        assert len(calls) == comparison.runs == 4  # the last one measures the impact of the mean of a detached tensor
    assert by_place(comparison)["0", "aten::linear"].impact
    assert not [site for site in comparison.sites if "counted" in site.op]
    assert comparison.notes == comparison.not_aligned == []


def test_calls_of_one_run_are_listed() -> None:
    linear = nn.Linear(16, 16)

    def step() -> torch.Tensor:
        with half():
            hidden = linear(INPUTS)
            return (hidden.sin() if hidden.dtype is torch.float16 else hidden).mean()

    [text] = tp.compare(step, model=linear).not_aligned
    assert "aten::sin in (model)" in text
    assert "candidate" in text


def test_a_step_that_is_not_repeatable_is_an_error() -> None:
    model = chain(0, 2)

    def step(calls: Iterator[int], run: int | None) -> torch.Tensor:
        number = next(calls)
        with half():
            if run is None:
                noise = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
                return model(noise).square().mean()  # type: ignore[no-any-return]
            found = model(INPUTS).float().mean()
            return found.exp() if number == run else found  # type: ignore[no-any-return]

    for run, text in (
        (None, r"the results of aten::randn\.generator.*test_compare\.py.*restore="),
        (0, r"aten::exp in \(model\), call 1, was made only in the first run\."),
        (2, r"aten::exp in \(model\), call 1, was made only in the second run\."),
    ):
        with pytest.raises(StepError, match=rf"differ in loss by .* What differed first: {text}"):
            tp.compare(functools.partial(step, iter(range(100)), run), model=model)


def test_errors_in_calls() -> None:
    model, seen = chain(0, 2), []

    def step() -> torch.Tensor:
        with torch.no_grad(), half():
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                torch.mm(INPUTS, INPUTS)
            seen.append(torch.is_grad_enabled())
            return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    comparison = tp.compare(step, model=model)
    assert seen == [False] * comparison.runs
    assert by_place(comparison)["0", "aten::linear"].impact


def test_invalid_arguments() -> None:
    with pytest.raises(tp.TorchPromoteError, match="no policy is called 'fp33'"):
        tp.compare(step_of(model := chain(0, 2)), model=model, candidate="fp33")


def test_a_program_that_casts_its_batch_itself_is_told_that_the_reference_casts_nothing() -> None:
    model = nn.Linear(4, 4)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.ones(2, 4).bfloat16()).float().sum()

    with pytest.raises(RuntimeError, match="same dtype") as error:
        tp.compare(step, model=model)
    assert "in which no region casts" in error.value.__notes__[0]


def test_identical_results_of_a_lower_dtype_say_nothing_of_the_reference() -> None:
    """Ones are exact in bfloat16, in which the reference does not run, and a model may be in bfloat16 itself."""
    for model, x in ((nn.Linear(4, 4), torch.ones(2, 4)), (nn.Linear(4, 4).bfloat16(), torch.ones(2, 4).bfloat16())):
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)

        def step(model: nn.Module = model, x: torch.Tensor = x) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().sum()

        text = " ".join(str(tp.compare(step, model=model)).split())
        if x.dtype is torch.bfloat16:
            assert "The results are identical: no op ran in another dtype than in the reference. runs" in text
            assert "The program's own tensors are bfloat16, in the reference, too." in text
        else:
            assert "No op that was compared has an error, and the results are identical. " in text
            assert "The program's own tensors" not in text


def test_the_impacts_on_a_loss_that_the_step_does_not_return() -> None:
    """It returns that of an average of the weights, which no rounding of the forward changes."""
    model, average = nn.Linear(4, 1), nn.Linear(4, 1)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.full((2, 4), 1.01)).float().square().mean().backward()
        return average(torch.ones(2, 4)).sum()

    comparison = tp.compare(step, model=model, restore=(average,))
    assert [metric.error for metric in comparison.metrics] == [0.0]
    text = str(comparison)
    assert "The results are identical, although ops have errors." in text
    assert "estimated to change the loss of its backward by" in text
