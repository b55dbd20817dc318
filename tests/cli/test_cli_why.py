"""`torch-promote why`: its text, width, JSON, errors, and the examples of its help."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.command_line import Capture
from torch_promote.cli.program import main
from torch_promote.cli.why import EXAMPLES

LONG = "F.linear(f4[2, 3], f4[4, 3], f4[4]) + where(bool[2, 4], f8[2, 4], 1e300)"


def run(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    return (main(["why", *argv]), *capsys.readouterr())


@pytest.fixture(autouse=True)
def _piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize(("line", "result"), EXAMPLES)
def test_the_examples_of_the_help(line: str, result: str, capsys: Capture) -> None:
    status, out, _ = run(capsys, *shlex.split(line))
    assert (status, out.splitlines()[-1]) == (0, result)


@pytest.mark.parametrize("width", [60, 200])
def test_lines_are_as_wide_as_the_terminal(width: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    _, piped, _ = run(capsys, LONG, "--autocast", "cpu")
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(capsys, LONG, "--autocast", "cpu")
    assert max(map(len, out.splitlines())) <= width
    assert " ".join(out.split()) == " ".join(piped.split())


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (("--default-dtype", "float64"), {"default_dtype": torch.float64}),
        (("--rule", "numpy"), {"rule": "numpy"}),
        (("--autocast", "cpu", "--dtype", "half"), {"autocast": "cpu", "dtype": torch.float16}),
    ],
)
def test_it_prints_the_derivation(capsys: Capture, options: tuple[str, ...], arguments: dict[str, Any]) -> None:
    expected = tp.why("int32[3] + 5.5", **arguments).text(None)
    assert run(capsys, "int32[3] + 5.5", *options) == (0, f"{expected}\n", "")


def test_an_expression_without_quotes(capsys: Capture) -> None:
    assert run(capsys, "int8[3]", "+", "int64[]")[1] == run(capsys, "int8[3] + int64[]")[1]
    assert run(capsys, "-int8[3]")[1].endswith("Result: int8 of shape [3]\n")
    assert run(capsys, "-1", "*", "int8[3]")[1].endswith("Result: int8 of shape [3]\n")
    assert run(capsys, "-softmax(f2[3], 0)", "--json")[0] == 0


def test_a_policy_file(capsys: Capture, tmp_path: Path) -> None:
    tp.Policy.stock().override({"matmul": "fp32"}).save(tmp_path / "mine.toml")
    options = ("--autocast", "cpu", "--policy", str(tmp_path / "mine.toml"))
    status, out, _ = run(capsys, "f4[2, 2] @ f4[2, 2]", *options)
    assert (status, out.splitlines()[-1]) == (0, "Result: float32 of shape [2, 2]")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["int8[3] + 1", "--dtype", "half"], "--dtype and --policy need --autocast cpu or --autocast cuda."),
        (["int8[3] + 1", "--autocast", "cpu", "--policy", "no-such"], "no-such"),
        (["int8[3] + 1", "--autocast", "cpu", "--dtype", "int8"], "int8"),
        (["sofmax(f4[2])"], "no function of PyTorch is called 'sofmax'. Closest: softmax"),
        (["int32[3] +"], "'int32[3] +' is not a valid expression"),
        (["int8[3]", "README.md", "docs"], "The shell may have changed it: put the expression in quotes."),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: Capture) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (("int8[] + int16[]",), {"dtype": "int16", "shape": [], "error": None, "raised_by": None}),
        (("int8[3] + int16[]", "--rule", "strict"), {"rule": "strict", "dtype": None, "raised_by": "the rule"}),
        (("uint16[3] + int8[3]",), {"rule": "torch", "dtype": None, "raised_by": "PyTorch"}),
        (
            ("max(f2[2, 3], 1)", "--autocast", "cpu"),
            {
                "results": [{"dtype": "float16", "shape": [2]}, {"dtype": "int64", "shape": [2]}],
                "autocast": "under autocast on cpu with bfloat16",
            },
        ),
    ],
)
def test_json(arguments: tuple[str, ...], data: dict[str, Any], capsys: Capture) -> None:
    status, out, _ = run(capsys, *arguments, "--json")
    printed = json.loads(out)
    assert status == (0 if printed["error"] is None else 1)
    assert printed["steps"]
    assert printed | data == printed
