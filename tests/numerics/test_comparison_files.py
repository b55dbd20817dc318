"""A comparison as data and as files: lossless round trips, strict JSON, and errors that list legal values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.made_up_comparisons import comparison_of, made_up_site, small_comparison
from torch_promote.errors import OptionError
from torch_promote.numerics.comparing.comparison import Comparison, GradientError, Metric
from torch_promote.numerics.comparing.site import Site
from torch_promote.observe.pages import number
from torch_promote.policy.policy import Policy

FLOATS = st.floats()
TEXTS = st.text(max_size=8)
MAYBE = st.none() | FLOATS
SITES = st.builds(
    Site,
    TEXTS,
    TEXTS,
    TEXTS,
    st.integers(0, 9),
    local=FLOATS,
    local_sqnr=FLOATS,
    accumulated=MAYBE,
    impact=MAYBE,
    policy=st.sampled_from(["", "inf", "fp32"]),
    nonfinite=st.integers(0, 9),
)
COMPARISONS = st.builds(
    Comparison,
    reference=st.just(Policy.named("off")),
    candidate=st.sampled_from([Policy.stock(), Policy.stock().override_modules({"a.*": {"mm": "fp32"}, "b": "off"})]),
    sites=st.lists(SITES, max_size=3),
    metrics=st.lists(st.builds(Metric, TEXTS, MAYBE, MAYBE, FLOATS), max_size=2),
    gradients=st.lists(st.builds(GradientError, TEXTS, FLOATS, FLOATS), max_size=2),
    noise=st.dictionaries(TEXTS, FLOATS, max_size=2),
    notes=st.lists(TEXTS, max_size=2),
)


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


@given(COMPARISONS)
@settings(max_examples=25, deadline=None)
def test_json_gives_the_same_comparison(comparison: Comparison) -> None:
    data = comparison.to_dict()
    text = json.dumps(data, allow_nan=False)
    again = Comparison.from_dict(json.loads(text, parse_constant=refuse))
    assert repr(vars(again)) == repr(vars(comparison))  # a NaN is not equal to itself
    assert again.to_dict() == data
    str(again)


def test_infinite_numbers_are_strings() -> None:
    site = made_up_site(local=math.inf, local_sqnr=-math.inf, impact=math.nan, policy="inf")
    data = comparison_of(site).to_dict()["sites"][0]
    assert (data["local"], data["local_sqnr"], data["impact"], data["policy"]) == ("inf", "-inf", "nan", "inf")
    assert data == site.to_dict()
    assert Site(**{**data, "local": math.inf, "local_sqnr": -math.inf, "impact": None}).policy == "inf"


@pytest.mark.parametrize("value", ["Infinity", "1", None, True, []])
def test_what_is_not_a_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="expected a number"):
        number(value)


def test_a_file_can_be_loaded(tmp_path: Path) -> None:
    comparison = small_comparison()
    comparison.save(tmp_path / "run.json")
    loaded = Comparison.load(tmp_path / "run.json")
    assert type(loaded) is Comparison
    assert vars(loaded) == vars(comparison)
    assert str(loaded) == str(comparison)


@pytest.mark.parametrize("name", ["run.toml", "run", "html", "run.json.gz"])
def test_the_ending_of_a_name_says_the_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"Legal: \.html \(a page\), \.json \(to read it again\)\."):
        small_comparison().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.html").mkdir()
    with pytest.raises(OptionError, match="it is a folder"):
        small_comparison().save(tmp_path / "run.html")
    with pytest.raises(OptionError, match=r"there is no folder .*no'\. Create it first"):
        small_comparison().save(tmp_path / "no" / "run.html")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "torch_promote trace"}, "its \"format\" is 'torch_promote trace', not 'torch_promote comparison'"),
        ({"version": 2}, "its version is 2, and this torch_promote reads version 1"),
        ({"sites": 3}, "it is incomplete or was changed (TypeError"),
        ({"candidate": {"format": 1, "cpu": {"mm": "no"}}}, "it is incomplete or was changed (PolicyError"),
        ({"other": 1}, "it is incomplete or was changed (TypeError"),
        ({"metrics": [{"name": "loss"}]}, "it is incomplete or was changed (KeyError: 'reference')"),
    ],
)
def test_a_file_that_is_no_comparison_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**small_comparison().to_dict(), **change}))
    with pytest.raises(OptionError) as caught:
        Comparison.load(file)
    assert str(caught.value).startswith(f"cannot read the comparison {str(file)!r}: {complaint}")
