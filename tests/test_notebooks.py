"""What a REPL and a notebook show of each value: a repr of one line, and HTML that is escaped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.made_up_comparisons import small_comparison, small_tuning
from helpers.made_up_traces import small_report
from torch_promote.checking.report import CrosscheckReport, Mismatch
from torch_promote.numerics.find_nonfinite import NonfiniteReport
from torch_promote.reference.promotion_rules import RULE_NAMES, promotion_rule

EVIL = "<script>&"
RULE = tp.make_rule(EVIL, {(torch.int32, torch.float32): torch.float64}, over="torch")


def _crosscheck() -> CrosscheckReport:
    report = CrosscheckReport()
    report.checked.update({"aten.mm.default": 1234})
    report.mismatches += [Mismatch("dtype", EVIL, EVIL, EVIL, EVIL, EVIL)] * 300
    return report


def _nonfinite() -> NonfiniteReport:
    report = NonfiniteReport(None, ())
    report.not_seen.append(EVIL)
    return report


VALUES: dict[str, Any] = {
    "rule": RULE,
    "crosscheck": _crosscheck(),
    "nonfinite": _nonfinite(),
    "policy": tp.Policy.named("cuda").override_modules({EVIL: "fp32"}),
    "differences": tp.Policy.named("cuda").override_modules({EVIL: "fp32"}).diff("cpu"),
    "trace": small_report(),
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


def test_a_rule_is_a_table_of_dtypes() -> None:
    assert repr(RULE) == f"<PromotionRule {EVIL!r}: {len(RULE._dtypes)} dtypes, Python floats are float32>"
    assert "<td>int32</td>" in RULE._repr_html_()
    for name in RULE_NAMES:
        assert repr(promotion_rule(name)).startswith(f"<PromotionRule {name!r}: ")
        assert "<td>-</td>" in promotion_rule("strict")._repr_html_()
