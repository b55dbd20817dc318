"""The default policy of TORCH_PROMOTE_POLICY: commands show it, say that it is in force, and refuse a wrong one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torch_promote as tp
from helpers.command_line import Capture, cells_of, json_of, terminal_of_80_columns, text_of, wide
from helpers.parity_reports import report as parity_report_of
from helpers.program_defaults import as_it_was
from helpers.subprocesses import environment
from torch_promote.checking.report import CrosscheckReport
from torch_promote.cli import parity_report
from torch_promote.cli.terminal import render
from torch_promote.regions.defaults import spell_default_policy

__all__ = ["as_it_was", "terminal_of_80_columns", "wide"]  # fixtures

CUDA = "Policy.named('cuda'), from TORCH_PROMOTE_POLICY=cuda"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_PROMOTE_POLICY", "cuda")
    tp.set_default_policy("cuda")


def test_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, cuda: None) -> None:
    assert spell_default_policy() == CUDA
    monkeypatch.setenv("TORCH_PROMOTE_POLICY", "no such policy")
    assert spell_default_policy() == "Policy.named('cuda'), from set_default_policy"
    tp.set_default_policy(None)
    assert spell_default_policy() == ""


def test_info(capsys: Capture, wide: None, cuda: None) -> None:
    with tp.register_policy("relu", "fp32", device_type="cpu"):
        info, text = json_of(capsys, "info"), text_of(capsys, "info")
    assert info["default_policy"] == CUDA
    assert info["registered_policies"] == [{"op": "aten::relu", "device": "cpu", "policy": "fp32"}]
    assert ["default", "policy", *CUDA.split()] in cells_of(text)
    assert "aten::relu on cpu: fp32" in text
    tp.set_default_policy(None)
    assert any(
        line.split() == ["default", "policy", "PyTorch's", "own"] for line in text_of(capsys, "info").splitlines()
    )


def test_parity(wide: None, cuda: None) -> None:
    report = parity_report_of("good")
    assert f"note: ours ran under the default policy, {CUDA}. Stock did not." in render(parity_report.draw(report))
    assert report.to_dict()["default_policy"] == CUDA
    tp.set_default_policy(None)
    assert "default policy" not in render(parity_report.draw(parity_report_of("good")))


def test_crosscheck(cuda: None) -> None:
    with tp.crosscheck() as report:
        pass
    assert f"default policy                 {CUDA}" in str(report).splitlines()
    assert report.to_dict()["default_policy"] == CUDA
    assert ("default policy", CUDA) in report.content().facts
    tp.set_default_policy(None)
    whole = CrosscheckReport()
    assert "default policy" not in str(whole)
    whole.add(report)
    assert whole.default_policy == CUDA


@pytest.mark.parametrize("command", [["-m", "torch_promote", "info"], ["torch-promote", "info"]], ids=" ".join)
def test_a_wrong_one_is_one_line_and_status_2(command: list[str], tmp_path: Path) -> None:
    if command[0] == "torch-promote":  # the script that pip makes of the entry point
        script = tmp_path / command[0]
        script.write_text("from _torch_promote_hooks import main\nimport sys\nsys.exit(main())\n")
        command = [str(script), *command[1:]]
    process = subprocess.run(
        [sys.executable, *command],
        env=environment(TORCH_PROMOTE_POLICY="cudda"),
        text=True,
        timeout=120,
        check=False,
        capture_output=True,
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        "torch-promote: error: the environment variable TORCH_PROMOTE_POLICY is 'cudda': no policy is called 'cudda'. "
        "Closest: cuda. Legal: stock, cpu, cuda, fp32_safe, off, or the path of a file, which contains a separator or "
        "ends with .toml. Correct it, or unset it.\n"
    )
