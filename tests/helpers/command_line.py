"""Runs the command line inside the test's process, for tests of what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_promote.cli.program import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes output independent of the terminal in which the test runs. Import it to use it."""
    for name in ("FORCE_COLOR", "PYTHON_COLORS", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wrap output, as in a pipe."""
    monkeypatch.delenv("COLUMNS")


def text_of(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def json_of(capsys: Capture, *arguments: str) -> dict[str, Any]:
    data = json.loads(text_of(capsys, *arguments, "--json"))
    assert isinstance(data, dict)
    return data


def error_of(capsys: Capture, *arguments: str) -> str:
    """The message of a command that ends with 2 and prints nothing else."""
    try:
        status: object = main(arguments)
    except SystemExit as error:  # from argparse
        status = error.code
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def cells_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]
