"""The page of a tuning: self-contained, escaped, complete, and readable without scripts."""

from __future__ import annotations

import dataclasses
import html
import io
import math
import re
from pathlib import Path

import pytest

from helpers.made_up_comparisons import comparison_of, made_up_site
from helpers.made_up_tunings import gpt_tuning, small_tuning
from helpers.parsed_pages import NASTY, Page, assert_escaped, assert_self_contained, without_jinja2, words
from torch_promote.errors import MissingPackageError
from torch_promote.numerics.tuning.tuning import Candidate, Certificate, Trial, Tuning
from torch_promote.numerics.tuning.tuning_charts import frontier_chart, prediction_chart
from torch_promote.numerics.tuning.tuning_page import make_tuning_page
from torch_promote.numerics.tuning.tuning_plot import plot_tuning
from torch_promote.observe.pages import CountAxis, LogAxis

__all__ = ["without_jinja2"]  # a fixture


def parts_of(tuning: Tuning) -> dict[str, str]:
    return {name: words(text) for name, text in Page(make_tuning_page(tuning)).sections.items()}


def test_the_page_has_all_parts_in_its_text() -> None:
    parts = parts_of(small_tuning())
    names = "head title numbers policy proof charts modules trials candidates not-seen"
    assert [*parts] == names.split()
    assert "1 override, softmax, meets the tolerance: loss 2e-5 , allowed 1e-3 (the minimum," in parts["head"]
    assert "Overrides 1 of 3 candidates Error of loss 2e-5 allowed 1e-3 On held-out batches 4e-5" in parts["numbers"]
    assert "Runs 9 of 60, 1.6 s" in parts["numbers"]
    assert '[all] "aten::softmax.int" = "fp32"' in parts["policy"]
    assert 'torch_promote.install(policy="mine.toml")' in parts["policy"]
    assert "loss 1e-3 2e-5 4e-5 – 0" in parts["proof"]  # noqa: RUF001
    assert "It is a minimum: the only smaller set" in parts["proof"]
    assert "1 override (softmax): predicted 1e-5, measured 2e-5" in parts["charts"]
    assert "attn softmax: fp32 0.02 0.021 0.0025" in parts["modules"]
    assert "4 shrink 1 linear inf 0.0024 failed 0.25" in parts["trials"]
    assert "mse_loss RuntimeError: no such kernel – – failed" in parts["trials"]  # noqa: RUF001
    assert "softmax overflows 0.0025 2 yes linear 1e-5 1" in parts["candidates"]
    assert "Held-out batches were drawn with other random numbers." in parts["not-seen"]
    assert "The calls in it were not seen." in parts["not-seen"]


def test_the_policy_to_copy_is_the_one_that_is_saved(tmp_path: Path) -> None:
    tuning = gpt_tuning()
    tuning.save(tmp_path / "mine.toml")
    source = make_tuning_page(tuning)
    copied = [html.unescape(text) for text in re.findall(r'<pre class="copied"[^>]*><code>(.*?)</code>', source, re.S)]
    assert copied[0] == (tmp_path / "mine.toml").read_text()
    assert "policy.apply_to(model)" in copied[1]
    compile(copied[1], "copied", "exec")
    assert 'policy="mine.toml", model=model' in parts_of(tuning)["policy"]


def test_what_failed_stands_out() -> None:
    source = make_tuning_page(gpt_tuning())
    assert re.findall(r'data-label="(\w+)"><span class="fail">([\d.]+)</span>', source) == [("compiled", "0.02")]
    assert "float32 for softmax passed, and float32 for softmax, div failed" in parts_of(gpt_tuning())["proof"]


def test_nothing_is_loaded_from_elsewhere() -> None:
    for tuning in (small_tuning(), gpt_tuning()):
        assert_self_contained(make_tuning_page(tuning))


def test_nothing_is_hidden_that_a_script_would_have_to_show() -> None:
    source = make_tuning_page(small_tuning())
    assert re.findall(r"<(\w+)[^>]*\shidden[\s>]", source) == ["div", "div"]  # the filters
    assert "<button" not in source.partition("<script>")[0]  # a script adds the buttons to copy and to sort


def test_names_cannot_become_markup() -> None:
    tuning = small_tuning(
        overrides={NASTY: NASTY},
        found=(NASTY,),
        tolerance={NASTY: 1e-3},
        errors={NASTY: 1.0},
        certificate=Certificate("passes", NASTY, (NASTY,), {NASTY: 1.0}, {NASTY: 1.0}),
        trials=[Trial((NASTY,), {NASTY: 1.0}, passed, NASTY, 1.0, 0.1, NASTY) for passed in (True, False)],
        noise_floor={NASTY: 0.0},
        candidates=[Candidate(NASTY, NASTY, "", 1.0, True)],
        predicted_against_measured=[((NASTY,), 1.0, 2.0)],
        comparison=comparison_of(made_up_site(NASTY, f"a.{NASTY}", nonfinite=1), not_seen=[NASTY], torch_version=NASTY),
        notes=[NASTY],
    )
    plain = small_tuning(certificate=Certificate("passes", "", ("a",), {"loss": 1.0}, {"loss": 1.0}))
    gpt = make_tuning_page(gpt_tuning())
    page = assert_escaped(make_tuning_page(tuning), make_tuning_page(plain).replace("</main>", f"{_inner(gpt)}</main>"))
    for part in ("head", "policy", "proof", "charts", "modules", "trials", "candidates", "not-seen"):
        assert "alert(1)" in page.sections[part], part


def _inner(source: str) -> str:
    return source.partition("</header>")[2].partition("</main>")[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"trials": [], "predicted_against_measured": [], "candidates": [], "overrides": {}, "found": ()},
        {"tolerance": {}, "errors": {}, "noise_floor": {}},
        {"trials": [Trial((), {}, False, "gate", error="RuntimeError: x")], "predicted_against_measured": []},
        {"gain": {"bytes": 4096.0, "seconds": 0.5}, "direction": "speed"},
    ],
)
def test_odd_results_have_pages_and_plots(changes: dict[str, object]) -> None:
    tuning = small_tuning(**changes)
    assert "policy" in parts_of(tuning)
    tuning.plot().savefig(io.BytesIO())


def test_the_page_of_60_blocks_is_small() -> None:
    source = make_tuning_page(gpt_tuning())
    assert len(source.encode()) < 2_000_000
    parts = parts_of(gpt_tuning())
    assert "and 708 more" in parts["trials"]
    assert "420 candidates more are not shown." in parts["candidates"]
    assert "softmax: fp32" in parts["modules"]


def test_in_a_notebook_the_page_is_in_a_frame_of_its_own(without_jinja2: None, tmp_path: Path) -> None:
    tuning = small_tuning()
    assert tuning._repr_html_() == f"<pre>{html.escape(str(tuning))}</pre>"
    with pytest.raises(MissingPackageError, match="the page of a tuning needs jinja2"):
        tuning.save(tmp_path / "run.html")
    tuning.save(tmp_path / "mine.toml")


# --- charts


def test_zero_and_infinity_have_lanes_of_their_own() -> None:
    axis = LogAxis([0.0, 2e-4, 0.5, math.inf, math.nan], 100, 500)
    assert [label for _, label in axis.ticks] == ["0", "10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "1", "inf"]
    assert (axis.place(0.0), axis.place(math.inf), axis.place(math.nan)) == (100, 500, 500)
    assert 100 < axis.place(1e-4) < axis.place(1.0) < 500
    down = LogAxis([1e-3, 1.0], 500, 100)
    assert (down.place(1e-3), down.place(1.0)) == (500, 100)


def test_axes_of_many_decades_have_few_ticks() -> None:
    assert len(LogAxis([5e-324, 1.7e308], 0, 400).ticks) <= 9
    assert len(LogAxis([], 0, 400).ticks) == 2
    assert [label for _, label in CountAxis(720, 0, 400).ticks][-2:] == ["200", "720"]
    assert CountAxis(0, 0, 400).place(0) == 0


def test_the_points_are_the_trials() -> None:
    tuning = small_tuning()
    chart = frontier_chart(tuning)
    assert chart is not None
    assert [mark.kind for mark in chart.marks] == ["failed", "passed", "passed", "failed", "failed"]
    assert chart.marks[3].y == chart.marks[4].y == chart.top  # infinite, and an exception
    assert chart.marks[1].y == chart.bottom  # no error
    assert (chart.limit_label, chart.y_label) == ("tolerance 1e-3", "error of loss")
    assert chart.best.startswith(f"M{chart.marks[0].x} {chart.marks[0].y}H")
    predicted = prediction_chart(tuning)
    assert predicted is not None
    assert [mark.kind for mark in predicted.marks] == ["failed", "passed", "passed", "failed"]
    assert prediction_chart(small_tuning(predicted_against_measured=[])) is None
    several = frontier_chart(gpt_tuning())
    assert several is not None
    assert several.y_label == "largest error / tolerance"


def test_the_plot_has_the_trials_and_the_tolerance() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    assert plot_tuning(gpt_tuning(), figure.subplots()) is figure
    figure.savefig(io.BytesIO())
    (axes,) = small_tuning().plot().axes
    assert [len(points.get_offsets()) for points in axes.collections] == [2, 3]
    assert axes.texts[0].get_text() == "tolerance 1e-3"
    none = dataclasses.replace(small_tuning().trials[0], why="held out")
    assert small_tuning(trials=[none]).plot().axes[0].texts[0].get_text() == "no trial was run"
