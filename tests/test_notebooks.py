"""What a REPL and a notebook show of each value: a repr of one line, and HTML that is escaped."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.made_up_comparisons import small_comparison, small_tuning
from helpers.made_up_traces import small_report
from torch_promote.checking.report import CrosscheckReport, Mismatch
from torch_promote.numerics.find_nonfinite import NonfiniteReport
from torch_promote.observe.call import Unseen
from torch_promote.reference.promotion_rules import RULE_NAMES, promotion_rule

EVIL = "<script>&"
RULE = tp.make_rule(EVIL, {(torch.int32, torch.float32): torch.float64}, over="torch")


def _crosscheck() -> CrosscheckReport:
    report = CrosscheckReport()
    report.checked.update({"aten.mm.default": 1234})
    report.mismatches += [Mismatch("dtype", EVIL, EVIL, EVIL, EVIL, EVIL)] * 300
    return report


def _nonfinite() -> NonfiniteReport:
    report = NonfiniteReport()
    report.not_seen.append(Unseen("threads", 1, EVIL))
    return report


VALUES: dict[str, Any] = {
    "rule": RULE,
    "crosscheck": _crosscheck(),
    "nonfinite": _nonfinite(),
    "policy": tp.Policy.named("cuda").override_modules({EVIL: "fp32"}),
    "differences": tp.Policy.named("cuda").override_modules({EVIL: "fp32"}).diff("cpu"),
    "trace": small_report(),
    "calls": small_report().calls.where(op="softmax"),
    "traces": small_report().diff(small_report()),
    "comparison": small_comparison(),
    "tuning": small_tuning(),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_repr_is_one_short_line(name: str) -> None:
    text = repr(VALUES[name])
    assert "\n" not in text
    assert len(text) < (300 if name == "policy" else 120)


@pytest.mark.parametrize("name", VALUES)
def test_html_is_escaped(name: str) -> None:
    text = VALUES[name]._repr_html_()
    assert text.startswith("<")
    assert "<script>&" not in text


def test_a_policy_is_a_table_of_a_few_lines() -> None:
    """The device types on which an op has the same policy are one line, and not all ops of a long policy are shown."""
    found = tp.Policy.stock().override({"mm": "fp32"})._repr_html_()
    assert "<td>mm</td><td>cpu, cuda, mps, xpu</td><td>fp32</td><td>lower_precision_fp</td>" in found
    long = tp.Policy.named("fp32_safe")
    assert long._repr_html_().count("<tr>") == 21
    assert " more: print() shows all</p>" in long._repr_html_()
    assert str(long.diff("stock")).count("\n") > 50


def test_a_rule_is_a_table_of_dtypes() -> None:
    assert repr(RULE) == f"<PromotionRule {EVIL!r}: {len(RULE._dtypes)} dtypes, Python floats are float32>"
    assert "<td>int32</td>" in RULE._repr_html_()
    for name in RULE_NAMES:
        assert repr(promotion_rule(name)).startswith(f"<PromotionRule {name!r}: ")
        assert "<td>-</td>" in promotion_rule("strict")._repr_html_()


def test_calls_are_a_table() -> None:
    assert str(small_report().calls.where(phase="backward")) == (
        "op  module          phase     line         dtypes\nmm  blocks.0.query  backward  model.py:12  bf16 -> bf16"
    )
    assert "mse_loss    (model)" in str(small_report().calls)
    assert repr(small_report().calls.where(op="nothing")) == "no calls"


def test_tables_are_tables() -> None:
    with tp.trace() as report, tp.my_autocast("cpu", overrides={"softmax": "fp32"}):
        torch.softmax(torch.mm(torch.ones(2, 2), torch.ones(2, 2)), -1)
    groups = report.by_op(), report.by_module(), report.by_line()
    for table in (report.calls, report.calls.where(op="softmax"), report.casts(), *groups):
        assert len(table) > 0
        shown = table._repr_html_()
        assert shown.startswith("<table><thead>")
        assert shown.count("<tr>") == len(table) + 1
        assert repr(table).count("\n") >= len(table)
    assert report.calls.where(op="nothing")._repr_html_() == "<p>no calls</p>"


def test_a_value_is_three_lines_without_sketches() -> None:
    changed = tp.Policy.named("cuda").override({"softmax": "keep"})  # differs on each device
    report = small_report()
    shown = {
        "Call": report.calls[0],
        "Site": small_comparison().sites[0],
        "why": tp.why("int32[3] + 5.5 * float16[3, 1] - int8[] / 2"),
        "Policy": changed,
        "Policy of modules": changed.override_modules({f"blocks.{number}.attention": "fp32" for number in range(40)}),
    }
    for name, value in shown.items():
        assert len(repr(value)) < 3 * 80, name
        assert "\n" not in repr(value), name
    assert "sketch" not in repr(tp.types.Values(sketch="gAABMfYdAAMfYdAA"))
    assert repr(shown["Policy"]).startswith("<Policy: ")
    assert repr(tp.Policy.stock().override({"square": "fp32"})).startswith("Policy.stock().override(")


CELLS = {"/tmp/ipykernel_12/34.py": 3, "<ipython-input-7-ab>": 7}


def test_lines_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell is code with a path that IPython's compiler knows, as its tracebacks do."""

    class Compiler:
        def format_code_name(self, name: str) -> tuple[str, str] | None:
            return ("Cell", f"In[{CELLS[name]}]") if name in CELLS else None

    shell = SimpleNamespace(compile=Compiler())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    names: dict[str, Any] = {"torch": torch, "tp": tp}
    exec(compile("x = torch.zeros(2, 2)\ndef f():\n    return torch.mm(x, x)", next(iter(CELLS)), "exec"), names)
    block = (
        "with tp.trace() as report, tp.find_nonfinite() as found, tp.crosscheck() as checked:\n"
        "    with tp.my_autocast('cpu', overrides={'log': 'fp32'}):\n"
        "        f().log()"
    )
    exec(compile(block, "<ipython-input-7-ab>", "exec"), names)
    report, origin = names["report"], names["found"].origin
    assert [call.line for call in report.calls.where(op="mm")] == ["In[3]:3"]
    [log] = report.calls.where(line="In[7]:3").where(op="log")
    assert log.policy_source == "region at In[7]:2"
    assert dict(report.explain("In[3]").facts)["lines"] == "In[3]:3"
    assert origin.line == "In[7]:3"
    assert "In[7]:3" in str(names["found"])


@pytest.mark.parametrize("name", VALUES)
def test_str_returns_the_text(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a notebook, rich displays what other programs print, unless it is told not to."""
    text = str(VALUES[name])
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(VALUES[name]) == text
