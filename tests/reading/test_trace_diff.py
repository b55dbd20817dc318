"""`TraceReport.diff`: the calls that differ between two traces, and their differing attributes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote.errors import OptionError
from torch_promote.reading.difference import Difference
from torch_promote.reading.trace_report import TraceReport
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
    return {what: (before, after) for one, _, what, before, after in difference.changes if one and one.name == op}


def test_only_reports_and_files_can_be_compared() -> None:
    with pytest.raises(OptionError, match=r"diff\(\) expects reports of trace\(\), or the files of recordings, got 3"):
        tp.diff(traced(model()), 3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"cannot read the recording 'run\.json': its name does not end in \.jsonl"):
        tp.diff(traced(model()), "run.json")


def test_equal_traces() -> None:
    """Another model with other tensors, at another time, with another batch size."""
    before = traced(model())
    difference = before.diff(traced(model(), torch.ones(3, 4)))
    assert difference.equal
    assert not difference
    assert difference.compared > 10
    assert difference.content().verdict.startswith("Equal: dtypes, policies, casts and other arguments. Contents were")


def test_an_override() -> None:
    difference = traced(model()).diff(traced(model(), overrides={"softmax": "fp32"}))
    assert difference
    found = rows(difference, "aten::softmax.int")
    assert {name: value for name, value in found.items() if name != "policy_source"} == {
        "ran_with": ("bfloat16", "float32"),
        "outputs": ("bfloat16", "float32"),
        "policy": ("none", "fp32"),
        "casts": ("none", "self: bfloat16 -> float32"),
    }
    assert found["policy_source"][0] == "none"
    assert found["policy_source"][1].startswith("region at ")
    assert difference.kind == "policy"
    first = difference.first
    assert first is not None
    assert (first.op, first.overload, first.phase, first.module) == ("aten::softmax", "int", "forward", "1")
    assert difference.evidence[0].startswith(
        "aten::softmax in 1: dtypes bfloat16 -> bfloat16 in A, bfloat16 -> float32"
    )


def test_casts_that_a_cache_serves() -> None:
    def twice(cache: str) -> TraceReport:
        weight = torch.nn.Parameter(torch.ones(4, 4))
        with tp.trace() as report, tp.my_autocast("cpu", cache=cache):
            for _ in range(2):
                X.mm(weight)
        return report

    before, after = twice("none"), twice("weights")
    [change] = [one for one in before.diff(after).changes if "aten::mm" in [call and call.op for call in one[:2]]]
    assert change[0] is before.calls.where(op="mm")[1]
    assert change[1] is after.calls.where(op="mm")[1]
    casts = "self: float32 -> bfloat16; mat2: float32 -> bfloat16"
    assert change[2:] == ("casts", casts, f"{casts}, reused")


def test_calls_of_one_trace_alone() -> None:
    with tp.trace() as before:
        X.exp(), X.exp(), X.sin()
    with tp.trace() as after:
        X.exp(), X.cos(), X.exp(), X.exp()
    difference = before.diff(after)
    assert difference.compared == 2
    assert (difference.only_in_a, difference.only_in_b) == ([before.calls[2]], [after.calls[1], after.calls[3]])
    assert difference.changes == [
        (before.calls[2], None, "only before", "float32 -> float32", ""),
        (None, after.calls[1], "only after", "", "float32 -> float32"),
        (None, after.calls[3], "only after", "", "float32 -> float32"),
    ]
    assert [one["op"] for one in difference.to_dict()["changes"]] == ["aten::sin", "aten::cos", "aten::exp"]


def test_a_call_that_is_inserted_shifts_no_other() -> None:
    def run(inserted: bool) -> TraceReport:
        with tp.trace() as report:
            y = X.double() * 3 if inserted else X
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                y = X.to(dtype) * 2
                y.exp()
        return report

    difference = run(False).diff(run(True))
    assert not difference.only_in_a
    assert [call.op for call in difference.only_in_b] == ["aten::mul"]


def test_text_and_dict() -> None:
    difference = traced(model()).diff(traced(model(), overrides={"softmax": "fp32"}))
    [table] = (one for one in difference.content().parts if one.title.startswith("Other dtypes"))
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows[:5]] == ["aten::softmax.int"] * 5, "what the override changed comes first"
    assert ("aten::softmax.int", "forward", "policy", "none", "fp32", 1, {"1": 1}) in table.rows
    inner = [row[2] for row in table.rows if row[0] == "aten::_softmax"]
    assert inner == ["inputs", "outputs"], "what the op ran with is what it got, and needs no row of its own"
    assert max(map(len, str(difference).splitlines())) <= 100
    data = difference.to_dict()
    assert data["equal"] is False
    assert [one["what"] for one in data["changes"]] == [what for _, _, what, *_ in difference.changes]


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
