"""The page of a comparison: self-contained, escaped, complete, and readable without scripts."""

from __future__ import annotations

import dataclasses
import html
import io
import math
import re
from pathlib import Path

import pytest

from helpers.made_up_comparisons import comparison_of, gpt_comparison, made_up_site, small_comparison
from helpers.parsed_pages import NASTY, Page, assert_escaped, assert_self_contained, without_jinja2, words
from torch_promote.errors import MissingPackageError
from torch_promote.numerics.comparing.comparison import GradientError, Metric
from torch_promote.numerics.comparing.comparison_page import make_comparison_page
from torch_promote.numerics.comparing.comparison_plot import plot_comparison
from torch_promote.numerics.comparing.heat import heat_tree

__all__ = ["without_jinja2"]  # a fixture


def test_the_page_has_all_parts_in_its_text() -> None:
    page = Page(make_comparison_page(small_comparison()))
    parts = {name: words(text) for name, text in page.sections.items()}
    assert [*parts] == ["head", "title", "metrics", "modules", "sites", "gradients", "not-seen"]
    assert "torch_promote comparison torch 2.13.0 stock against fp32 3 runs 2 backwards" in parts["head"]
    assert "The loss is off by 0.12 % (2.3469, reference 2.3441); softmax.int in blocks.0.attn has" in parts["head"]
    assert "loss 2.3441 2.3469 0.0012" in parts["metrics"]
    assert "Impact on the loss Accumulated error Local error" in parts["modules"]
    assert "attn 0.02 0.021 0.0025 q 3e-4 8e-4 1e-5" in parts["modules"]
    assert "the model itself 0 – –" in parts["modules"]  # noqa: RUF001
    assert (
        "softmax.int float16 · lower_precision_fp blocks.0.attn 2 0.02 41 ulp, 34 dB 0.021 3 ulp, 62 dB 0.0025 signed "
        "0.0019 model.py:31" in parts["sites"]
    )
    assert "blocks.0.attn.q.weight 0.03 1.5 head.bias inf 0" in parts["gradients"]
    for sentence in ("the candidate made 1 call more.", "The calls in it were not seen.", "draws random numbers."):
        assert sentence in parts["not-seen"]


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert_self_contained(make_comparison_page(small_comparison()))


def test_nothing_is_hidden_that_a_script_would_have_to_show() -> None:
    source = make_comparison_page(small_comparison())
    assert re.findall(r"<(\w+)[^>]*\shidden[\s>]", source) == ["div"]  # the filter, which does nothing without scripts
    assert source.count('type="radio"') == 3  # the switch of the heat
    assert source.count(" checked") == 1


def test_names_cannot_become_markup() -> None:
    site = made_up_site(NASTY, NASTY, overload=NASTY, line=NASTY, dtypes=NASTY, policy=NASTY, nonfinite=1)
    comparison = comparison_of(
        site,
        metrics=[Metric(NASTY, 1.0, math.nan, math.inf)],
        gradients=[GradientError(NASTY, 1.0, 1.0)],
        modules=[NASTY],
        not_aligned=[NASTY],
        not_seen=[NASTY],
        notes=[NASTY],
        torch_version=NASTY,
    )
    plain = comparison_of(
        dataclasses.replace(site, module="a.b"),
        small_comparison().sites[0],
        gradients=[GradientError("a", 1.0, 1.0)],
        notes=["a"],
    )
    page = assert_escaped(make_comparison_page(comparison), make_comparison_page(plain))
    for part in ("head", "metrics", "modules", "sites", "gradients", "not-seen"):
        assert "alert(1)" in page.sections[part], part


def test_a_page_of_nothing_is_whole() -> None:
    page = Page(make_comparison_page(comparison_of(metrics=[])))
    assert {"metrics", "modules", "sites", "not-seen"} <= page.sections.keys()
    assert "all that PyTorch dispatched was compared" in words(page.sections["not-seen"])


def test_random_cotangents_are_named() -> None:
    assert "with random cotangents" in make_comparison_page(small_comparison(random_cotangents=True))


def test_the_page_of_60_blocks_is_small() -> None:
    source = make_comparison_page(gpt_comparison())
    assert len(source.encode()) < 2_000_000
    page = Page(source)
    assert words(page.sections["modules"]).count("mlp") == 60
    assert "3 inf or NaN" in words(page.sections["sites"])
    assert len(make_comparison_page(gpt_comparison(200)).encode()) < 2_000_000


def test_in_a_notebook_the_page_is_in_a_frame_of_its_own() -> None:
    comparison = small_comparison()
    page = Page(comparison._repr_html_())
    assert page.tags == ["iframe"]
    assert dict(page.attributes)["sandbox"] == "allow-scripts"
    assert dict(page.attributes)["srcdoc"] == make_comparison_page(comparison)


def test_without_jinja2_the_error_says_what_to_install(without_jinja2: None, tmp_path: Path) -> None:
    comparison = small_comparison()
    with pytest.raises(MissingPackageError, match=r"the page of a comparison needs jinja2: pip install jinja2"):
        comparison.save(tmp_path / "run.html")
    assert list(tmp_path.iterdir()) == []
    assert comparison._repr_html_() == f"<pre>{html.escape(str(comparison))}</pre>"


# --- the tree


def test_modules_add_up_to_those_that_hold_them() -> None:
    sites = [
        made_up_site(module="b.10", local=0.1, accumulated=None, impact=3.0),
        made_up_site(module="b.2", local=0.2, accumulated=0.5, impact=4.0, nonfinite=2),
        made_up_site(module="", local=0.0, accumulated=None, impact=None),
    ]
    tree = heat_tree(sites)
    (b,) = tree.nodes
    assert (b.heats.local, b.heats.accumulated, b.heats.impact, b.heats.sites, b.heats.nonfinite) == (0.2, 0.5, 5, 2, 2)
    assert [node.path for node in b.children] == ["b.2", "b.10"]
    assert tree.outside is not None
    assert (tree.outside.heats.impact, tree.outside.shares["impact"]) == (None, 0.0)
    assert [node.path for node in heat_tree(sites, ["", "b", "b.10", "b.2"]).nodes[0].children] == ["b.10", "b.2"]


def test_heat_is_on_a_logarithmic_scale_of_six_decades() -> None:
    values = [1.0, 1e-3, 1e-9, 0.0, math.inf]
    nodes = heat_tree([made_up_site(module=f"m{i}", local=value, impact=None) for i, value in enumerate(values)]).nodes
    assert [node.shares["local"] for node in nodes] == [1.0, pytest.approx(0.525), 0.05, 0.0, 1.0]
    assert heat_tree([made_up_site(impact=None)]).known == ["local", "accumulated"]


# --- the plot


def test_the_plot_has_a_row_for_each_module() -> None:
    (axes,) = small_comparison().plot().axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["blocks.0.attn", "blocks.0.attn.q", "(the model itself)"]
    assert [text.get_text() for text in axes.texts[:3]] == ["0.02", "3e-4", "0"]
    figure = gpt_comparison().plot()
    assert "the first 24 of 540 modules" in figure.axes[0].get_title(loc="left")
    figure.savefig(io.BytesIO())


def test_odd_comparisons_are_drawn_too() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    odd = comparison_of(made_up_site(module="$x$", local=math.inf, accumulated=math.nan, impact=0.0))
    assert plot_comparison(odd, figure.subplots()) is figure
    figure.savefig(io.BytesIO())
    assert comparison_of().plot().axes[0].texts[0].get_text() == "no op was compared"
