"""A trace on a device whose backward runs on a separate thread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.counting_mode import count_both_ways, counts_of
from helpers.plan_from_report import differences
from helpers.traced_programs import Block
from torch_promote.reading.trace import trace
from torch_promote.reading.trace_report import TraceReport


def _model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).cuda(), torch.randn(2, 3, 8).cuda().requires_grad_()


@pytest.mark.parametrize("kind", ["ours", "stock", "overrides"])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_step(use_reentrant: bool | None, kind: str) -> None:
    model, x = _model()
    regions: dict[str, Any] = {
        "ours": lambda: tp.my_autocast("cuda"),
        "stock": lambda: torch.autocast("cuda"),
        "overrides": lambda: tp.my_autocast("cuda", overrides={"linear": "fp32", "softmax": torch.float16}),
    }

    def step() -> None:
        with regions[kind]():
            y = x
            for block in model:
                y = block(y) if use_reentrant is None else checkpoint(block, y, use_reentrant=use_reentrant)
        y.float().square().mean().backward()

    report, mode = count_both_ways(step, model)
    assert counts_of(report) == mode.counts
    assert list(differences(report.calls)) == []
    _check_backward(report, recomputes=use_reentrant is not None)


def _check_backward(report: TraceReport, *, recomputes: bool) -> None:
    backward = report.calls.where(phase="backward")
    assert {call.module for call in backward.where(op="native_layer_norm_backward")} == {"0.norm", "1.norm"}
    assert {"0.mix", "0.up", "0.down", "1.mix", "1.up", "1.down"} <= {call.module for call in backward}
    assert len({call.thread for call in report.calls}) == 2
    recomputed = report.calls.where(phase="recompute", op="linear")
    assert bool(recomputed) == recomputes
    forward = {(call.module, call.policy_source, call.policy_name) for call in report.calls.where(op="linear")}
    assert {(call.module, call.policy_source, call.policy_name) for call in recomputed} <= forward
    assert not any("before the trace" in call.policy_source for call in report.calls)
    assert not report.not_seen


def test_a_backward_inside_of_the_region() -> None:
    model, x = _model()
    with trace(model) as report, tp.my_autocast("cuda", overrides={"mm": "fp32"}):
        model(x).float().square().mean().backward()
    said = {call.policy_source for call in report.calls.where(op="aten::mm", phase="backward")}
    assert len(said) == 1
    assert next(iter(said)).startswith(f"region at {__file__}:")
    assert list(differences(report.calls)) == []
