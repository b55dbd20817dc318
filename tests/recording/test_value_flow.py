"""A trace with values: its losses that are not finite, and the call that made the first inf or NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torch_promote as tp
from torch_promote.reading.trace_report import TraceReport

INF, HALF = float("inf"), torch.float16


class Attention(nn.Module):
    """Has a mask of -inf, which is no fault, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        mask = torch.zeros(4, 4).masked_fill(torch.eye(4) > 0, -INF)
        return self.head((y @ y.t() + mask).softmax(-1) @ y)  # type: ignore[no-any-return]


def train(
    change: Callable[[Attention, int], Any],
    *,
    steps: int = 6,
    optimizer: bool = True,
    scale: bool = False,
    **options: Any,
) -> TraceReport:
    """Traces a training in which something is changed before each step."""
    torch.manual_seed(0)
    model = Attention()
    sgd, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", enabled=scale, init_scale=2.0)
    with tp.trace(model, values=True, **options) as report:
        for step in range(steps):
            factor = change(model, step)
            model.zero_grad()
            with tp.my_autocast("cpu", HALF):
                loss = model(torch.ones(4, 4)).float().pow(2).mean() * (factor if isinstance(factor, float) else 1.0)
            scaler.scale(loss).backward()
            if optimizer:
                scaler.step(sgd)
                scaler.update()
    return report


@torch.no_grad()
def too_large(model: Attention, step: int) -> None:
    model.head.weight.fill_(1e5)


def from_step(first: int, what: Any) -> Callable[[Attention, int], Any]:
    return lambda model, step: (what(model, step) if callable(what) else what) if step >= first else None


@pytest.mark.parametrize(
    ("change", "options", "expected", "first"),
    [
        (lambda model, step: None, {}, "", None),
        (lambda model, step: None, {"scale": True}, "", None),
        pytest.param(too_large, {}, "all 6 losses are NaN", ("aten::linear", "head", 0), marks=pytest.mark.slow),
        (too_large, {"steps": 1}, "the only loss is NaN", ("aten::linear", "head", 0)),
        pytest.param(
            *(too_large, {"scale": True, "steps": 3}, "all 3 losses are NaN", ("aten::linear", "head", 0)),
            marks=pytest.mark.slow,
        ),
        (from_step(4, too_large), {}, "2 of 6 losses are NaN, from step 4", ("aten::linear", "head", 4)),
        pytest.param(
            *(from_step(5, INF), {}, "1 of 6 losses is inf, from step 5", ("aten::mul.Tensor", "", 5)),
            marks=pytest.mark.slow,
        ),
        (from_step(3, INF), {"optimizer": False}, "3 of 6 losses are inf, from loss 3, counted from 0", None),
        (lambda model, step: float("nan"), {"max_calls": 0}, "all 6 losses are NaN", None),
    ],
)
def test_losses(
    change: Callable[[Attention, int], Any],
    options: dict[str, Any],
    expected: str,
    first: tuple[str, str, int] | None,
    tmp_path: Path,
) -> None:
    report = train(change, **options)
    losses = report.nonfinite.about_losses(report.steps)
    assert losses.startswith(expected)
    assert bool(losses) == bool(expected)
    assert report.nonfinite.losses == options.get("steps", 6)
    content, title = report.content(), str(report).partition("\n")[0]
    if not expected:
        assert report.nonfinite.calls == 0
        assert content.good is None
        return
    assert title.endswith(losses)
    assert content.good is False
    assert content.verdict.lower().startswith(
        f"{losses.lower()}. {'to see' if options.get('max_calls') == 0 else 'the'} "
    )
    assert content.facts[0][0] == "losses"
    if first is not None:
        call = report.first_nonfinite
        assert call is not None
        assert (call.name, call.module, report.nonfinite.call_step) == first
        explanation = report.explain(first[1] or "(model)")
        assert explanation.content().good is False
        assert losses in explanation.content().verdict
        assert f"step {first[2]}" in explanation.content().verdict
        assert report.explain("body").content().good is None
    if not report.dropped:
        report.save(tmp_path / "run.jsonl.gz")
        loaded = TraceReport.load(tmp_path / "run.jsonl.gz")
        assert loaded.nonfinite == report.nonfinite
        assert str(loaded) == str(report)
    report.save(tmp_path / "run.html")
    assert losses in (tmp_path / "run.html").read_text()


def cache() -> Tensor:
    """Writes parts of a buffer. One of them gets NaN."""
    rows = torch.empty(3, 4)
    rows[0] = 1.0
    rows[1] = torch.zeros(4).log() * 0
    rows[2] = 2.0
    return rows[0] + rows[1] + rows[2]


def masked_rows() -> Tensor:
    return torch.full((2, 2), -INF).softmax(-1).sum()


@pytest.mark.parametrize(
    ("program", "first", "has_nan"),
    [
        (lambda: torch.ones(2).log(), None, False),
        (lambda: torch.full((2,), -INF).exp(), None, False),
        (lambda: torch.zeros(2).fill_(INF).neg(), None, False),
        (lambda: torch._foreach_add_([torch.zeros(2)], [-INF]), None, False),
        (
            lambda: functional.scaled_dot_product_attention(
                *[torch.ones(2, 2)] * 3, attn_mask=torch.zeros(2, 2).fill_(-1)
            ),
            None,
            False,
        ),
        (lambda: torch.zeros(2).log(), "aten::log", False),
        (lambda: torch.zeros(2).log().exp().mul(2), "aten::log", False),
        (lambda: [one := torch.zeros(2).log(), one - one], "aten::log", True),
        (masked_rows, "aten::softmax.int", True),
        (cache, "aten::log", True),
        (lambda: torch._foreach_log([torch.ones(2), -torch.ones(2)])[1].t().mul(2), "aten::_foreach_log", True),
        (lambda: [xs := [-torch.ones(2)], torch._foreach_sqrt_(xs), xs[0] * 2], "aten::_foreach_sqrt_", True),
        (lambda: torch.empty(5).view(5), None, False),
    ],
)
def test_which_call_made_it(program: Callable[[], Any], first: str | None, has_nan: bool) -> None:
    """Without a loss, only a NaN is worth the headline."""
    with tp.trace(values=True) as report:
        program()
    call = report.first_nonfinite
    assert (None if call is None else call.name) == first
    assert (report.content().good is False) == has_nan


def test_without_values() -> None:
    with tp.trace() as report:
        (torch.zeros(2, requires_grad=True).log() * 0).sum().backward()
    found = report.nonfinite
    assert (found.losses, found.nans, found.first_loss, found.calls, found.first_call) == (1, 1, 0, 0, None)
    assert "run `torch-promote find-nan`" in report.content().verdict
