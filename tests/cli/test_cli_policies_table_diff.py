"""`torch-promote policies --diff`: the running PyTorch against the table, and one device against another."""

from __future__ import annotations

import json

import pytest
import torch
from expecttest import assert_expected_inline

from helpers.command_line import Capture, error_of, json_of, terminal_of_80_columns, text_of, wide
from helpers.op_registrations import STRANGE_ROWS
from torch_promote.cli import op_filter, policies_table_diff
from torch_promote.cli.program import main
from torch_promote.policy import op_table as registrations
from torch_promote.policy.op_table import DEVICE_TYPES, LEFT_TO_STOCK, missing_rows, op_table, unlisted_ops

__all__ = ["terminal_of_80_columns", "wide"]  # fixtures


# --- --diff: the running PyTorch against the table


def test_diff_is_what_info_lists(capsys: Capture) -> None:
    differences = sum(len(missing_rows(d)) + len(set(unlisted_ops(d)) - LEFT_TO_STOCK) for d in DEVICE_TYPES)
    assert main(["policies", "--diff", "--json"]) == int(differences > 0)
    data = json.loads(capsys.readouterr().out)
    assert data["differences"] == differences
    assert list(data["devices"]) == list(DEVICE_TYPES)
    for device, found in data["devices"].items():
        assert [(row["op"], row["policy"]) for row in found["missing"]] == [
            (row.name, row.policy(device).value) for row in missing_rows(device)
        ]
        assert found["unlisted"] == [op for op in unlisted_ops(device) if op not in LEFT_TO_STOCK]


@pytest.fixture
def strange_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that no PyTorch agrees with, and a PyTorch that registers two ops."""
    for module in (registrations, policies_table_diff, op_filter):
        monkeypatch.setattr(module, "op_table", lambda: STRANGE_ROWS)
    monkeypatch.setattr(registrations, "registered", lambda device: frozenset({"aten::mm", "lib::op.out"}))


@pytest.mark.usefixtures("strange_table", "wide")
def test_diff_lists_each_kind_of_difference_and_returns_1(capsys: Capture) -> None:
    assert main(["policies", "--diff"]) == 1
    assert_expected_inline(
        capsys.readouterr().out.replace(torch.__version__, "VERSION"),
        """\
op           device  the table      this PyTorch
no_such_op   cpu     fp32           no such op
relu         cpu     fp32           not registered
mm           cpu     left to stock  registered
lib::op.out  cpu     left to stock  registered
relu         cuda    promote        not registered
lib::op.out  cuda    left to stock  registered

differences: 6. torch VERSION compared with 3 rows.
""",
    )


@pytest.mark.usefixtures("strange_table")
@pytest.mark.parametrize(
    ("arguments", "missing", "unlisted"),
    [
        (["--op", "relu"], {"cpu": ["aten::relu"], "cuda": ["aten::relu"]}, {"cpu": [], "cuda": []}),
        (["--op", "op"], {"cpu": [], "cuda": []}, {"cpu": ["lib::op.out"], "cuda": ["lib::op.out"]}),
        (["--device", "cuda"], {"cuda": ["aten::relu"]}, {"cuda": ["lib::op.out"]}),
    ],
)
def test_diff_of_some(
    capsys: Capture, arguments: list[str], missing: dict[str, list[str]], unlisted: dict[str, list[str]]
) -> None:
    assert main(["policies", "--diff", *arguments, "--json"]) == 1
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert {device: [row["op"] for row in found["missing"]] for device, found in devices.items()} == missing
    assert {device: found["unlisted"] for device, found in devices.items()} == unlisted


@pytest.mark.usefixtures("wide")
def test_diff_without_a_difference_returns_0(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "op_table", lambda: ())
    monkeypatch.setattr(registrations, "registered", lambda device: frozenset())
    assert text_of(capsys, "policies", "--diff") == (
        f"torch {torch.__version__} registers exactly the ops that the table lists (cpu, cuda).\n"
    )


# --- --diff: one device against another


def test_diff_of_two_columns(capsys: Capture) -> None:
    data = json_of(capsys, "policies", "--diff", "cpu", "cuda")
    assert data["devices"] == ["cpu", "cuda"]
    assert data["differences"] == [
        {"op": row.name, "policies": {"cpu": row.cpu.value, "cuda": row.cuda.value}}
        for row in op_table()
        if row.cpu is not row.cuda
    ]
    assert data["alike"] == sum(row.cpu is row.cuda for row in op_table())
    other_way_round = json_of(capsys, "policies", "--diff", "cuda", "cpu")
    assert [row["op"] for row in other_way_round["differences"]] == [row["op"] for row in data["differences"]]


@pytest.mark.usefixtures("strange_table", "wide")
def test_diff_of_two_columns_as_text(capsys: Capture) -> None:
    assert_expected_inline(
        text_of(capsys, "policies", "--diff", "cpu", "cuda"),
        """\
aten op     cpu          cuda
no_such_op  fp32         fallthrough
relu        fp32         promote
mm          fallthrough  lower_precision_fp

cpu and cuda: 3 differ, 0 alike. Compared: policies in the table.
""",
    )


def test_diff_with_a_device_without_a_column_is_of_registrations(capsys: Capture) -> None:
    data = json_of(capsys, "policies", "--diff", "xpu", "cuda")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    xpu, cuda = ({name for name in names if has_kernel(name, f"Autocast{key}")} for key in ("XPU", "CUDA"))
    assert {row["op"] for row in data["differences"]} == xpu ^ cuda
    assert data["alike"] == len(xpu & cuda)
    for row in data["differences"]:
        assert row["policies"]["xpu"] == ("registered" if row["op"] in xpu else None)
    known = {row.name: row.cuda.value for row in op_table()}
    both = [row for row in data["differences"] if row["op"] in cuda and row["op"] in known]
    assert both
    assert all(row["policies"]["cuda"] == known[row["op"]] for row in both)


def test_diff_of_registrations_as_text(capsys: Capture) -> None:
    assert text_of(capsys, "policies", "--diff", "xpu", "cuda", "--op", "cudnn_convolution") == (
        "aten op            xpu  cuda\n"
        "cudnn_convolution  -    lower_precision_fp\n\n"
        f"xpu and cuda: 1 differ, 0 alike. Compared: registrations of torch {torch.__version__}.\n"
    )
    assert text_of(capsys, "policies", "--diff", "xpu", "cuda", "--op", "mm") == (
        f"xpu and cuda: 0 differ, 1 alike. Compared: registrations of torch {torch.__version__}.\n"
    )


LEGAL = "--diff takes nothing (compare PyTorch with the table), two different devices or two policies"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            "cpu",
            f"{LEGAL}, got 'cpu'.",
        ),
        (
            "cpu cpu",
            f"{LEGAL}, got 'cpu cpu'.",
        ),
        (
            "cpu cuda xpu",
            f"{LEGAL}, got 'cpu cuda xpu'.",
        ),
        ("cpu cuda --device cpu", "--diff with two devices does not accept --device."),
        ("--op sofmax", "--op 'sofmax' matches no op"),
        ("cpu cuda --op sofmax", "--op 'sofmax' matches no op"),
        ("cpu tpu", "this PyTorch registers no op for autocast on device type 'tpu'. Legal: 'cpu', 'cuda',"),
        ("privateuse1 cuda", "this PyTorch registers no op for autocast on device type 'privateuse1'."),
    ],
)
def test_a_wrong_diff(capsys: Capture, arguments: str, complaint: str) -> None:
    for as_json in ([], ["--json"]):
        error = error_of(capsys, "policies", "--diff", *arguments.split(), *as_json)
        assert error.startswith(f"torch-promote: error: {complaint}")
