"""`torch-promote tune`: the policy that it saves, what it prints and writes, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import torch_promote as tp
from helpers.command_line import Capture, error_of, terminal_of_80_columns
from helpers.program_defaults import as_it_was
from helpers.targets import GOOD, target_file
from torch_promote.cli.program import main
from torch_promote.numerics.tuning import Tuning

__all__ = ["as_it_was", "target_file", "terminal_of_80_columns"]  # fixtures

TARGET = "train.py:make"
ASK = ["tune", TARGET, "--tolerance", "1e-3"]


def test_it_saves_the_policy_that_it_found(target_file: Path, capsys: Capture) -> None:
    files = ["-o", "mine.toml", "--html", "run.html", "--json", "run.json"]
    assert main([*ASK, *files]) == 0
    out, err = capsys.readouterr()
    tuning = Tuning.load("run.json")
    assert out.replace("a step\n", "").split() == str(tuning).split()
    assert err == "torch-promote: wrote mine.toml, run.html, run.json\n"
    assert dict(tuning.overrides) == {"aten::mul": "fp32"}
    assert tp.Policy.load("mine.toml") == tuning.policy
    assert Path("run.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["compare", TARGET, "--candidate", "mine.toml", "--tolerance", "1e-3"]) == 0


def test_the_options_of_the_search(target_file: Path, capsys: Capture) -> None:
    options = ["--level", "site", "--budget", "30", "--batches", "2", "--dtype", "bfloat16", "--seed", "3"]
    assert main([*ASK[:2], "--tolerance", "loss=1e-3", *options, "--resume", "runs.json", "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert (data["level"], data["budget"], data["tolerance"], data["met"]) == ("site", 30, {"loss": 1e-3}, True)
    assert err.count("a step\n") == 2 * data["runs"]
    assert Path("runs.json").exists()


def test_a_policy_that_needs_no_override(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(GOOD)
    files = ["-o", "mine.toml", "--html", "run.html", "--json", "run.json"]
    assert main([*ASK[:3], "0.5", *files]) == 0
    out, err = capsys.readouterr()
    assert out.replace("a step\n", "").startswith("nothing to do: the current policy meets the tolerance without an")
    assert err == (
        "torch-promote: wrote run.json\n"
        "torch-promote: wrote mine.toml: the policy in force, as it is\n"
        "torch-promote: there was no search, so there is no page.\n"
    )
    assert tp.Policy.load("mine.toml") == tp.Policy.stock()
    assert json.loads(Path("run.json").read_text())["met"] is True
    assert main([*ASK[:3], "0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["why"].startswith("nothing to do: ")


def test_a_tolerance_that_float32_does_not_meet(target_file: Path, capsys: Capture) -> None:
    assert main(["tune", "train.py:checked", "--tolerance", "1e-3", "-o", "mine.toml"]) == 1
    assert capsys.readouterr().out.replace("a step\n", "").startswith("not met: ")
    assert not Path("mine.toml").exists()


def test_ctrl_c_reports_what_is_known(target_file: Path, capsys: Capture) -> None:
    assert main(["tune", "train.py:interrupted", *ASK[2:], "-o", "mine.toml"]) == 130
    assert "\nInterrupted. " in capsys.readouterr().out
    assert Path("mine.toml").exists()


def test_ctrl_c_before_anything_is_known(target_file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(step: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_promote.cli.tune.tune", interrupted)
    assert main([*ASK, "-o", "mine.toml"]) == 130
    assert "interrupted in the first runs: nothing is known, and nothing was saved." in capsys.readouterr().err
    assert not Path("mine.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "mine.json"], "-o mine.json: the file's name has to end in .toml."),
        (["-o", "no/mine.toml"], "-o no/mine.toml: there is no folder 'no'. Create it first."),
        (["--html", "run"], "--html run: the file's name has to end in .html."),
        (["--tolerance", "loss=1e-3"], "give one number for all metrics, or NAME=NUMBER for each, not both."),
        (["--tolerance", "top1=0"], "--tolerance top1=0: expected a number above 0 or NAME=NUMBER, such as 1e-3 or"),
        (["--budget", "2"], "budget (the maximum number of runs) must be 6 or more, got 2"),
    ],
)
def test_a_wrong_command_line(target_file: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    assert message in error_of(capsys, *ASK, *arguments)
