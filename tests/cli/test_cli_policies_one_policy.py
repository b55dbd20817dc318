"""`torch-promote policies --policy`: a policy as text and as JSON, and its difference from another."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from helpers.command_line import Capture, cells_of, error_of, json_of, terminal_of_80_columns, text_of, wide
from helpers.library_for_policies import NAMESPACE
from torch_promote.cli.program import main
from torch_promote.policy.op_names import in_order
from torch_promote.policy.op_table import DEVICE_TYPES, op_table, registered, schema_of, spell_policy
from torch_promote.policy.policy import Policy

__all__ = ["terminal_of_80_columns", "wide"]  # fixtures


def differing(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.replace(torch.__version__, "VERSION")


def shown(capsys: Capture, *arguments: str) -> str:
    return text_of(capsys, *arguments).replace(torch.__version__, "VERSION")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.chdir(tmp_path)
    policy = (
        Policy.stock()
        .override({"mm.default": torch.float64, f"{NAMESPACE}::many.out": "match_self"})
        .override({f"{NAMESPACE}::join": "fallthrough", "exp.default": "fp32"}, "cpu")
    )
    policy.save("mine.toml")
    return policy


# --- a policy


@pytest.mark.parametrize("name", Policy.names())
def test_json_is_the_policy(capsys: Capture, name: str) -> None:
    data = json_of(capsys, "policies", "--policy", name)
    policy = Policy.named(name)
    assert (data["torch"], data["policy"], data["devices"]) == (torch.__version__, name, list(DEVICE_TYPES))
    rows = [row.name for row in op_table() if schema_of(row) is not None]
    assert sorted([row["op"] for row in data["rows"]] + data["without_policy"]) == sorted(rows)
    changed = {(op, device) for op, device, _ in policy.changes}
    for row in data["rows"]:
        for device in DEVICE_TYPES:
            exact = row["op"] if "." in row["op"] else f"{row['op']}.default"
            assert row[device] == spell_policy(policy.lookup(exact, device))  # type: ignore[arg-type]
            assert (device in row["stock"]) == ((row["op"], device) in changed)
    for device in DEVICE_TYPES:
        assert data["counts"][device] == Counter(row[device] for row in data["rows"])


@pytest.mark.usefixtures("wide", "mine")
def test_a_file_with_ops_outside_of_the_table(capsys: Capture) -> None:
    assert_expected_inline(
        shown(capsys, "policies", "--policy", "mine.toml", "--op", "[em][xm]*p"),
        """\
aten op  cpu   cuda  notes
exp      fp32  fp32  cpu: stock fallthrough

policy mine.toml in torch VERSION. ops: 1, different from stock: 1.
""",
    )
    assert_expected_inline(
        shown(capsys, "policies", "--policy", "mine.toml", "--op", f"{NAMESPACE}::*"),
        """\
aten op                 cpu          cuda        notes
policy_tests::join      fallthrough  -           cpu: stock has no entry
policy_tests::many.out  match_self   match_self  cpu: stock has no entry, cuda: stock has no entry

policy mine.toml in torch VERSION. ops: 2, different from stock: 2.
""",
    )
    assert_expected_inline(
        shown(capsys, "policies", "--policy", "mine.toml", "--op", "mm", "--device", "cuda"),
        """\
aten op  cuda     notes
mm       float64  cuda: stock lower_precision_fp

policy mine.toml in torch VERSION. ops: 1, different from stock: 1.
""",
    )


@pytest.mark.usefixtures("wide")
def test_an_op_with_which_nothing_is_done(capsys: Capture) -> None:
    assert shown(capsys, "policies", "--policy", "stock", "--op", "exp", "--device", "cpu") == (
        "The policy stock does nothing on cpu for: exp\n"
    )
    assert json_of(capsys, "policies", "--policy", "stock", "--op", "exp", "--device", "cpu")["without_policy"] == [
        "aten::exp"
    ]


def test_every_row_has_a_line(capsys: Capture, wide: None) -> None:
    lines = cells_of(text_of(capsys, "policies", "--policy", "off"))
    known = registered("cpu") | registered("cuda")
    rows = [row.name.removeprefix("aten::") for row in op_table() if row.name in known]
    assert [line[0] for line in lines[1 : 1 + len(rows)]] == rows
    assert {tuple(line[1:3]) for line in lines[1 : 1 + len(rows)]} == {("fallthrough", "fallthrough")}


# --- the difference of two


@pytest.mark.usefixtures("wide", "mine")
def test_diff_against_another(capsys: Capture) -> None:
    assert_expected_inline(
        differing(capsys, "policies", "--policy", "mine.toml", "--diff", "stock"),
        """\
aten op                 device  mine.toml    stock
exp                     cpu     fp32         fallthrough
mm                      cpu     float64      lower_precision_fp
mm                      cuda    float64      lower_precision_fp
policy_tests::join      cpu     fallthrough  -
policy_tests::many.out  cpu     match_self   -
policy_tests::many.out  cuda    match_self   -

mine.toml compared with stock (cpu, cuda). differences: 6, ops: 4.
""",
    )
    assert_expected_inline(
        differing(capsys, "policies", "--policy", "cpu", "--diff", "cuda", "--op", "softmax"),
        """\
aten op      device  cpu          cuda
softmax.int  cpu     fallthrough  fp32_set_opt_dtype
softmax.int  cuda    fallthrough  fp32_set_opt_dtype

cpu compared with cuda (cpu, cuda, --op softmax). differences: 2, ops: 1.
""",
    )


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_diff_as_json(capsys: Capture, device: str) -> None:
    assert main(["policies", "--policy", "fp32_safe", "--diff", "off", "--device", device, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["policies"], data["devices"]) == (["fp32_safe", "off"], [device])
    differences = [each for each in Policy.named("fp32_safe").diff("off") if each.device == device]
    by_op = {each.overload: each for each in differences}
    assert data["differences"] == [
        {"op": op, "device": device, "policies": [spell_policy(value) for value in by_op[op][2:]]}  # type: ignore[arg-type]
        for op in in_order(by_op)
    ]


@pytest.mark.usefixtures("wide")
def test_without_a_difference_the_status_is_0(capsys: Capture) -> None:
    assert shown(capsys, "policies", "--policy", "cuda", "--diff", "cuda") == "cuda and cuda are equal (cpu, cuda).\n"
    arguments = ("policies", "--policy", "cuda", "--diff", "stock", "--device", "cuda")
    assert shown(capsys, *arguments) == "cuda and stock are equal (cuda).\n"
    assert json_of(capsys, *arguments)["differences"] == []
    arguments = ("policies", "--policy", "cuda", "--diff", "stock", "--op", "mm")
    assert shown(capsys, *arguments) == "cuda and stock are equal (cpu, cuda, --op mm).\n"


# --- what goes wrong

NAMED = "Legal: stock, cpu, cuda, fp32_safe, off, or the path of a file, which contains a separator or ends with .toml."
WRONG: list[tuple[list[str], str]] = [
    (["--policy", "cdua"], f"no policy is called 'cdua'. Closest: cuda. {NAMED}"),
    (
        ["--policy", "no.toml"],
        "there is no policy file 'no.toml'. Policies that need no file: stock, cpu, cuda, fp32_safe, off.",
    ),
    (
        ["--policy", "cuda", "--diff"],
        "with --policy, --diff takes one policy to compare with, a name or a file, got none.",
    ),
    (
        ["--policy", "cuda", "--diff", "cpu", "cuda"],
        "with --policy, --diff takes one policy to compare with, a name or a file, got 'cpu cuda'.",
    ),
    (["--policy", "cuda", "--diff", "stokc"], f"no policy is called 'stokc'. Closest: stock. {NAMED}"),
    (
        ["--policy", "cuda", "--op", "sofmax"],
        "--op 'sofmax' matches no op. Closest: softmax. `torch-promote policies` lists the "
        "op table. If a library defines the op, import it: --import MODULE.",
    ),
    (
        ["--diff", "cpu", "cuda", "--op", "relu"],
        "--op 'relu': these ops have no row in the op table, so there is nothing to compare. See `torch-promote "
        "policies --op 'relu'`.",
    ),
    (
        ["--diff", "stock"],
        "--diff takes nothing (compare PyTorch with the table), two different devices or two policies, got 'stock'. To "
        "compare one policy with PyTorch's: --diff stock stock.",
    ),
]


@pytest.mark.parametrize(("arguments", "complaint"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_command_line(capsys: Capture, arguments: list[str], complaint: str) -> None:
    for as_json in ([], ["--json"]):
        assert error_of(capsys, "policies", *arguments, *as_json) == f"torch-promote: error: {complaint}\n"


def test_a_wrong_file_is_one_line(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.toml").write_text('format = 1\n[cpu]\n"policy_tests::jion" = "fp32"\n', encoding="utf-8")
    for arguments in (["--policy", "p.toml"], ["--policy", "stock", "--diff", "p.toml"]):
        assert error_of(capsys, "policies", *arguments) == (
            "torch-promote: error: p.toml: [cpu] \"policy_tests::jion\": no op is called 'policy_tests::jion'. "
            "Closest: join. Ops are named as in torch.ops or in Python: 'softmax', 'aten::softmax.int', 'mylib::op', "
            "'F.softmax', torch.mm.\n"
        )


# --- tables for modules


@pytest.fixture
def with_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.chdir(tmp_path)
    policy = Policy.stock().override({"mm.default": "fp32"}, "cpu")
    policy = policy.override_modules({"": "off", "blocks.*.attn": {"mm.default": "keep", f"{NAMESPACE}::join": "fp32"}})
    policy.save("mine.toml")
    return policy


@pytest.mark.usefixtures("wide", "with_tables")
def test_tables_for_modules_are_shown(capsys: Capture) -> None:
    assert_expected_inline(
        shown(capsys, "policies", "--policy", "mine.toml", "--op", "mm"),
        """\
aten op  cpu   cuda                notes
mm       fp32  lower_precision_fp  cpu: stock lower_precision_fp

modules        aten op         policy
(the model)    (whole module)  off
blocks.*.attn  mm              keep

policy mine.toml in torch VERSION. ops: 1, different from stock: 1.
""",
    )
    assert_expected_inline(
        shown(capsys, "policies", "--policy", "mine.toml", "--op", f"{NAMESPACE}::*"),
        """\
modules        aten op             policy
(the model)    (whole module)      off
blocks.*.attn  policy_tests::join  fp32

policy mine.toml in torch VERSION. ops: 0, different from stock: 0.
""",
    )
    text = shown(capsys, "policies", "--policy", "mine.toml", "--op", "gelu")
    assert text.startswith("aten::gelu\n  in a region  It has no policy")
    assert text.endswith("gelu.out\n\nmodules      aten op         policy\n(the model)  (whole module)  off\n")
    assert json_of(capsys, "policies", "--policy", "mine.toml", "--op", "mm")["modules"] == {
        "": {"policy": "off"},
        "blocks.*.attn": {"aten::mm": "keep"},
    }


@pytest.mark.usefixtures("wide", "with_tables")
def test_tables_for_modules_are_compared(capsys: Capture) -> None:
    assert_expected_inline(
        differing(capsys, "policies", "--policy", "mine.toml", "--diff", "stock"),
        """\
aten op             device                     mine.toml  stock
mm                  cpu                        fp32       lower_precision_fp
mm                  [modules."blocks.*.attn"]  keep       -
(whole module)      [modules.""]               off        -
policy_tests::join  [modules."blocks.*.attn"]  fp32       -

mine.toml compared with stock (cpu, cuda). differences: 4, ops: 2.
""",
    )
    assert_expected_inline(
        differing(capsys, "policies", "--policy", "mine.toml", "--diff", "stock", "--device", "cuda", "--op", "mm"),
        """\
aten op         device                     mine.toml  stock
mm              [modules."blocks.*.attn"]  keep       -
(whole module)  [modules.""]               off        -

mine.toml compared with stock (cuda, --op mm). differences: 2, ops: 1.
""",
    )
    assert main(["policies", "--policy", "mine.toml", "--diff", "mine.toml"]) == 0
