"""`torch-promote policies`: the op table, policies, and differences between them, two devices, and PyTorch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import torch_promote as tp
from helpers.command_line import Capture, cells_of, error_of, terminal_of_80_columns, wide
from helpers.library_for_policies import NAMESPACE
from helpers.op_registrations import STRANGE_ROWS
from helpers.program_defaults import as_it_was
from torch_promote.cli import op_listing
from torch_promote.cli.program import main
from torch_promote.policy import op_table as registrations
from torch_promote.policy.op_table import (
    DEVICE_TYPES,
    CastPolicy,
    op_table,
    registered,
    rows_by_name,
    schema_of,
    spell_policy,
)
from torch_promote.policy.policy import Policy

__all__ = ["as_it_was", "terminal_of_80_columns", "wide"]  # fixtures


def shown(capsys: Capture, *arguments: str, status: int = 0) -> str:
    assert main(["policies", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.replace(torch.__version__, "VERSION")


def data_of(capsys: Capture, *arguments: str, status: int = 0) -> dict[str, Any]:
    return json.loads(shown(capsys, *arguments, "--json", status=status))


@pytest.fixture
def strange_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that no PyTorch agrees with, and a PyTorch that registers two ops."""
    for module in (registrations, op_listing):
        monkeypatch.setattr(module, "op_table", lambda: STRANGE_ROWS)
    monkeypatch.setattr(op_listing, "rows_by_name", lambda: {row.name: row for row in STRANGE_ROWS})
    for module in (registrations, op_listing):
        monkeypatch.setattr(module, "registered", lambda device: frozenset({"aten::mm", "lib::op.out"}))


# The table


def test_json_is_the_table(capsys: Capture) -> None:
    data = data_of(capsys)
    assert (data["devices"], data["without_policy"]) == (list(DEVICE_TYPES), [])
    for shown_row, row in zip(data["rows"], op_table(), strict=True):
        assert (shown_row["op"], shown_row["cpu"], shown_row["cuda"]) == (row.name, row.cpu.value, row.cuda.value)
        redispatch = f"aten::{row.op}.{row.redispatch_overload}" if row.redispatch_overload else None
        assert shown_row["redispatch"] == redispatch
    for device in DEVICE_TYPES:
        assert data["counts"][device] == Counter(row.policy(device).value for row in op_table())
        with_policy = {row.name for row in op_table() if row.policy(device) is not CastPolicy.fallthrough}
        differing = {row["op"] for row in data["rows"] if device in row["running_torch_differs"]}
        assert differing == (with_policy ^ registered(device)) & rows_by_name().keys()
    assert data_of(capsys, "--op", "*") == data


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("softmax", ["aten::softmax.int"]),
        ("*softmax*", ["aten::log_softmax.int", "aten::softmax.int"]),
        ("aten::norm.*", ["aten::norm.Scalar", "aten::norm.ScalarOpt_dim"]),
        ("[bm]mm", ["aten::bmm"]),
        ("mm.default", ["aten::mm"]),
    ],
)
def test_a_pattern_chooses_rows(capsys: Capture, pattern: str, expected: list[str]) -> None:
    data = data_of(capsys, "--op", pattern)
    assert ([row["op"] for row in data["rows"]], data["other_ops"]) == (expected, [])


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_a_device_leaves_its_column_and_the_rows_with_a_policy(capsys: Capture, device: str) -> None:
    data = data_of(capsys, "--device", device)
    values = {row.name: row.policy(device).value for row in op_table()}
    with_policy = {name: value for name, value in values.items() if value != "fallthrough"}
    assert {row["op"]: row[device] for row in data["rows"]} == with_policy
    assert set(data["rows"][0]) == {"op", device, "redispatch", "running_torch_differs"}
    assert set(data["without_policy"]) == values.keys() - with_policy.keys()


# Ops without a row


@pytest.mark.parametrize(
    ("op", "key", "sentence"),
    [
        ("add", "promotion", "Promoting: it computes in the common dtype of its operands, and returns it."),
        ("relu", "promotion", "Pointwise: it returns the dtype of its input."),
        ("sigmoid", "promotion", "Pointwise: it keeps a floating dtype, and returns the default dtype for integers"),
        ("eq", "promotion", "Promoting: it compares in the common dtype of its operands, and returns bool."),
        ("div", "promotion", "Promoting: it computes in the common dtype of its operands, or in the default dtype"),
        ("embedding", "promotion", "It returns the dtype of its first tensor."),
        ("inner", "promotion", "A matrix product: its operands need one dtype, which it returns."),
        ("gelu", "region", "It has no policy: it runs in the dtypes of its inputs."),
        ("square", "region", "It has no policy. PyTorch runs it as other ops, and their policies apply."),
        ("randperm", "region", "It takes no tensor, so autocast never acts on it."),
        ("randperm", "override", "None"),
    ],
)
def test_an_op_without_a_row(capsys: Capture, op: str, key: str, sentence: str) -> None:
    [found] = data_of(capsys, "--op", op)["other_ops"]
    assert str(found[key]).startswith(sentence)


def test_an_op_without_a_row_as_text(capsys: Capture, wide: None) -> None:
    assert_expected_inline(
        shown(capsys, "gelu"),
        """\
op         aten::gelu
region     It has no policy: it runs in the dtypes of its inputs.
promotion  Pointwise: it returns the dtype of its input.
override   my_autocast(overrides={"gelu": "fp32"})
overloads  gelu, gelu.out
""",
    )
    assert shown(capsys, "rand*").split()[:2] == ["op", "promotion"]


@pytest.mark.parametrize("op", ["gelu", "add.out", "aten::sub_", "copy_", "view"])
def test_the_line_that_overrides_an_op_works(capsys: Capture, op: str) -> None:
    [found] = data_of(capsys, "--op", op)["other_ops"]
    line = found["override"].replace("(", "('cpu', ", 1)
    assert isinstance(eval(line, {"my_autocast": tp.my_autocast}), tp.my_autocast)


MODULE = """
import torch
@torch.library.custom_op("described_here::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
"""


def test_a_custom_op(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def region(*arguments: str) -> str:
        [found] = data_of(capsys, *arguments, "described_here::op")["other_ops"]
        return str(found["region"])

    assert "--import MODULE" in error_of(capsys, "policies", "described_here::op")
    tmp_path.joinpath("a_library_of_ops.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert region("--import", "a_library_of_ops") == "It has no policy: it runs in the dtypes of its inputs."
    with tp.register_policy("described_here::op", "fp32", device_type="cpu"):
        assert region() == (
            "register_policy gives it fp32 on cpu. Elsewhere, it has no policy: it runs in the dtypes of its inputs."
        )
    torch.library.register_autocast("described_here::op", "cpu", torch.bfloat16)
    assert "registers an autocast kernel for it on cpu" in region()
    tp.set_default_policy(Policy.stock().override({"described_here::op": "fp32"}))
    assert "The policy gives it fp32 on cpu." in region()


# A policy


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.chdir(tmp_path)
    policy = (
        Policy.stock()
        .override({"mm.default": torch.float64, f"{NAMESPACE}::many.out": "match_self"})
        .override({f"{NAMESPACE}::join": "fallthrough", "exp.default": "fp32"}, "cpu")
        .override_modules({"": "off", "blocks.*.attn": {"mm.default": "keep"}})
    )
    policy.save("mine.toml")
    return policy


@pytest.mark.parametrize("name", Policy.names())
def test_json_is_the_policy(capsys: Capture, name: str) -> None:
    data = data_of(capsys, "--policy", name)
    policy = Policy.named(name)
    assert (data["policy"], data["devices"]) == (name, list(DEVICE_TYPES))
    rows = {row.name for row in op_table() if schema_of(row) is not None} | {op for op, *_ in policy.changes}
    assert sorted([row["op"] for row in data["rows"]] + data["without_policy"]) == sorted(rows)
    changed = {(op, device) for op, device, _ in policy.changes}
    for row in data["rows"]:
        for device in DEVICE_TYPES:
            exact = row["op"] if "." in row["op"] else f"{row['op']}.default"
            value = policy.lookup(exact, device)  # None for an op outside the table, on another device
            assert row[device] == (value and spell_policy(value))
            assert (device in row["stock"]) == ((row["op"], device) in changed)
    for device in DEVICE_TYPES:
        assert data["counts"][device] == Counter(row[device] for row in data["rows"] if row[device])


@pytest.mark.usefixtures("wide", "mine")
def test_a_policy_as_text(capsys: Capture) -> None:
    assert_expected_inline(
        shown(capsys, "--policy", "mine.toml", "--op", "mm"),
        """\
modules        op              policy
(the model)    (whole module)  off
blocks.*.attn  mm              keep

op  cpu      cuda     xpu      mps      stock
mm  float64  float64  float64  float64  lower_precision_fp

mine.toml, compared with stock. ops: 1, differences: 1.
""",
    )
    whole = cells_of(shown(capsys, "--policy", "mine.toml"))
    first = [
        "(the",
        "blocks.*.attn",
        "op",
        "exp",
        "mm",
        "policy_tests::join",
        "policy_tests::many.out",
    ]
    assert [line[0] for line in whole[1:9] if line] == first, "what the file says stands before stock's rows"
    lines = cells_of(shown(capsys, "--policy", "mine.toml", "--op", f"{NAMESPACE}::*"))
    assert ["policy_tests::join", "fallthrough", "-", "-", "-", "cpu:", "no", "entry"] in lines
    assert data_of(capsys, "--policy", "mine.toml", "--op", "mm")["modules"] == {
        "": {"policy": "off"},
        "blocks.*.attn": {"aten::mm": "keep"},
    }
    assert shown(capsys, "--policy", "stock", "--op", "exp", "--device", "cpu") == (
        "Left to PyTorch on cpu by stock: exp\n"
    )


@pytest.mark.usefixtures("wide", "mine")
def test_two_policies(capsys: Capture) -> None:
    text = shown(capsys, "--diff", "mine.toml", "stock", status=1)
    assert_expected_inline(
        text,
        """\
op                      devices                    mine.toml    stock
exp                     cpu                        fp32         fallthrough
mm                      cpu, cuda, xpu, mps        float64      lower_precision_fp
policy_tests::join      cpu                        fallthrough  -
policy_tests::many.out  cpu, cuda, xpu, mps        match_self   -
mm                      [modules."blocks.*.attn"]  keep         -
(whole module)          [modules.""]               off          -

mine.toml compared with stock. differences: 12, ops: 4.
""",
    )
    assert "differences: 0, ops: 0." in shown(capsys, "--diff", "mine.toml", "mine.toml")
    assert shown(capsys, "--diff", "cuda", "stock", "--device", "cuda") == (
        "cuda compared with stock. differences: 0, ops: 0.\n"
    )


@pytest.mark.usefixtures("wide", "mine")
def test_names_in_tables_are_escaped(capsys: Capture) -> None:
    Path("strange.toml").write_text('format = 2\n[modules."a\\u001b[31m\\u009b\\u202e"]\n"mm" = "keep"\n')
    for arguments in (("--policy", "strange.toml"), ("--diff", "strange.toml", "stock")):
        status = int("--diff" in arguments)
        assert shown(capsys, *arguments, "--op", "mm", status=status).replace("\n", "").isprintable()
    assert list(data_of(capsys, "--policy", "strange.toml")["modules"]) == ["a\x1b[31m\x9b\u202e"]


# PyTorch and the table


@pytest.mark.usefixtures("strange_table", "wide")
def test_each_kind_of_difference_of_pytorch(capsys: Capture) -> None:
    listed = {row["op"]: row["running_torch_differs"] for row in data_of(capsys)["rows"]}
    assert listed["aten::no_such_op"] == {"cpu": "no such op"}
    assert listed["aten::relu"]["cuda"] == "not registered"
    assert listed["aten::mm"] == {"cpu": "registered, left to stock"}


@pytest.mark.parametrize(
    ("op", "line"),
    [
        ("linear", "linear=fp32"),
        ("cross_entropy_loss", "cross_entropy_loss=lower"),
        ("binary_cross_entropy", "binary_cross_entropy=fp32"),
        ("softmax", "softmax=fp32"),
    ],
)
def test_how_to_override_a_row(capsys: Capture, wide: None, op: str, line: str) -> None:
    name, _, policy = line.partition("=")
    expected = f'my_autocast(overrides={{"{name}": "{policy}"}}), or --override {line}'
    assert f"to override it: {expected}\n" in shown(capsys, "--op", op)
    assert data_of(capsys, "--op", op)["override"] == expected
    tp.my_autocast("cpu", overrides={name: policy})
    assert "to override it" not in shown(capsys, "--op", f"{op}*")
