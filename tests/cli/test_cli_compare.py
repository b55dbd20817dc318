"""`torch-promote compare`: what it prints and writes, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.command_line import Capture, error_of, terminal_of_80_columns
from helpers.program_defaults import as_it_was
from helpers.targets import GOOD, MAKE, target_file
from torch_promote.cli.program import main
from torch_promote.numerics.comparison import Comparison

__all__ = ["as_it_was", "target_file", "terminal_of_80_columns"]  # fixtures

TARGET = "train.py:make"


def test_it_prints_the_comparison(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(GOOD)
    assert main(["compare", TARGET, "--json", "run.json", "--html", "run.html"]) == 0
    out, err = capsys.readouterr()
    comparison = Comparison.load("run.json")
    assert out == "a step\n" * 3 + f"{comparison}\n"
    assert err == "torch-promote: wrote run.html, run.json\n"
    assert Path("run.html").read_text().startswith("<!DOCTYPE html>")
    assert {site.module for site in comparison.sites} >= {"first", "last", ""}
    assert max(map(len, out.splitlines())) <= 80


def test_json_has_stdout_to_itself(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(GOOD)
    assert main(["compare", TARGET, "--json", "--gradients", "--batches", "2"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert Comparison.from_dict(data).to_dict() == data
    assert "first.weight" in [one["name"] for one in data["gradients"]]
    assert err == "a step\n" * 6


def test_results_that_are_not_finite_exit_with_1(target_file: Path, capsys: Capture) -> None:
    assert main(["compare", TARGET]) == 1
    out, err = capsys.readouterr()
    assert "The candidate's loss is nan" in out
    assert err == "torch-promote: loss is not finite, and the reference's is.\n"


def test_the_policies_are_those_that_were_named(target_file: Path, capsys: Capture) -> None:
    Path("mine.toml").write_text('format = 1\n[all]\nmul = "fp32"\n')
    assert main(["compare", TARGET, "--candidate", "mine.toml"]) == 0
    assert "comparison of a changed policy with fp32" in capsys.readouterr().out
    assert main(["compare", TARGET, "--candidate", "off", "--reference", "off"]) == 0
    assert "No op has an error, and the results are identical" in capsys.readouterr().out


@pytest.mark.parametrize(("tolerance", "status"), [(["1e-9"], 1), (["loss=1e-9"], 1), (["0.5"], 0), (["loss=0.5"], 0)])
def test_a_tolerance_decides_the_status(target_file: Path, capsys: Capture, tolerance: list[str], status: int) -> None:
    target_file.write_text(GOOD)
    assert main(["compare", TARGET, "--tolerance", *tolerance]) == status
    err = capsys.readouterr().err
    assert ("torch-promote: the error of loss, " in err) == ("is over 1e-9." in err) == (status == 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "run.htm"], "--html run.htm: the file's name has to end in .html."),
        (["--json", "no/run.json"], "--json no/run.json: there is no folder 'no'. Create it first."),
        (["--tolerance", "x"], "--tolerance x: expected a number, 0 or more, or NAME=NUMBER, such as 1e-3 or loss"),
        (["--tolerance", "-1"], "--tolerance -1: expected a number, 0 or more"),
        (["--tolerance", "=1"], "--tolerance =1: expected a number, 0 or more"),
        (["--tolerance", "1", "--tolerance", "a=1"], "give one number for all metrics, or NAME=NUMBER for each"),
        (["--tolerance", "a=1", "--tolerance", "a=2"], "--tolerance a=2: a already has 1. Name it once."),
        (["--candidate", "nope"], "nope"),
        (["--batches", "0"], "batches (the number of times a run calls step) must be 1 or more, got 0."),
    ],
)  # fmt: skip
def test_a_wrong_command_line(target_file: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    assert message in error_of(capsys, "compare", TARGET, *arguments)
    assert [path.name for path in target_file.parent.glob("run*")] == []


def test_a_tolerance_of_a_metric_that_is_not_there(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(GOOD)
    assert main(["compare", TARGET, "--tolerance", "los=1"]) == 2
    assert "the step returns no 'los'. Closest: loss. It returns loss." in capsys.readouterr().err


def test_a_target_that_raises(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(MAKE.replace("x = torch.randn(2, 4)", "x = torch.randn(2, 3)"))
    assert main(["compare", TARGET]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torch-promote: error: the step of train.py:make raised RuntimeError: ")
    assert "mat1 and mat2 shapes" in error
    assert error.count("  File ") == 2


def test_a_step_that_does_not_repeat_itself(target_file: Path, capsys: Capture) -> None:
    assert main(["compare", "train.py:odd"]) == 2
    assert "torch-promote: error: " in capsys.readouterr().err
