"""The rules compared with the golden tables, which were generated with the libraries that they are named after."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.array_libraries import LIBRARIES
from helpers.golden_comparison import EXCEPTIONS, compare, golden, rule_for

#: How many answers at least are compared on the oldest PyTorch: all but those with dtypes that it may lack.
AT_LEAST = {"numpy": 1_500, "jax": 1_800, "jax_without_x64": 900, "array_api": 1_000}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_rule_is_what_its_library_does(name: str) -> None:
    differences, _, compared = compare(name, golden(name)[1], rule_for(name))
    assert differences == []
    assert compared >= AT_LEAST[name]


@pytest.mark.parametrize("name", LIBRARIES)
def test_no_exception_is_stale(name: str) -> None:
    _, used, _ = compare(name, golden(name)[1], rule_for(name))
    assert [e for e in EXCEPTIONS if e.library == name and e not in used] == []


def test_every_exception_is_of_a_golden_table_and_has_a_reason() -> None:
    assert {e.library for e in EXCEPTIONS} <= LIBRARIES.keys()
    assert all(e.reason.strip().endswith(".") and e.shown for e in EXCEPTIONS)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_golden_table_names_its_versions_and_depends_on_no_order(name: str) -> None:
    versions, answers = golden(name)
    assert versions
    assert all(answers.values())
    assert [answer for table in answers.values() for answer in table.values() if " or " in answer] == []


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_planted_difference_is_found(name: str) -> None:
    rule = rule_for(name)
    wrong = rule.tensors | {(torch.int32, torch.int16): torch.int64}  # type: ignore[operator]
    differences, _, _ = compare(name, golden(name)[1], dataclasses.replace(rule, tensors=wrong))
    assert f"pairs int32, int16: {name} int32, ours int64, 0 exceptions" in differences


def test_an_exception_covers_one_outcome_only() -> None:
    rule = rule_for("numpy")
    wrong = rule.numbers | {(float, torch.bfloat16): torch.float64}  # type: ignore[operator]
    differences, _, _ = compare("numpy", golden("numpy")[1], dataclasses.replace(rule, numbers=wrong))
    sections = "numbers", "division_by_numbers"
    assert differences == [f"{s} bfloat16, float: numpy float32, ours float64, 0 exceptions" for s in sections]
