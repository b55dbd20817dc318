"""`torch-promote policies`: the op table as text and as JSON, and which rows a command line chooses."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline

from helpers.command_line import Capture, cells_of, json_of, terminal_of_80_columns, text_of, wide
from helpers.op_registrations import STRANGE_ROWS
from torch_promote.cli import policies as cli_policies
from torch_promote.cli.terminal import paint
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, op_table, registered

__all__ = ["terminal_of_80_columns", "wide"]  # fixtures


def test_policies_as_json_is_the_table(capsys: Capture) -> None:
    data = json_of(capsys, "policies")
    assert data["torch"] == torch.__version__
    assert data["devices"] == list(DEVICE_TYPES)
    assert data["without_policy"] == []
    assert len(data["rows"]) == len(op_table())
    for shown, row in zip(data["rows"], op_table(), strict=True):
        assert (shown["op"], shown["cpu"], shown["cuda"]) == (row.name, row.cpu.value, row.cuda.value)
        redispatch = f"aten::{row.op}.{row.redispatch_overload}" if row.redispatch_overload else None
        assert shown["redispatch"] == redispatch
    for device in DEVICE_TYPES:
        assert data["counts"][device] == Counter(row.policy(device).value for row in op_table())


def test_policies_tells_where_the_running_pytorch_differs(capsys: Capture) -> None:
    differing = {row["op"]: set(row["running_torch_differs"]) for row in json_of(capsys, "policies")["rows"]}
    for device in DEVICE_TYPES:
        with_policy = {row.name for row in op_table() if row.policy(device) is not CastPolicy.fallthrough}
        listed = {row.name for row in op_table()}
        expected = (with_policy ^ registered(device)) & listed
        assert {op for op, devices in differing.items() if device in devices} == expected


def test_policies_names_each_kind_of_difference(capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    monkeypatch.setattr(cli_policies, "op_table", lambda: STRANGE_ROWS)
    text = text_of(capsys, "policies").replace(torch.__version__, "VERSION")
    assert_expected_inline(
        text,
        """\
aten op     cpu          cuda                notes
no_such_op  fp32         fallthrough         cpu: no such op in torch VERSION
relu        fp32         promote             cpu: not registered in torch VERSION, cuda: not registered in torch VERSION
mm          fallthrough  lower_precision_fp  cpu: registered, left to stock in torch VERSION

policy              cpu  cuda  meaning
lower_precision_fp  0    1     Cast every eligible argument to the region's autocast dtype. Short: lower. Alias: fp16.
fp32                2    0     Cast every eligible argument to float32.
promote             0    1     Cast every eligible argument to the widest dtype among the eligible tensors and tensor lists.
fallthrough         1    1     Do nothing; ops inside a composite op still see autocast.

rows: 3. torch VERSION differs for 3 of them, see notes.
""",  # noqa: E501
    )


def test_policies_as_text_has_a_line_for_each_row(capsys: Capture, wide: None) -> None:
    lines = cells_of(text_of(capsys, "policies"))
    assert lines[0] == ["aten", "op", "cpu", "cuda", "notes"]
    shown = [line[:3] for line in lines[1 : 1 + len(op_table())]]
    assert shown == [[row.name.removeprefix("aten::"), row.cpu.value, row.cuda.value] for row in op_table()]
    assert lines[1 + len(op_table())] == []


def test_policies_of_an_op_that_calls_another_overload(capsys: Capture) -> None:
    text = text_of(capsys, "policies", "--op", "norm")
    # Releases differ in the overloads of named dimensions.
    head, first, rest = text.partition("overloads without")
    overloads, blank, last = rest.partition("\n\n")
    kept = [word.rstrip(",") for word in overloads.partition(":")[2].split() if "names_" not in word]
    text = "\n".join([f"{head}{first}:", *kept]) + f"{blank}{last}"
    assert_expected_inline(
        text.replace(torch.__version__, "VERSION"),
        """\
aten op             cpu          cuda               notes
norm.Scalar         fallthrough  fp32_append_dtype  calls norm.ScalarOpt_dtype
norm.ScalarOpt_dim  fallthrough  fp32_append_dtype  calls
                                                    norm.ScalarOpt_dim_dtype

policy             cpu  cuda  meaning
fp32_append_dtype  0    2     Cast nothing; call the overload that takes an
                              output dtype, with float32.
fallthrough        2    0     Do nothing; ops inside a composite op still see
                              autocast.

overloads without:
norm.ScalarOpt_dim_dtype
norm.ScalarOpt_dtype
norm.ScalarOpt_dtype_out
norm.Scalar_out
norm.dtype_out
norm.out

rows: 2. torch VERSION registers the ops as shown.
""",
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("softmax", ["aten::softmax.int"]),
        ("softmax.int", ["aten::softmax.int"]),
        ("aten::softmax.int", ["aten::softmax.int"]),
        ("*softmax*", ["aten::log_softmax.int", "aten::softmax.int"]),
        ("aten::norm.*", ["aten::norm.Scalar", "aten::norm.ScalarOpt_dim"]),
        ("[bm]mm", ["aten::bmm"]),
        ("?mm", ["aten::bmm"]),
        ("mm", ["aten::mm"]),
    ],
)
def test_a_pattern_chooses_rows(capsys: Capture, pattern: str, expected: list[str]) -> None:
    assert [row["op"] for row in json_of(capsys, "policies", "--op", pattern)["rows"]] == expected


def test_a_star_is_every_row(capsys: Capture) -> None:
    assert json_of(capsys, "policies", "--op", "*") == json_of(capsys, "policies")


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_a_device_leaves_its_column_and_the_rows_with_a_policy(capsys: Capture, device: str) -> None:
    data = json_of(capsys, "policies", "--device", device)
    with_policy = [row for row in op_table() if row.policy(device) is not CastPolicy.fallthrough]
    assert data["devices"] == [device]
    assert [(row["op"], row[device]) for row in data["rows"]] == [
        (row.name, row.policy(device).value) for row in with_policy
    ]
    (other,) = set(DEVICE_TYPES) - {device}
    assert not any(other in row for row in data["rows"])
    assert set(data["without_policy"]) == {row.name for row in op_table()} - {row.name for row in with_policy}
    assert data["counts"] == {device: Counter(row.policy(device).value for row in with_policy)}


def test_an_op_without_a_policy_on_the_device_is_said_to_be_left_alone(capsys: Capture) -> None:
    assert text_of(capsys, "policies", "--device", "cpu", "--op", "softmax") == (
        "The table has no policy on cpu, where my_autocast leaves these to PyTorch:\n  softmax.int\n"
    )
    data = json_of(capsys, "policies", "--device", "cpu", "--op", "softmax")
    assert (data["rows"], data["without_policy"]) == ([], ["aten::softmax.int"])


def test_policies_are_coloured_on_a_terminal_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in text_of(capsys, "policies", "--op", "bmm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[36mlower_precision_fp\x1b[0m" in text_of(capsys, "policies", "--op", "bmm")


def test_every_policy_has_a_colour_and_a_meaning() -> None:
    for policy in CastPolicy:
        assert paint(policy.value).plain == policy.value
        assert policy.meaning.endswith(".")
