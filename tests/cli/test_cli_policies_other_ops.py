"""`torch-promote policies --op` for ops outside the op table: how they run and promote, and how to override them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import torch_promote as tp
from helpers.command_line import Capture, error_of, json_of, terminal_of_80_columns, text_of
from helpers.program_defaults import as_it_was
from torch_promote.policy.op_table import rows_by_name

__all__ = ["as_it_was", "terminal_of_80_columns"]  # fixtures


def found(capsys: Capture, *arguments: str) -> dict[str, Any]:
    [op] = json_of(capsys, "policies", *arguments)["other_ops"]
    return op  # type: ignore[no-any-return]


def test_an_op_without_a_policy(capsys: Capture) -> None:
    assert_expected_inline(
        text_of(capsys, "policies", "--op", "gelu"),
        """\
aten::gelu
  in a region  It has no policy: it runs in the dtypes of its inputs.
  promotion    Pointwise: it returns the dtype of its input.
  override     my_autocast(overrides={"gelu": "fp32"})
  overloads    gelu, gelu.out
""",
    )


@pytest.mark.parametrize(
    ("op", "promotion"),
    [
        ("add", "Promoting: it computes in the common dtype of its operands, and returns it."),
        ("relu", "Pointwise: it returns the dtype of its input."),
        ("sigmoid", "Pointwise: it keeps a floating dtype, and returns the default dtype for integers and bool."),
        ("eq", "Promoting: it compares in the common dtype of its operands, and returns bool."),
        (
            "div",
            "Promoting: it computes in the common dtype of its operands, or in the default dtype if that is integral.",
        ),
        ("embedding", "It returns the dtype of its first tensor."),
        ("inner", "A matrix product: its operands need one dtype, which it returns."),
    ],
)
def test_how_an_op_promotes(capsys: Capture, op: str, promotion: str) -> None:
    assert found(capsys, "--op", op)["promotion"] == promotion


def test_a_composite_op(capsys: Capture) -> None:
    assert found(capsys, "--op", "square")["region"] == (
        "It has no policy. PyTorch runs it as other ops, and their policies apply."
    )


def test_an_op_without_tensors(capsys: Capture) -> None:
    described = found(capsys, "--op", "randperm")
    assert described["region"] == "It takes no tensor, so autocast never acts on it."
    assert described["override"] is None


def test_the_line_that_overrides_an_op_works(capsys: Capture) -> None:
    for op in ("gelu", "relu", "add", "embedding", "add.out", "aten::sub_", "copy_", "view", "_foreach_add"):
        line = found(capsys, "--op", op)["override"]
        assert isinstance(eval(line.replace("(", "('cpu', ", 1), {"my_autocast": tp.my_autocast}), tp.my_autocast), op


def test_every_op_of_the_dispatcher_is_described(capsys: Capture) -> None:
    """In one call, which describes all of them."""
    ops = json_of(capsys, "policies", "--op", "aten::_*")["rows"]
    assert ops  # rows of the table come first
    described = json_of(capsys, "policies", "--op", "aten::[s-u]*_backward*")["other_ops"]
    assert len(described) > 10
    assert all(op["region"] and op["promotion"] and op["overloads"] and op["override"] for op in described)


def test_a_pattern_is_a_list(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = text_of(capsys, "policies", "--op", "_foreach_s*").splitlines()
    assert lines[0].split() == ["op", "promotion"]
    assert re.match(
        r"aten::_foreach_sub +Promoting", next(line for line in lines if line.startswith("aten::_foreach_sub "))
    )
    assert lines[-1].startswith("ops: ")


def test_a_row_comes_with_its_other_overloads(capsys: Capture) -> None:
    data = json_of(capsys, "policies", "--op", "softmax")
    assert [row["op"] for row in data["rows"]] == ["aten::softmax.int"]
    assert "aten::softmax.int_out" in data["other_overloads"]
    assert not set(data["other_overloads"]) & rows_by_name().keys()
    assert "softmax.int_out" in text_of(capsys, "policies", "--op", "softmax")
    assert json_of(capsys, "policies", "--op", "softmax.int")["other_overloads"] == []


MODULE = """
import torch
@torch.library.custom_op("described_here::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
"""


def test_a_custom_op(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--import MODULE" in error_of(capsys, "policies", "--op", "described_here::op")
    tmp_path.joinpath("a_library_of_ops.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    described = found(capsys, "--import", "a_library_of_ops", "--op", "described_here::op")
    assert described["promotion"] == "The reference has no rule for its dtypes."
    assert described["override"] == 'my_autocast(overrides={"described_here::op": "fp32"})'
    with tp.register_policy("described_here::op", "fp32", device_type="cpu"):
        assert found(capsys, "--op", "described_here::op")["region"] == (
            "register_policy gives it fp32 on cpu. Elsewhere, it has no policy: it runs in the dtypes of its inputs."
        )
    torch.library.register_autocast("described_here::op", "cpu", torch.bfloat16)
    assert "registers an autocast kernel for it on cpu" in found(capsys, "--op", "described_here::op")["region"]


def test_a_module_that_cannot_be_imported(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of(capsys, "policies", "--import", "no_such_module") == (
        "torch-promote: error: --import no_such_module: ModuleNotFoundError: No module named 'no_such_module'\n"
    )


def test_the_policy_that_is_asked_for_and_the_default_one(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    tp.Policy.stock().override({"gelu": "fp32"}).save(path)
    assert [row["op"] for row in json_of(capsys, "policies", "--policy", str(path), "--op", "gelu")["rows"]]
    assert found(capsys, "--policy", str(path), "--op", "relu")["region"].startswith("It has no policy")
    tp.set_default_policy(path)
    assert "The policy gives it fp32 on cpu." in found(capsys, "--op", "gelu")["region"]


def test_two_policies_are_compared(capsys: Capture) -> None:
    from torch_promote.cli.program import main

    assert main(["policies", "--diff", "fp32_safe", "stock"]) == 1
    text = capsys.readouterr().out
    assert main(["policies", "--policy", "fp32_safe", "--diff", "stock"]) == 1
    assert capsys.readouterr().out == text
    assert text.splitlines()[0].split() == ["aten", "op", "device", "fp32_safe", "stock"]


def test_another_name_of_a_row_is_no_other_op(capsys: Capture) -> None:
    """`mm.default` is the overload whose full name is `aten::mm`."""
    data = json_of(capsys, "policies", "--op", "mm.default")
    assert ([row["op"] for row in data["rows"]], data["other_ops"]) == (["aten::mm"], [])
