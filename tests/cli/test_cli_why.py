"""`torch-promote why`: the command line, its width, its JSON, and the examples of its help."""

from __future__ import annotations

import json
import re
import shlex

import pytest

import torch_promote as tp
from torch_promote.cli.program import main, make_parser
from torch_promote.cli.why import EXAMPLES

LONG = "F.linear(f4[2, 3], f4[4, 3], f4[4]) + where(bool[2, 4], f8[2, 4], 1e300)"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["why", *argv])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture(autouse=True)
def _piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize(("line", "result"), EXAMPLES)
def test_the_examples_of_the_help(line: str, result: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *shlex.split(line))
    assert (status, out.splitlines()[-1]) == (0, result)


def test_the_help_shows_the_examples_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        make_parser().parse_args(["why", "--help"])
    text = capsys.readouterr().out
    assert all(line in text for line, _ in EXAMPLES)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("options", [[], ["--autocast", "cpu"]], ids=["plain", "autocast"])
def test_lines_are_as_wide_as_the_terminal(
    width: int, options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, piped, _ = run(capsys, LONG, *options)
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(capsys, LONG, *options)
    assert max(map(len, out.splitlines())) <= width
    assert " ".join(out.split()) == " ".join(piped.split())
    assert len(out.splitlines()) > len(piped.splitlines()) or width == 200


def test_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, LONG)
    steps = tp.why(LONG).steps
    assert out.splitlines()[1:-1] == [f"{number}. {step}" for number, step in enumerate(steps, start=1)]


def test_an_expression_without_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "int8[3]", "+", "int64[]")[1] == run(capsys, "int8[3] + int64[]")[1]
    assert run(capsys, "cat([int8[2],", "f2[2]])")[0] == 0
    assert run(capsys, "-int8[3]")[1].endswith("Result: int8 of shape [3]\n")
    assert run(capsys, "-1", "*", "int8[3]")[1].endswith("Result: int8 of shape [3]\n")
    assert run(capsys, "-softmax(f2[3], 0)", "--json")[0] == 0


def test_an_expression_that_the_shell_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "int8[3]", "README.md", "docs", "int64[]")
    assert (status, out) == (2, "")
    assert err.endswith("The shell may have changed it: put the expression in quotes.\n")
    assert err.count("\n") == 1
    assert "quotes" not in run(capsys, "int8[3] README.md")[2]


def test_a_region(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    assert run(capsys, "f4[2, 2] @ f4[2, 2]", "--autocast", "cpu")[1].endswith("Result: bfloat16 of shape [2, 2]\n")
    assert "with float16" in run(capsys, "f4[2, 2] @ f4[2, 2]", "--autocast", "cpu", "--dtype", "half")[1]
    policy = tp.Policy.stock().override({"matmul": "fp32"})
    policy.save(f"{tmp_path}/mine.toml")
    status, out, _ = run(capsys, "f4[2, 2] @ f4[2, 2]", "--autocast", "cpu", "--policy", f"{tmp_path}/mine.toml")
    assert (status, out.splitlines()[-1]) == (0, "Result: float32 of shape [2, 2]")
    assert "mine.toml" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["int8[3] + 1", "--dtype", "half"], "--dtype and --policy need --autocast cpu or --autocast cuda."),
        (["int8[3] + 1", "--autocast", "cpu", "--policy", "no-such"], "no-such"),
        (["int8[3] + 1", "--autocast", "cpu", "--dtype", "int8"], "int8"),
        (["sofmax(f4[2])"], "no function of PyTorch is called 'sofmax'. Closest: softmax"),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not re.search(r"\.\.(?!\.)", err)


@pytest.mark.parametrize("argv", [["int8[3] + 1", "--default-dtype", "int8"], ["int8[3] + 1", "--dtype", "foo"]])
def test_errors_of_options_have_no_double_full_stop(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["why", *argv])
    err = capsys.readouterr().err
    assert ".." not in err
    assert err.count("\n") == 1


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "max(f2[2, 3], 1)", "--autocast", "cpu", "--json")
    data = json.loads(out)
    assert status == 0
    assert data["results"] == [{"dtype": "float16", "shape": [2]}, {"dtype": "int64", "shape": [2]}]
    assert (data["dtype"], data["shape"], data["error"]) == ("float16", [2], None)
    assert data["autocast"] == "under autocast on cpu with bfloat16"
    assert data["steps"]
    status, out, _ = run(capsys, "f2[2, 2] @ bf16[2, 2]", "--json")
    data = json.loads(out)
    assert (status, data["raised_by"], data["results"]) == (1, "PyTorch", [])


def test_a_default_dtype_and_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "int32[3] + 5.5", "--default-dtype", "float64", "--rule", "jax")
    assert (status, out, err) == (0, tp.why("int32[3] + 5.5", default_dtype="double", rule="jax").text(None) + "\n", "")
    status, out, _ = run(capsys, "--rule", "strict", "int32[3] + 5.5")
    assert status == 1
    assert 'The rule raises: aten::add.Tensor: the promotion rule "strict" has no common dtype' in out


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
    arguments: tuple[str, ...], data: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, *arguments, "--json")
    printed = json.loads(out)
    assert status == (0 if printed["error"] is None else 1)
    assert printed["expression"] == arguments[0]
    assert printed["steps"]
    assert printed | data == printed
