"""`compare` and `tune` with float8: local errors and impacts, the layers that bear it, and their share of the FLOPs."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import torch_promote as tp
from torch_promote.errors import Fp32FailsError, OptionError


class Branches(nn.Module):
    """Layers with the same input, whose squares are summed up; those that are planted lose all in float8.

    A planted layer has weights of 1e4 where the input is 0. With the scale that these need, the others become 0. The
    last layer has 10 features and does not fit.

    Args:
        count: The number of layers.
        planted: The numbers of the planted layers.
        whole_rows: Whether each row of their weights has such a value, or only one row.
    """

    def __init__(self, count: int, planted: set[int], whole_rows: bool = True) -> None:
        super().__init__()
        self.planted, self.features = planted, [*(16 * (1 + number % 3) for number in range(count - 1)), 10]
        self.layers = nn.ModuleList(nn.Linear(32, out, bias=False) for out in self.features)
        for number, weight in enumerate(self.parameters()):
            weight.detach().mul_(0.1)
            if number in planted:
                weight.detach()[slice(None) if whole_rows else 0, 3] = 1e4

    def forward(self, batch: int, first: int = 100) -> torch.Tensor:
        """The layers after the first ones get zeros."""
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(batch))
        x[:, 3] = 0
        with torch.autocast("cpu"):
            results = [layer(x if number < first else 0 * x) for number, layer in enumerate(self.layers)]
        return torch.stack([one.float().square().mean() for one in results]).sum()


def branches(seed: int, whole_rows: bool = True) -> Branches:
    """Returns a model whose size and planted layers are random."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = draw.randint(5, 9)
    return Branches(count, set(draw.sample(range(count - 1), draw.randint(1, 3))), whole_rows)


def tune(model: Branches, step: Any = None, **options: Any) -> tp.types.Tuning:
    given = {"tolerance": 0.01, "level": "module", "direction": "speed", "formats": ("lower", "float8"), **options}
    return tp.tune(step or model.forward, model=model, **given)


def found_in(tuning: tp.types.Tuning) -> set[int]:
    return {int(name.partition(":")[0].rpartition(".")[2]) for name in tuning.found}


# --- tune


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("recipe", "whole_rows", "bears_it"),
    [("rowwise", True, False), ("tensorwise", True, False), ("tensorwise", False, False), ("rowwise", False, True)],
)
def test_the_layers_that_do_not_bear_it_are_found(recipe: str, whole_rows: bool, bears_it: bool, seed: int) -> None:
    model, level = branches(seed, whole_rows), ("module", "site")[seed % 2]
    count, features = len(model.features), model.features
    tuning = tune(model, tolerance=0.4 / count, formats=("lower", f"float8:{recipe}"), level=level)
    right = set(range(count - 1)) - (set() if bears_it else model.planted)
    assert (tuning.met, found_in(tuning), tuning.override) == (True, right, f"float8:{recipe}")
    assert tuning.certificate.text.startswith("It is 1-maximal: ")
    assert tuning.certificate.held_out is not None
    assert any("out_features is 10, which 16 does not divide (sites: 1)" in note for note in tuning.notes)
    flops = {one.name.partition(":")[0]: one.flops for one in tuning.candidates}
    assert flops == {f"layers.{number}": 2 * 16 * 32 * features[number] for number in range(count - 1)}
    assert tuning.gain["float8_share"] == sum(features[number] for number in right) / sum(features)
    with tp.my_autocast("cpu", policy=tuning.policy, model=model), tp.trace(model) as report:
        model(0)
    ran = [call.ran_with[0].dtype for call in report.calls if call.op == "aten::linear"]
    assert {number for number, dtype in enumerate(ran) if dtype is torch.float8_e4m3fn} == right


def test_the_report_and_the_files(tmp_path: Path) -> None:
    model, file = branches(3), tmp_path / "runs.json"
    first, tuning = tune(model, resume=file, budget=8), tune(model, resume=file)
    again = tune(model, resume=file, formats=("lower", "float8:rowwise"))
    assert first.runs <= 8 < tuning.runs == again.runs
    assert (again.found, again.trials) == (tuning.found, tuning.trials)
    with pytest.raises(OptionError, match=r"with formats=\['lower', 'float8:rowwise'\] instead of \['lower'"):
        tune(model, resume=file, formats=("lower", "float8:tensorwise"))
    share = f"{tuning.gain['float8_share']:.1%}"
    assert f"in float8  {share} (of the FLOPs of the forward's products)" in str(tuning)
    assert "tuning for speed, float8:rowwise, level module" in str(tuning)
    for name in ("a.toml", "a.html", "a.json"):
        tuning.save(tmp_path / name)
    assert share in (tmp_path / "a.html").read_text()
    assert tp.types.Tuning.load(tmp_path / "a.json").gain == tuning.gain
    assert tp.Policy.load(tmp_path / "a.toml") == tuning.policy


@pytest.mark.parametrize("budget", [7, 8, 60])
def test_layers_that_fail_only_on_held_out_batches(budget: int) -> None:
    """Batch 0 shows no planted layer, batch 1 the first one, and later batches both."""
    torch.manual_seed(0)
    model = Branches(6, {1, 3})
    tuning = tune(model, lambda batch: model.forward(batch, 1 + 2 * min(batch, 2)), tolerance=0.02, budget=budget)
    assert tuning.certificate.held_out is not None
    assert tuning.met is (tuning.certificate.held_out["loss"] <= 0.02) is (budget == 60)
    if tuning.met:
        assert not found_in(tuning) & {1, 3}
        assert any("became part of the tuning" in note for note in tuning.notes)


@pytest.mark.parametrize("level", ["module", "op"])
def test_what_the_policy_runs_otherwise_stays(level: str) -> None:
    model = Branches(8, set())
    base = tp.Policy.stock().override_modules(
        {"layers.0": {"linear": "float8"}, "layers.1": {"linear": "fp32"}, "layers.2": "off"}
    )
    given = tp.set_module_policy(model.layers[3], {"": {"linear": "bfloat16"}})
    with given, base.apply_to(model), tp.install(policy=base):
        tuning = tune(model, tolerance=0.5, level=level)
    excluded = " ".join(note for note in tuning.notes if note.startswith("No override"))
    assert "the policy runs it in float8 already" in excluded
    assert "set_module_policy has given" in excluded
    assert all(table in tuning.policy.modules for table in base.modules)
    assert len(tuning.found) == (3 if level == "module" else 1)
    in_float8 = sum(model.features[number] for number in (0, 4, 5, 6))
    assert tuning.gain["float8_share"] == in_float8 / sum(model.features)


def test_steps_that_it_does_not_apply_to() -> None:
    reason = tune(Branches(1, set()), tolerance=0.5).reason
    assert re.match(r"no linear runs in .* aten::linear: out_features is 10, which 16", reason)
    with pytest.raises(Fp32FailsError, match="the policy does not meet the tolerance even before"):
        tune(branches(0), tolerance=1e-9)


# --- compare


@pytest.mark.parametrize("reference", ["off", "stock"])
@pytest.mark.parametrize("recipe", ["float8:rowwise", "float8:tensorwise"])
def test_local_errors_and_impacts_are_those_by_hand(recipe: str, reference: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(16, 10))
    hidden, weights = torch.randn(8, 32), torch.randn(8, 10)
    step = torch.autocast("cpu")(lambda x=hidden: (model(x).float() * weights).sum())
    candidate = tp.Policy.stock().override({"linear": recipe})
    comparison = tp.compare(step, model=model, reference=reference, candidate=candidate)
    sites = {site.module: site for site in comparison.sites if site.op == "aten::linear"}
    for number, layer in enumerate(model):
        with tp.my_autocast("cpu", policy=reference):
            right = layer(hidden)
        with tp.my_autocast("cpu", policy=candidate):
            error = layer(hidden).detach().double() - right.detach()
        site = sites[str(number)]
        assert site.local == pytest.approx(float(error.norm() / right.detach().double().norm()), rel=1e-6)
        if reference == "off":  # otherwise the step's own gradients are rounded to bfloat16
            (gradient,) = torch.autograd.grad((model[number + 1 :](right) * weights).sum(), right)
            assert site.impact == pytest.approx(abs(float((gradient * error).sum())), rel=1e-4)
        assert ("float8_e4m3fn" in site.dtypes) is (number < 2)
        assert site.misfit == ("" if number < 2 else "out_features is 10, which 16 does not divide")
        hidden = right
    assert "linear in 2: out_features is 10, which 16 does not divide" in str(comparison)


def test_flops_are_those_of_pytorchs_counter() -> None:
    convolutions = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(8, 6, 3, stride=2), nn.Conv1d(9, 2, 2)
    )
    a, b, heads = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 4, 6, 8)

    @torch.autocast("cpu")
    def step() -> torch.Tensor:
        results = [
            convolutions[:2](torch.ones(2, 4, 9, 9)),
            convolutions[2](torch.ones(3, 9, 5)),
            F.scaled_dot_product_attention(heads, heads[:, :, :5], heads[:, :, :5]),
            torch.baddbmm(torch.zeros(2, 3, 5), a, b),
            torch.addmm(torch.zeros(3), a[0], b[0][:, :3]),
            a[0] @ b,
            a.bmm(b),
            F.linear(a, torch.ones(7, 4)),
        ]
        return torch.stack([one.float().square().mean() for one in results]).sum()

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it does not count the other kernels
        step()
    comparison = tp.compare(step, model=convolutions)
    assert comparison.flops == counter.get_total_flops() > 0
    assert sum(site.flops for site in comparison.sites) == comparison.flops
