"""`TraceReport.diff`: the calls that differ between two traces, and their differing attributes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote.errors import OptionError
from torch_promote.observe.diff import Change
from torch_promote.observe.difference import Difference
from torch_promote.observe.trace_report import TraceReport
from torch_promote.report.base import Table

X = torch.ones(2, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))


def traced(net: nn.Module, batch: torch.Tensor = X, **options: object) -> TraceReport:
    with tp.trace(net) as report, tp.my_autocast("cpu", **options):  # type: ignore[arg-type]
        net(batch).sum().backward()
    return report


def rows(difference: Difference, op: str) -> dict[str, tuple[str, str]]:
    return {change.what: (change.before, change.after) for change in difference.changes if change.op == op}


def test_only_another_report_can_be_compared() -> None:
    with pytest.raises(OptionError, match=r"diff\(\) expects another report .* got 'run.json'.*TraceReport.load"):
        traced(model()).diff("run.json")  # type: ignore[arg-type]


def test_equal_traces() -> None:
    """Another model with other tensors, at another time, with another batch size."""
    before = traced(model())
    difference = before.diff(traced(model(), torch.ones(3, 4)))
    assert difference.equal
    assert not difference
    assert difference.compared == len(before.calls) > 10
    assert difference.content().verdict == "No difference."


def test_an_override() -> None:
    difference = traced(model()).diff(traced(model(), overrides={"softmax": "fp32"}))
    assert difference
    found = rows(difference, "aten::softmax.int")
    assert {name: value for name, value in found.items() if name != "said_by"} == {
        "ran_with": ("bfloat16", "float32"),
        "outputs": ("bfloat16", "float32"),
        "policy": ("none", "fp32"),
        "casts": ("none", "self: bfloat16 -> float32"),
    }
    assert found["said_by"][0] == "none"
    assert found["said_by"][1].startswith("region at ")
    [change] = [one for one in difference.changes if one.op == "aten::softmax.int" and one.what == "policy"]
    assert (change.phase, change.module, change.number, change.line.rpartition(":")[0]) == ("forward", "1", 0, __file__)


def test_casts_that_a_cache_serves() -> None:
    def twice(cache: str) -> TraceReport:
        weight = torch.nn.Parameter(torch.ones(4, 4))
        with tp.trace() as report, tp.my_autocast("cpu", cache=cache):
            for _ in range(2):
                X.mm(weight)
        return report

    changes = [one for one in twice("none").diff(twice("weights")).changes if one.op == "aten::mm"]
    [change] = changes
    assert (change.number, change.what) == (1, "casts")
    assert change.before == "self: float32 -> bfloat16; mat2: float32 -> bfloat16"
    assert change.after == "self: float32 -> bfloat16; mat2: float32 -> bfloat16, reused"


def test_calls_of_one_trace_alone() -> None:
    with tp.trace() as before:
        X.exp(), X.exp(), X.sin()
    with tp.trace() as after:
        X.exp(), X.cos(), X.exp(), X.exp()
    difference = before.diff(after)
    assert difference.compared == 2
    assert [(one.op, one.number, one.what, one.before, one.after) for one in difference.changes] == [
        ("aten::sin", 0, "only before", "float32 -> float32", ""),
        ("aten::cos", 0, "only after", "", "float32 -> float32"),
        ("aten::exp", 2, "only after", "", "float32 -> float32"),
    ]


def test_a_call_that_is_inserted_shifts_no_other() -> None:
    def run(inserted: bool) -> TraceReport:
        with tp.trace() as report:
            y = X.double() * 3 if inserted else X
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                y = X.to(dtype) * 2
                y.exp()
        return report

    changes = run(False).diff(run(True)).changes
    assert {(one.what, one.op, one.number) for one in changes if one.op.startswith("aten::mul")} == {
        ("only after", "aten::mul.Tensor", 0)
    }


def test_text_and_dict() -> None:
    difference = traced(model()).diff(traced(model(), overrides={"softmax": "fp32"}))
    [table] = difference.content().parts
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows[:5]] == ["aten::softmax.int"] * 5, "what the override changed comes first"
    assert ("aten::softmax.int", "forward", "policy", "none", "fp32", 1, {"1": 1}) in table.rows
    inner = [row[2] for row in table.rows if row[0] == "aten::_softmax"]
    assert inner == ["inputs", "outputs"], "what the op ran with is what it got, and needs no row of its own"
    assert max(map(len, str(difference).splitlines())) <= 100
    data = difference.to_dict()
    assert data["equal"] is False
    assert [Change(**change) for change in data["changes"]] == difference.changes


def test_what_was_not_kept_is_not_missed() -> None:
    def few(most: int) -> TraceReport:
        with tp.trace(max_calls=most) as report:
            for _ in range(5):
                X.exp()
        return report

    difference = few(2).diff(few(10))
    assert difference.equal
    assert (difference.compared, difference.dropped) == (2, 3)
    assert "3 (not stored; see max_calls)" in str(difference)
