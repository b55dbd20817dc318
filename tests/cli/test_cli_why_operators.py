"""`torch-promote why` on operators: its output, errors and JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
import torch

from torch_promote.cli import why as cli_why
from torch_promote.reference.derivation.derivation import why


def parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser(prog="torch-promote")
    cli_why.add_parser(commands.add_subparsers())
    return commands


def run(*argv: str) -> int:
    args = parser().parse_args(["why", *argv])
    status: int = args.run(args)
    return status


@pytest.fixture(autouse=True)
def _piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_the_command_prints_a_derivation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("int32[3] + 5.5", "--default-dtype", "float64") == 0
    printed = capsys.readouterr()
    assert printed.out == why("int32[3] + 5.5", default_dtype=torch.float64).text(None) + "\n"
    assert printed.out.endswith("Result: float64 of shape [3]\n")
    assert printed.err == ""


def test_the_command_says_when_pytorch_raises(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("uint16[3] + int32[3]") == 1
    assert "PyTorch raises: uint16 and int32 have no common dtype" in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_read_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("int32[3] +") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("torch-promote why: 'int32[3] +' is not a valid expression")
    assert printed.err.count("\n") == 1


def test_the_command_refuses_a_default_dtype_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run("int32[3] + 5.5", "--default-dtype", "int8")
    assert raised.value.code == 2
    assert "'int8' is not a default dtype. Legal: float16, bfloat16, float32, float64" in capsys.readouterr().err


def test_the_command_takes_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--rule", "numpy", "int32[3] + 5.5") == 0
    assert capsys.readouterr().out == why("int32[3] + 5.5", rule="numpy").text(None) + "\n"
    assert run("--rule", "strict", "int32[3] + 5.5") == 1
    assert 'The rule raises: add: the promotion rule "strict" has no common dtype' in capsys.readouterr().out


def test_the_command_refuses_an_unknown_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run("int32[3] + 5.5", "--rule", "matlab")
    assert raised.value.code == 2
    assert "invalid choice: 'matlab'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (
            ("int8[3] + 2.5", "--rule", "jax", "--default-dtype", "float64"),
            {"rule": "jax", "dtype": "float64", "shape": [3], "error": None, "raised_by": None},
        ),
        (("int8[] + int16[]",), {"rule": "torch", "dtype": "int16", "shape": [], "error": None, "raised_by": None}),
        (("int8[3] + int16[]", "--rule", "strict"), {"rule": "strict", "dtype": None, "raised_by": "the rule"}),
        (("uint8[3] + int8[2]", "--rule", "jax"), {"rule": "jax", "dtype": None, "raised_by": "PyTorch"}),
        (("uint16[3] + int8[3]",), {"rule": "torch", "dtype": None, "raised_by": "PyTorch"}),
    ],
)
def test_the_command_prints_json(
    arguments: tuple[str, ...], data: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(*arguments, "--json")
    printed = json.loads(capsys.readouterr().out)
    assert status == (0 if printed["error"] is None else 1)
    assert printed["expression"] == arguments[0]
    assert printed["steps"]
    assert printed | data == printed
