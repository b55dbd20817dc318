"""`TraceReport.diff`: the calls that differ between two traces, and their differing attributes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote.errors import OptionError
from torch_promote.observe.diff import Change, TraceDiff
from torch_promote.observe.events import Call, TensorInfo
from torch_promote.observe.trace_report import TraceReport

X = torch.ones(2, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))


def traced(net: nn.Module, batch: torch.Tensor = X, **options: object) -> TraceReport:
    with tp.trace(net) as report, tp.my_autocast("cpu", **options):  # type: ignore[arg-type]
        net(batch).sum().backward()
    return report


def rows(difference: TraceDiff, op: str) -> dict[str, tuple[str, str]]:
    return {change.what: (change.before, change.after) for change in difference.changes if change.op == op}


def test_the_text_begins_with_what_the_override_changed() -> None:
    text = str(traced(model()).diff(traced(model(), overrides={"softmax": "fp32"})))
    title, _, *lines = text.splitlines()
    assert re.fullmatch(r"\d+ of \d+ calls differ; \d+ only before, \d+ only after:", title)
    ops = [line.split()[0] for line in lines]
    assert ops[:5] == ["aten::softmax.int"] * 5
    inner = [line.split()[2] for line in lines if line.startswith("aten::_softmax ")]
    assert inner == ["inputs", "outputs"], "what the op ran with is what it got, and needs no row of its own"


def test_only_another_report_can_be_compared() -> None:
    with pytest.raises(OptionError, match=r"diff\(\) expects another report .* got 'run.json'.*TraceReport.load"):
        traced(model()).diff("run.json")  # type: ignore[arg-type]


def test_equal_traces() -> None:
    """Another model with other tensors, at another time, with another batch size."""
    before = traced(model())
    difference = before.diff(traced(model(), torch.ones(3, 4)))
    assert difference.same
    assert not difference
    assert difference.changes == []
    assert difference.compared == len(before.calls) > 10
    assert str(difference) == f"{len(before.calls)} calls compared: no difference."


def test_another_thread_makes_no_difference() -> None:
    found = [traced(model())]
    thread = threading.Thread(target=lambda: found.append(traced(model())))
    thread.start()
    thread.join()
    assert {call.thread for call in found[0].calls} != {call.thread for call in found[1].calls}
    assert found[0].diff(found[1]).same


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


def test_a_module_policy_is_in_one_module_alone() -> None:
    net = model()
    tp.set_module_policy(net, {"2": {"linear": "fp32"}})
    difference = traced(model()).diff(traced(net))
    assert {change.module for change in difference.changes if change.what == "policy"} == {"2"}
    assert rows(difference, "aten::linear")["said_by"] == ("PyTorch's table", 'module policy "2"')


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
    assert [(one.op, one.number, one.what, one.before, one.after) for one in difference.changes] == [
        ("aten::sin", 0, "only before", "float32 -> float32", ""),
        ("aten::cos", 0, "only after", "", "float32 -> float32"),
        ("aten::exp", 2, "only after", "", "float32 -> float32"),
    ]
    back = after.diff(before)
    assert [(one.op, one.what) for one in back.changes] == [
        ("aten::cos", "only before"),
        ("aten::exp", "only before"),
        ("aten::sin", "only after"),
    ]
    assert difference.compared == back.compared == 2


def test_an_error() -> None:
    def call(other: torch.Tensor) -> TraceReport:
        with tp.trace() as report, contextlib.suppress(RuntimeError):
            X.mm(other)
        return report

    assert rows(call(X.t()).diff(call(X)), "aten::mm")["error"] == ("it returned", "it raised")


def test_text_and_dict() -> None:
    difference = traced(model()).diff(traced(model(), overrides={"softmax": "fp32"}))
    text = str(difference)
    assert text.splitlines()[1].split() == ["op", "phase", "what", "before", "after", "calls", "modules"]
    assert any(
        line.split() == ["aten::softmax.int", "forward", "policy", "none", "fp32", "1", "1"]
        for line in text.splitlines()
    )
    data = difference.to_dict()
    assert data["same"] is False
    assert [Change(**change) for change in data["changes"]] == difference.changes
    with pytest.raises(dataclasses.FrozenInstanceError):
        difference.changes[0].what = "other"  # type: ignore[misc]


def test_a_long_table_is_cut() -> None:
    with tp.trace() as before:
        X.exp()
    names = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "atanh", "erf", "erfc")
    names += ("exp2", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "abs", "neg", "sign", "ceil", "floor", "round")
    names += ("trunc", "frac", "sigmoid", "relu", "square", "reciprocal")
    with tp.trace() as after:
        for name in names:
            getattr(torch, name)(X)
    assert str(before.diff(after)).endswith(" more rows; see .changes")


def test_what_was_not_kept_is_not_missed() -> None:
    def few(most: int) -> TraceReport:
        with tp.trace(max_calls=most) as report:
            for _ in range(5):
                X.exp()
        return report

    difference = few(2).diff(few(10))
    assert difference.same
    assert (difference.compared, difference.dropped) == (2, 3)
    assert str(difference).endswith("3 calls were not stored, and not compared; see max_calls.")


def report_of(calls: list[Call]) -> TraceReport:
    report = TraceReport(len(calls))
    for call in calls:
        report.add(call)
    return report


@pytest.mark.slow
def test_a_hundred_thousand_calls() -> None:
    tensors = (TensorInfo("self", torch.float32, (2,), "cpu"),)
    call = Call("aten::exp", "", "", "forward", "x.py:1", tensors, tensors, tensors, (), None, "", False, 1)
    calls = [dataclasses.replace(call, module=str(number % 50)) for number in range(100_000)]
    one, other = report_of(calls), report_of(calls[1:])
    start = time.perf_counter()
    difference = one.diff(other)
    assert time.perf_counter() - start < 5
    assert [(change.module, change.number, change.what) for change in difference.changes] == [
        ("0", 1999, "only before")
    ]
