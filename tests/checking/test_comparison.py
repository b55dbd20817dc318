"""The comparison of results, known gaps, and the report of a crosscheck."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from torch_promote.checking.comparison import compare
from torch_promote.checking.expectation import Finding
from torch_promote.checking.known_gaps import VARIABLE, GapError, known_gaps, parse_gaps
from torch_promote.checking.report import CrosscheckReport, Mismatch
from torch_promote.parity import runner
from torch_promote.parity.model import Options

NAN = float("nan")
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
FLOAT4 = [torch.tensor(bits, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for bits in ([0, 1], [0, 2])]


@pytest.mark.parametrize(
    ("ours", "stock", "kinds"),
    [
        (torch.ones(2), torch.ones(2), []),
        (torch.ones(2), torch.ones(2).double(), ["dtype"]),
        (torch.ones(2), torch.ones(2, 1), ["shape"]),
        (torch.ones(2), torch.ones(2, requires_grad=True), ["requires_grad"]),
        (torch.ones(2), torch.ones(2, device="meta"), ["device"]),
        (torch.eye(2), torch.eye(2).to_sparse(), ["layout"]),
        (torch.ones(2, 3), torch.ones(3, 2).t(), ["strides"]),
        (torch.tensor([0.0]), torch.tensor([-0.0]), ["bits"]),
        (torch.tensor([NAN]), torch.tensor([NAN]), []),
        (torch.tensor([NAN]), OTHER_NAN, ["bits"]),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), ["is_conj"]),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj(), []),
        (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0]), ["is_neg"]),
        ([torch.ones(2)], (torch.ones(2),), ["structure"]),
        ([torch.ones(2), 1], [torch.ones(2), True], ["value"]),
        ([NAN, "a"], [NAN, "a"], []),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), []),
        (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse(), ["bits"]),
        (*FLOAT4, ["bits"]),
    ],
)
def test_comparison(ours: Any, stock: Any, kinds: list[str]) -> None:
    assert [difference.kind for difference in compare(ours, stock)] == kinds


# --- known gaps

GAP = '[[call]]\nop = "{op}"\nkind = "{kind}"\nwrong = "pytorch"\nreason = "so it is"\n'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (GAP.format(op="aten::add.*", kind="strides"), True),
        (GAP.format(op="aten::mul.* aten::add.Scalar", kind="strides"), False),
        (GAP.format(op="aten::add.*", kind="dtype"), False),
        (GAP.format(op="aten::add.*", kind="strides") + "fake = true\n", False),
        (GAP.format(op="aten::add.*", kind="strides") + 'versions = "1.* 2.*"\n', True),
        (GAP.format(op="aten::add.*", kind="strides") + 'versions = "1.*"\n', False),
    ],
)
def test_a_gap_explains_what_it_names_and_nothing_else(text: str, found: bool) -> None:
    finding = Finding("strides", "(1,)", "(2,)")
    explained = [gap.explains("aten::add.Tensor", finding, [torch.ones(2)]) for gap in parse_gaps(text, "here").calls]
    assert any(explained) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[call]]\nop = "aten::mm"', "missing kind, reason, wrong."),
        (GAP.format(op="aten::mm", kind="dtype") + "versions = [2.11]\n", "versions is [2.11], and has to be a str."),
    ],
)
def test_what_is_no_gap_is_an_error(text: str, message: str) -> None:
    with pytest.raises(GapError, match=f"^gaps.toml, call 1: {re.escape(message)}$"):
        parse_gaps(text, "gaps.toml")


def test_a_file_that_a_variable_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "gaps.toml"
    monkeypatch.setenv(VARIABLE, str(file))
    monkeypatch.setattr(runner, "known_gaps", known_gaps.__wrapped__)  # not kept since its first call
    with pytest.raises(GapError, match=f"^{VARIABLE} names {file}, which cannot be read: No such file or directory.$"):
        runner.entries(Options("cpu"))
    file.write_text(GAP.format(op="aten::mm", kind="dtype"))
    assert known_gaps.__wrapped__().calls[-1].reason == "so it is"


def test_a_gap_of_fake_tensors_is_counted() -> None:
    """The one that is listed: PyTorch's fake tensors leave the strides of eager."""
    with FakeTensorMode(), tp.crosscheck() as report:
        torch.empty_strided((1, 3, 1, 1), (8, 1, 8, 4)) + torch.empty_strided((1, 3, 1, 1), (3, 1, 1, 1))
    assert (report.known_gaps, report.mismatches) == ({known_gaps().calls[0].reason: 1}, [])
    assert "known gap                      1\n" in str(report)


# --- the report


def mismatch(op: str) -> Mismatch:
    return Mismatch("dtype", op, "float32[2]", "float16", "float32", "file.py:1 in f: x")


def test_the_text_of_a_report() -> None:
    report = CrosscheckReport()
    report.raise_for_mismatches()
    report.checked.update({"aten.mm.default": 3})
    report.no_rule.update({"my.op.default": 1})
    report.mismatches += [mismatch(f"op{i}") for i in range(25)]
    lines = str(report).splitlines()
    assert "checked against the reference  3 (75.0% of those with kernels)" in lines
    assert "my.op.default          1        -" in lines
    assert "... 5 more" in lines
    with pytest.raises(tp.errors.CrosscheckError, match=r"^crosscheck: 25 mismatches in 4 calls: op0 dtype x1, "):
        report.raise_for_mismatches()


def test_a_report_as_json(tmp_path: Path) -> None:
    report = CrosscheckReport()
    report.checked["a"] = 1
    report.mismatches.append(mismatch("a"))
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["ok"], data["calls"], data["coverage"], data["checked"]) == (False, 1, 1.0, {"a": 1})
    assert data["mismatches"][0]["where"] == "file.py:1 in f: x"
    report.save(tmp_path / "report.json")
    assert CrosscheckReport.load(tmp_path / "report.json") == report
