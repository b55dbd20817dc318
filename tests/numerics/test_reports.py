"""The reports `Comparison` and `Tuning`: text, page, plot, and files that can be loaded again."""

from __future__ import annotations

import html
import io
import json
import math
from pathlib import Path
from typing import Any

import expecttest
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_rgba

from helpers.made_up_comparisons import comparison_of, made_up_site, small_comparison
from helpers.made_up_comparisons import small_tuning as tuning_of
from torch_promote.errors import OptionError
from torch_promote.numerics.comparison import Comparison, GradientError, Metric, Site
from torch_promote.numerics.tuning import Candidate, Certificate, Trial, Tuning
from torch_promote.policy.policy import Policy
from torch_promote.report.base import Chart, Table, visible_columns
from torch_promote.report.plot import draw

FLOATS, TEXTS = st.floats(), st.text(max_size=8)
MAYBE, NAMES = st.none() | FLOATS, st.lists(TEXTS, max_size=3).map(tuple)
ERRORS = st.dictionaries(TEXTS, FLOATS, max_size=2)
COUNTS = st.integers(0, 9)
SITES = st.builds(Site, TEXTS, TEXTS, TEXTS, COUNTS, local=FLOATS, accumulated=MAYBE, impact=MAYBE, nonfinite=COUNTS)
COMPARISONS = st.builds(
    Comparison,
    reference=st.just(Policy.named("off")),
    candidate=st.sampled_from([Policy.stock(), Policy.stock().override_modules({"a.*": {"mm": "fp32"}, "b": "off"})]),
    sites=st.lists(SITES, max_size=3),
    metrics=st.lists(st.builds(Metric, TEXTS, MAYBE, MAYBE, FLOATS), max_size=2),
    gradients=st.lists(st.builds(GradientError, TEXTS, FLOATS, FLOATS), max_size=2),
    noise=ERRORS,
    notes=st.lists(TEXTS, max_size=2),
)
CERTIFICATES = st.builds(
    Certificate, st.sampled_from(["minimum", "passes"]), TEXTS, NAMES, st.none() | ERRORS, st.none() | ERRORS
)
TUNINGS = st.builds(
    tuning_of,
    overrides=st.dictionaries(TEXTS, TEXTS | st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2),
    found=NAMES,
    tolerance=st.dictionaries(TEXTS, st.floats(0, 1, exclude_min=True), max_size=2),
    errors=ERRORS,
    certificate=CERTIFICATES,
    trials=st.lists(st.builds(Trial, NAMES, ERRORS, st.booleans(), TEXTS, FLOATS, TEXTS), max_size=4),
    candidates=st.lists(st.builds(Candidate, TEXTS, TEXTS, TEXTS, FLOATS, st.booleans()), max_size=2),
    gain=ERRORS,
    direction=st.sampled_from(["accuracy", "speed"]),
    level=st.sampled_from(["op", "module", "site"]),
    met=st.booleans(),
    interrupted=st.booleans(),
)


@given(COMPARISONS | TUNINGS)
@settings(max_examples=20, deadline=None)
def test_json_gives_the_same_report(report: Comparison | Tuning) -> None:
    data = report.to_dict()
    assert list(data)[:2] == ["format", "version"]
    again = type(report).from_dict(json.loads(json.dumps(data, allow_nan=False)))
    assert json.dumps(again.to_dict()) == json.dumps(data)
    assert str(again) == str(report)


@pytest.mark.filterwarnings("ignore:Glyph")  # matplotlib's fonts lack letters that Hypothesis finds
@given(COMPARISONS | TUNINGS)
@settings(max_examples=10, deadline=None)
def test_every_report_has_a_page_and_a_plot(report: Comparison | Tuning) -> None:
    assert "<iframe" in report._repr_html_()
    report.plot().savefig(io.BytesIO())


LARGE = comparison_of(*(made_up_site(module=f"h.{number}", impact=0.5**number) for number in range(720)))


@pytest.mark.parametrize("report", [small_comparison(), LARGE, tuning_of(), tuning_of(comparison=LARGE)])
def test_files(report: Comparison | Tuning, tmp_path: Path) -> None:
    report.save(tmp_path / "run.json")
    assert type(report).load(tmp_path / "run.json").to_dict() == report.to_dict()
    report.save(tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size < 2_000_000
    with pytest.raises(OptionError, match=r"Legal: .*\.html \(a page\), \.json \(to read it again\)\."):
        report.save(tmp_path / "run.yaml")
    if isinstance(report, Tuning):
        report.save(tmp_path / "mine.toml")
        assert Policy.load(tmp_path / "mine.toml") == report.policy


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"trials": [{}]}, "it is incomplete or was changed (KeyError"),
        ({"tolerance": {"loss": "1e-3"}}, "it is incomplete or was changed (TypeError"),
        ({"comparison": None}, "it is incomplete or was changed (TypeError"),
        ({"policy": {"format": 1, "cpu": {"mm": "no"}}}, "it is incomplete or was changed (PolicyError"),
    ],
)
def test_a_changed_file_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**tuning_of().to_dict(), **change}))
    with pytest.raises(OptionError) as caught:
        Tuning.load(file)
    assert str(caught.value).startswith(f"cannot read the tuning {str(file)!r}: {complaint}")


class TestText(expecttest.TestCase):
    def test_comparison(self) -> None:
        self.assertExpectedInline(
            str(small_comparison()),
            """\
comparison of stock with fp32
The largest relative error of a result is 0.0012, that of loss.

largest impact       softmax.int in blocks.0.attn (estimated to change the loss by 0.0025)
largest local error  softmax.int in blocks.0.attn (0.02, 41 times a rounding to float16: 4.9e-4)
runs                 3 (backwards: 2)
torch                2.13.0

metric  reference  candidate   error
loss    2.3441     2.3469     0.0012

Ops
op           module           calls  dtypes      local  accumulated  impact on loss
softmax.int  blocks.0.attn        2  fp16         0.02        0.021          0.0025
linear       blocks.0.attn.q      1  fp16         3e-4         8e-4            1e-5
mse_loss     (model)              1  fp16, fp32      0            -               -

Gradients
parameter               error  norm
blocks.0.attn.q.weight   0.03   1.5
head.bias                 inf     0

Calls that only one of the runs made
  aten::copy_ in head: the candidate made 1 call more.

Not compared
  A compiled graph ran 2 times. The calls in it were not seen.

Notes
  The step draws random numbers.""",
        )

    def test_tuning(self) -> None:
        self.assertExpectedInline(
            str(tuning_of()),
            """\
tuning for accuracy, level op
The tolerance is met.

overrides  1 (of 3 candidates)
proved     minimum
runs       9 of 60 (1.6 s)
torch      2.13.0

Overrides
override  policy
softmax   fp32

Errors
metric  tolerance  error  held out  noise floor
loss        0.001   2e-5      4e-5            0

What the runs have proved
  It is a minimum: the only smaller set of overrides was run and failed.

Best trials
overrides  error of loss  outcome  purpose  which
        0         0.0012  failed   gate     -
        1           2e-5  passed   prefix   softmax
        3              0  passed   gate     softmax, linear, mse_loss

Notes
  Held-out batches were drawn with other random numbers.
  The step draws random numbers.""",
        )


def test_of_several_metrics_a_trial_has_the_worst() -> None:
    trials = [
        Trial((), {"loss": 2e-3, "head.weight": 9e-3, "head.bias": 0.0}, False, "gate"),
        Trial(("aten::mm",), {"loss": 2e-3}, False, "shrink"),
        Trial(("aten::mm", "aten::exp"), {}, False, "shrink", error="ValueError"),
    ]
    tuning = tuning_of(trials=trials, tolerance={"loss": 1e-3, "head.weight": 1e-2, "head.bias": 1e-2})
    tables = {part.title: part for part in tuning.content().parts if isinstance(part, Table)}
    shown = visible_columns(tables["Trials"], "page")
    assert [name for _, name, _ in shown][:3] == ["overrides", "worst error", "metric"]
    assert [row[1:3] for row in tables["Trials"].rows] == [(2e-3, "loss"), (2e-3, "loss"), (None, "")]
    assert max(map(len, tuning.text(None).splitlines())) < 100


def test_the_verdict_of_a_tuning() -> None:
    held_out = Certificate("minimum", "", held_out={"loss": 1.0})
    compiled = Certificate("minimum", "", held_out={"loss": 0.0}, compiled={"loss": 1.0})
    for options, expected in (
        ({}, "The tolerance is met."),
        ({"found": ()}, "The tolerance is met without overrides."),
        ({"met": False, "certificate": held_out}, "The tolerance is met in the search, but not on held-out batches."),
        ({"met": False, "certificate": compiled}, "The tolerance is met in the search, but not in the compiled step."),
        ({"met": False, "interrupted": True}, "Interrupted. The tolerance is not met."),
    ):
        assert tuning_of(**options).content().verdict == expected


def test_impacts_have_a_unit() -> None:
    for options, what in (({}, "loss"), ({"random_cotangents": True}, "outputs")):
        report = comparison_of(*small_comparison().sites, **options)
        text, page = str(report), report._repr_html_()
        assert f"(estimated to change the {what} by 0.0025)" in text
        assert f"impact on {what}" in text
        assert f"impact on {what}" in page
        assert f"impact on {what}" in tuning_of(comparison=report)._repr_html_()


def test_infinity_has_a_heat_of_its_own() -> None:
    sites = [made_up_site(module=name, impact=impact) for name, impact in (("a", math.inf), ("b", 1e4), ("c", 1e-3))]
    chart = next(part for part in comparison_of(*sites).content().parts if isinstance(part, Chart))
    assert chart.labels == ["a", "b", "c"]
    (mesh,) = (one for one in draw([chart]).subfigs[0].axes[0].collections if isinstance(one, QuadMesh))
    colors = mesh.to_rgba(mesh.get_array())
    infinite, large, small = (tuple(colors[row][2]) for row in range(3))
    assert len({infinite, large, small}) == 3
    assert infinite == to_rgba("#3b0f70")
    page = html.unescape(comparison_of(*sites)._repr_html_())
    assert page.count('class="heat infinite view') == 1
    assert page.count('style="--heat:1"') >= 1
