"""The rules compared with the libraries that they are named after: by golden tables, and the installed libraries."""

from __future__ import annotations

import dataclasses
import random
import re
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import pytest
import torch

from helpers.array_libraries import (
    GOLDEN,
    LIBRARIES,
    RAISES,
    STANDARD,
    Answers,
    array_api_answers,
    golden_answers,
    jax_answers,
    jax_answers_without_x64,
    numpy_answers,
    numpy_answers_without_ml_dtypes,
)
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion_rules import PromotionRule, PromotionRuleError, promotion_rule
from torch_promote.reference.promotion_rules.rule import NUMBER_TYPES

NUMBERS: dict[str, int | float | complex] = {"bool": True, "int": 1, "float": 1.0, "complex": 1j}

#: The number of operands of a section that are arrays; the others are Python numbers.
ARRAYS = {"pairs": 2, "numbers": 1, "division": 2, "division_by_numbers": 1, "functions": 1, "triples": 3}
ARRAYS["pairs_with_numbers"] = 2


class DeliberateException(NamedTuple):
    """Operands for which a rule deliberately differs from its library: an entry of exceptions.toml.

    `library` is the golden table; `section`, `operands`, `theirs` and `ours` are regular expressions over it and over
    the rule's result; `shown` and `reason` are for the documentation.
    """

    library: str
    section: str
    operands: str
    theirs: str
    ours: str
    shown: str
    reason: str

    def covers(self, library: str, section: str, operands: str, theirs: str, ours: str) -> bool:
        """Whether this exception covers a difference."""
        asked = (section, operands, theirs, ours)
        patterns = (self.section, self.operands, self.theirs, self.ours)
        return library == self.library and all(map(re.fullmatch, patterns, asked))


EXCEPTIONS = tuple(
    DeliberateException(**entry)
    for entry in tomllib.loads((GOLDEN / "exceptions.toml").read_text(encoding="utf-8"))["exception"]
)

FLOATING = ("division", "division_by_numbers", "functions")


def golden(name: str) -> Answers:
    return golden_answers((GOLDEN / f"{name}.txt").read_text(encoding="utf-8"))


def rule_for(name: str) -> PromotionRule:
    """The rule that a golden table is compared with."""
    _, rule, default_dtype = LIBRARIES[name]
    return promotion_rule(rule, getattr(torch, default_dtype))


def ours(rule: PromotionRule, section: str, operands: str) -> str | None:
    """A rule's result for operands spelled as in a table; None if this PyTorch lacks one of the dtypes."""
    words = operands.split(", ")
    arrays, numbers = words[: ARRAYS[section]], words[ARRAYS[section] :]
    if not all(isinstance(getattr(torch, name, None), torch.dtype) for name in arrays):
        return None
    given = [*(getattr(torch, name) for name in arrays), *(NUMBERS[name] for name in numbers)]
    try:
        return dtype_name(rule.common(given, floats=section in FLOATING))
    except PromotionRuleError:
        return RAISES


def compare(name: str, answers: Answers, rule: PromotionRule) -> tuple[list[str], set[DeliberateException], int]:
    """The differences without an exception, the exceptions that apply, and the number of compared answers."""
    differences, used, compared = [], set(), 0
    for section, table in answers.items():
        for operands, theirs in table.items():
            found = ours(rule, section, operands)
            compared += found is not None
            if found not in (None, theirs):
                covering = [e for e in EXCEPTIONS if e.covers(name, section, operands, theirs, found)]
                used.update(covering)
                if len(covering) != 1:
                    differences.append(
                        f"{section} {operands}: {name} {theirs}, ours {found}, {len(covering)} exceptions"
                    )
    return differences, used, compared


#: How many answers at least are compared on the oldest PyTorch: all but those with dtypes that it may lack.
AT_LEAST = {"numpy": 1_500, "jax": 1_800, "jax_without_x64": 900, "array_api": 1_000}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_rule_is_what_the_golden_table_says(name: str) -> None:
    differences, used, compared = compare(name, golden(name), rule_for(name))
    assert differences == []
    assert compared >= AT_LEAST[name]
    assert [e for e in EXCEPTIONS if e.library == name and e not in used] == [], "stale exceptions"


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_planted_difference_is_found(name: str) -> None:
    rule = rule_for(name)
    wrong = rule.tensors | {(torch.int32, torch.int16): torch.int64}  # type: ignore[operator]
    differences, _, _ = compare(name, golden(name), dataclasses.replace(rule, tensors=wrong))
    assert f"pairs int32, int16: {name} int32, ours int64, 0 exceptions" in differences


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed; see `make test-jax`")


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("numpy", numpy_answers_without_ml_dtypes),
        pytest.param("numpy", lambda: numpy_answers()[1], marks=needs("ml_dtypes"), id="numpy with ml_dtypes"),
        ("array_api", lambda: array_api_answers()[1]),
        pytest.param("jax", lambda: jax_answers()[1], marks=needs("jax")),
        pytest.param("jax_without_x64", lambda: jax_answers_without_x64()[1], marks=needs("jax")),
    ],
)
def test_a_rule_is_what_the_installed_library_does(name: str, answers: Callable[[], Answers]) -> None:
    differences, _, compared = compare(name, answers(), rule_for(name))
    assert differences == []
    assert compared >= 600


def numpys(*operands: str) -> str:
    numbers = {"bool": True, "int": 1, "float": 1.0, "complex": 1j}
    return str(np.result_type(*(numbers[o[7:]] if o.startswith("Python ") else np.ones(2, o) for o in operands)))


@pytest.mark.parametrize("numbers", [0, 1, 2])
def test_numpy_with_many_operands(numbers: int) -> None:
    """Cases beyond the tables of three: four to six arrays, and several Python numbers, in random order."""
    rng = random.Random(numbers)
    rule = rule_for("numpy")
    for _ in range(2_000):
        arrays = rng.sample((*STANDARD, "float16"), rng.randint(4 - numbers, 6))
        types = [rng.choice(NUMBER_TYPES) for _ in range(numbers)]
        operands = [*arrays, *(f"Python {number.__name__}" for number in types)]
        rng.shuffle(operands)
        found = rule.common([*(getattr(torch, name) for name in arrays), *(number(1) for number in types)])
        assert dtype_name(found) == numpys(*operands), operands
