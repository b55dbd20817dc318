"""Commands with --device cuda-stand-in start themselves again, in a process that has the device."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import cuda_stand_in
import torch_promote
from helpers.command_line import Capture, error_of, terminal_of_80_columns
from torch_promote.cli.program import main

__all__ = ["terminal_of_80_columns"]

STAND_IN = ("--device", "cuda-stand-in")


@pytest.fixture
def available() -> None:
    if reason := cuda_stand_in.why_not():
        pytest.skip(reason)


@pytest.mark.usefixtures("available")
def test_an_error_keeps_its_exit_status(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *STAND_IN, "--case", "no such case"]) == 2
    assert "--case 'no such case' matches no selected case." in capfd.readouterr().err


def test_a_process_of_the_command_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str], str]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> NoReturn:
        started.append((path, command[1:], environment["PYTHONPATH"]))
        raise SystemExit(7)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(sys, "argv", ["torch-promote", "parity", *STAND_IN])
    monkeypatch.setenv("PYTHONPATH", "mine")
    with pytest.raises(SystemExit):
        main()
    root = Path(torch_promote.__file__).parents[1]
    again = ["-m", "cuda_stand_in", "-m", "torch_promote", "parity", *STAND_IN]
    assert started == [(sys.executable, again, f"{root}:{root / 'tests'}:mine")]


def test_an_installed_package_has_none(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_promote, "__file__", str(tmp_path / "torch_promote" / "__init__.py"))
    assert error_of(capsys, "parity", *STAND_IN) == (
        "torch-promote: error: device 'cuda-stand-in' is made by the tests of torch_promote, which are not installed "
        "with the package. Run the command in a source checkout: make build, .venv/bin/python -m torch_promote. "
        "For dtypes, shapes and strides alone, parity has fake-cuda.\n"
    )


def test_a_cuda_build_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.joinpath("lib").mkdir()
    tmp_path.joinpath("lib", "libtorch_cuda.so").touch()
    monkeypatch.setattr(cuda_stand_in.build, "torch_folder", lambda: tmp_path)
    reason = cuda_stand_in.why_not()
    assert reason is not None
    assert "is built with CUDA: its own kernels are registered for device type cuda." in reason
