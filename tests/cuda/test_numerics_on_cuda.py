"""Values of a trace and `find_nonfinite` on CUDA, where autograd runs the backward in another thread."""

from __future__ import annotations

import torch
from torch import nn

import torch_promote as tp
from torch_promote.numerics.find_nonfinite import find_nonfinite
from torch_promote.reading.trace import trace


def small_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)


def test_values_of_a_training_step(cuda: torch.device) -> None:
    model = small_model(cuda)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trace(model, values=True) as report:
        for _ in range(2):
            with tp.my_autocast("cuda"):
                loss = model(torch.ones(4, 8, device=cuda)).float().pow(2).mean()
            loss.backward()
            optimizer.step()
    assert all(len(report.values.get(i, ())) == len(call.outputs) for i, call in enumerate(report.calls))
    assert any(one.count for call in report.calls.where(phase="backward") for one in report.values_of(call))


def test_find_nonfinite_in_a_backward_with_a_scaler(cuda: torch.device) -> None:
    model = small_model(cuda)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    with find_nonfinite(model) as report:
        for _ in range(2):
            optimizer.zero_grad()
            with tp.my_autocast("cuda", torch.float16):
                loss = model(torch.ones(4, 8, device=cuda)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not report.found, str(report)
    assert [one.kind for one in report.benign] == ["GradScaler"]
    zero = torch.zeros(2, device=cuda, requires_grad=True)
    with find_nonfinite() as report:
        (zero.sqrt() * 0).sum().backward()
    assert report.origin is not None
    assert (report.origin.phase, report.origin.kind) == ("backward", "mathematics")


def test_nothing_synchronizes_while_a_graph_is_captured(cuda: torch.device) -> None:
    """A synchronization would end the capture with an error. What is computed meanwhile is unknown."""
    weight = nn.Parameter(torch.ones(3, device=cuda))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], 0.1)
    with trace(values=True) as report:
        torch.zeros(3, device=cuda).exp()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    assert [report.values_of(call)[0].amax for call in report.calls.where(op="exp")] == [1.0]
    captured = report.calls.where(phase="optimizer")
    assert captured
    assert not any(one.digest for call in captured for one in report.values_of(call))


def test_tune_restores_the_generators_of_the_device(cuda: torch.device) -> None:
    """All runs, and those of single calls, draw the same random numbers."""
    model = nn.Sequential(small_model(cuda), nn.Dropout(0.5))

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return (model(torch.ones(4, 8, device=cuda)) * 1e6).float().square().mean()

    state = torch.cuda.get_rng_state(cuda)
    tuning = tp.tune(step, model=model, tolerance=0.01)
    assert torch.equal(torch.cuda.get_rng_state(cuda), state)
    assert tuning.met
    assert tuning.overrides == {"aten::mul": "fp32"}
    assert tuning.noise_floor == {"loss": 0.0}
    assert not [note for note in tuning.comparison.notes if "not run alone" in note]
    assert {site.module: site.local for site in tuning.comparison.sites if site.op == "aten::dropout"}["1"] < 1e-3


def test_losses_and_skipped_steps(cuda: torch.device) -> None:
    """The backward runs in autograd's thread."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(cuda)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, foreach=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**100)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        with tp.my_autocast("cuda", torch.float16):
            y = model(torch.ones(2, 4, device=cuda))
        scaler.scale((y.float() * factor).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    with tp.find_nonfinite() as found:
        for _ in range(3):
            step(1.0)
    assert (found.scaler.count, found.scaler.skipped) == (3, 3)
    assert str(found).startswith("GradScaler skipped all 3 steps, which changed no weight; ")
    with tp.trace(model, values=True) as report:
        for factor in (1.0, 1.0, float("nan")):
            step(factor)
    assert report.nonfinite.about_losses(report.steps) == "1 of 3 losses is NaN, from loss 2, counted from 0"
    call = report.first_nonfinite
    assert call is not None
    assert call.name == "aten::mul.Tensor"
