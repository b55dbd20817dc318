"""Progress of long commands: a bar on a terminal, which stderr is, and none in a pipe."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import torch_promote as tp
from torch_promote.cli.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def replace_stderr(kind: str, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """To be called in the test itself: pytest puts its own there between the fixtures and the test."""
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal() if kind == "terminal" else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.parametrize("quiet", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_bench_and_parity(kind: str, quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = replace_stderr(kind, monkeypatch)
    with progress("bench", 2, quiet=quiet) as step:
        step("one")
        step("two")
    assert ("2/2" in stderr.getvalue()) == stderr.isatty()
    assert bool(stderr.getvalue()) == stderr.isatty()


@pytest.mark.parametrize("what", ["compare", "tune"])
@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_compare_and_tune(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1))

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.linspace(0, 1, 16).view(2, 8)).square().mean()

    stderr = replace_stderr(kind, monkeypatch)
    if what == "compare":
        tp.compare(step, model=model)
    else:
        tp.tune(step, model=model, tolerance=1e-7, budget=6)
    assert (what in stderr.getvalue()) == stderr.isatty()
    assert bool(stderr.getvalue()) == stderr.isatty()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    model = torch.nn.Linear(2, 2)

    def step() -> torch.Tensor:
        with torch.autocast("cpu"):
            return model(torch.ones(1, 2)).sum()

    tp.compare(step, model=model, progress=False)
    assert stream.getvalue() == ""
