"""`torch-promote explain`: what `TraceReport.explain` returns, for a file that was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.command_line import Capture, error_of, json_of, terminal_of_80_columns, text_of
from torch_promote.cli.terminal import width_of_output
from torch_promote.observe.trace_report import TraceReport

__all__ = ["terminal_of_80_columns"]  # a fixture


@pytest.fixture(scope="module")
def report() -> TraceReport:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    with tp.trace(model) as report, tp.my_autocast("cpu"):
        model(torch.ones(2, 4))
    return report


@pytest.fixture
def file(report: TraceReport, tmp_path: Path) -> str:
    path = tmp_path / "run.json"
    report.save(path)
    return str(path)


@pytest.mark.parametrize("pattern", ["0", "softmax", "aten::linear", "test_cli_explain.py"])
def test_it_prints_what_the_report_says(report: TraceReport, file: str, capsys: Capture, pattern: str) -> None:
    explanation = report.explain(pattern)
    assert text_of(capsys, "explain", file, pattern) == f"{explanation.text(width_of_output())}\n"
    assert json_of(capsys, "explain", file, pattern) == explanation.to_dict()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("sofmax", "no module, op or line of this trace is 'sofmax'. Closest: softmax"),
        ("", "explain what? Got ''. Legal: a module's path"),
    ],
)
def test_no_match(file: str, capsys: Capture, pattern: str, message: str) -> None:
    assert f"torch-promote: error: {message}" in error_of(capsys, "explain", file, pattern)


def test_no_trace(tmp_path: Path, capsys: Capture) -> None:
    gone, other, text = (str(tmp_path / name) for name in ("gone.json", "other.json", "text.json"))
    Path(other).write_text(json.dumps({"traceEvents": []}))
    Path(text).write_text("no JSON")
    assert f"there is no file '{gone}'. `torch-promote trace --json" in error_of(capsys, "explain", gone, "softmax")
    assert 'its "format" is None' in error_of(capsys, "explain", other, "softmax")
    assert "it is not JSON" in error_of(capsys, "explain", text, "softmax")
    assert "there is no file" in error_of(capsys, "explain", str(tmp_path), "softmax")
