"""The result of a search as data and as files: lossless round trips, and the right policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.made_up_tunings import gpt_tuning, small_tuning
from torch_promote.errors import OptionError
from torch_promote.numerics.tuning.tuning import Candidate, Certificate, Trial, Tuning
from torch_promote.policy.policy import Policy

FLOATS = st.floats()
TEXTS = st.text(max_size=8)
NAMES = st.lists(TEXTS, max_size=3).map(tuple)
ERRORS = st.dictionaries(TEXTS, FLOATS, max_size=2)
TRIALS = st.builds(Trial, NAMES, ERRORS, st.booleans(), TEXTS, st.none() | FLOATS, FLOATS, TEXTS)
CERTIFICATES = st.builds(
    Certificate, st.sampled_from(["minimum", "passes"]), TEXTS, NAMES, st.none() | ERRORS, st.none() | ERRORS
)
TUNINGS = st.builds(
    small_tuning,
    overrides=st.dictionaries(TEXTS, TEXTS | st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2),
    found=NAMES,
    tolerance=st.dictionaries(TEXTS, st.floats(0, 1), max_size=2),
    errors=ERRORS,
    certificate=CERTIFICATES,
    trials=st.lists(TRIALS, max_size=4),
    candidates=st.lists(st.builds(Candidate, TEXTS, TEXTS, TEXTS, FLOATS, st.booleans()), max_size=2),
    predicted_against_measured=st.lists(st.tuples(NAMES, FLOATS, FLOATS), max_size=2),
    gain=ERRORS,
    direction=st.sampled_from(["accuracy", "speed"]),
    level=st.sampled_from(["op", "module", "site"]),
    met=st.booleans(),
    interrupted=st.booleans(),
)


@given(TUNINGS)
@settings(max_examples=25, deadline=None)
def test_json_gives_the_same_result(tuning: Tuning) -> None:
    data = tuning.to_dict()
    again = Tuning.from_dict(json.loads(json.dumps(data, allow_nan=False)))
    assert again.to_dict() == data
    known, loaded = vars(tuning), vars(again)
    assert known.pop("comparison").to_dict() == loaded.pop("comparison").to_dict()
    assert repr(loaded) == repr(known)  # a NaN is not equal to itself


@given(TUNINGS)
@settings(max_examples=8, deadline=None)
def test_every_result_has_a_text_a_page_and_a_plot(tuning: Tuning) -> None:
    check_presentation(tuning)


@pytest.mark.slow
@given(TUNINGS)
@settings(max_examples=400, deadline=None)
def test_more_results_have_a_text_a_page_and_a_plot(tuning: Tuning) -> None:
    check_presentation(tuning)


def check_presentation(tuning: Tuning) -> None:
    assert max(map(len, str(tuning).splitlines())) <= 80
    assert "<iframe" in tuning._repr_html_()
    tuning.plot()


def test_a_file_can_be_loaded(tmp_path: Path) -> None:
    tuning = gpt_tuning()
    tuning.save(tmp_path / "run.json")
    loaded = Tuning.load(tmp_path / "run.json")
    assert type(loaded) is Tuning
    assert loaded.to_dict() == tuning.to_dict()
    assert str(loaded) == str(tuning)


@pytest.mark.parametrize("tuning", [small_tuning(), gpt_tuning()], ids=["ops", "modules"])
def test_the_policy_is_saved_as_toml(tuning: Tuning, tmp_path: Path) -> None:
    tuning.save(tmp_path / "mine.toml")
    assert Policy.load(tmp_path / "mine.toml") == tuning.policy
    tuning.policy.save(tmp_path / "same.toml")
    assert (tmp_path / "mine.toml").read_text() == (tmp_path / "same.toml").read_text()


def test_the_ending_of_a_name_says_the_format(tmp_path: Path) -> None:
    legal = r"Legal: \.toml \(the policy\), \.html \(a page\), \.json \(to read it again\)\."
    with pytest.raises(OptionError, match=legal):
        small_tuning().save(tmp_path / "run.yaml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "torch_promote comparison"}, "its \"format\" is 'torch_promote comparison', not"),
        ({"trials": [{}]}, "it is incomplete or was changed (KeyError"),
        ({"tolerance": {"loss": "1e-3"}}, "it is incomplete or was changed (TypeError: expected a number"),
        ({"comparison": None}, "it is incomplete or was changed (AttributeError"),
    ],
)
def test_a_file_that_is_no_result_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**small_tuning().to_dict(), **change}))
    with pytest.raises(OptionError) as caught:
        Tuning.load(file)
    assert str(caught.value).startswith(f"cannot read the tuning {str(file)!r}: {complaint}")


def test_infinite_errors_are_strings() -> None:
    data = small_tuning(errors={"loss": math.inf}).to_dict()
    assert data["errors"] == {"loss": "inf"}
    assert data["trials"][3]["errors"] == {"loss": "inf"}
