"""`torch-promote explain`: what `TraceReport.explain` returns, for a file that was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.command_line import Capture, error_of, json_of, terminal_of_80_columns, text_of

__all__ = ["terminal_of_80_columns"]  # a fixture


@pytest.fixture(scope="module")
def report() -> tp.TraceReport:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    with tp.trace(model) as report, tp.my_autocast("cpu"):
        model(torch.ones(2, 4))
    return report


@pytest.fixture
def file(report: tp.TraceReport, tmp_path: Path) -> str:
    report.save(tmp_path / "run.json")
    return str(tmp_path / "run.json")


@pytest.mark.parametrize("pattern", ["0", "softmax", "aten::linear", "test_cli_explain.py"])
def test_it_prints_what_the_report_says(report: tp.TraceReport, file: str, capsys: Capture, pattern: str) -> None:
    explanation = report.explain(pattern)
    assert json_of(capsys, "explain", file, pattern) == explanation.to_dict()
    assert text_of(capsys, "explain", file, pattern) == f"{explanation.text(80)}\n"


@pytest.mark.parametrize(
    ("name", "pattern", "message"),
    [
        ("run.json", "sofmax", "no module, op or line of this trace is 'sofmax'. Closest: softmax"),
        ("run.json", "", "explain what? Got ''. Legal: a module's path"),
        ("gone.json", "softmax", "gone.json'. `torch-promote trace --json"),
        ("other.json", "softmax", 'its "format" is None'),
        ("text.json", "softmax", "it is not JSON"),
    ],
)
def test_errors(file: str, capsys: Capture, name: str, pattern: str, message: str) -> None:
    folder = Path(file).parent
    (folder / "other.json").write_text(json.dumps({"traceEvents": []}))
    (folder / "text.json").write_text("no JSON")
    assert message in error_of(capsys, "explain", str(folder / name), pattern)
