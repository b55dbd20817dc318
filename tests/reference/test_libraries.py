"""The rules compared with the libraries that they are named after: by golden tables, and the installed libraries."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import pytest
import torch

from helpers.array_libraries import (
    GOLDEN,
    LIBRARIES,
    NUMBERS,
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


class DeliberateException(NamedTuple):
    """Operands for which a rule deliberately differs from its library: regular expressions over an answer and ours."""

    library: str
    section: str
    operands: str
    theirs: str
    ours: str

    def covers(self, *difference: str) -> bool:
        """Whether this exception covers a difference."""
        return all(map(re.fullmatch, self, difference))


SMALL = r"u?int[24]"
EXCEPTIONS = (
    # NEP 50 has a Python float keep any floating dtype. NumPy does not know that bfloat16 and float8 are floating.
    DeliberateException("numpy", "sums|quotients", "bfloat16, Python float", "float32", "bfloat16"),
    DeliberateException("numpy", "sums|quotients", r"float8_\w+, Python float", "float32", r"float8_\w+"),
    # NumPy's functions take the smallest floating dtype that holds the integers, and its division takes float64. A rule
    # here has one answer for both, and gives the more precise one.
    DeliberateException("numpy", "functions", "bool|u?int8", "float16", "float64"),
    DeliberateException("numpy", "functions", "u?int16", "float32", "float64"),
    # With ml_dtypes, the dtype of a sum with float8 can depend on the order of the operands, and can be too small for
    # both. PyTorch promotes no float8 either, so the rule has no row for it.
    DeliberateException("numpy", "sums|quotients", r"float8_\w+, \w+|\w+, float8_\w+", r"\w+", RAISES),
    DeliberateException("numpy", "sums|quotients", r"float8_\w+, Python complex", "complex64", RAISES),
    # NumPy has no small integers, and PyTorch has no arithmetic on them. NEP 50 has a Python int keep any of them.
    DeliberateException("numpy", "sums|quotients", rf"{SMALL}, (?!float8)\w+|(?!float8)\w+, {SMALL}", r"\w+", RAISES),
    DeliberateException("numpy", "sums", f"{SMALL}, Python int", "int8", SMALL),
    DeliberateException("numpy", ".*", rf"{SMALL}(, Python \w+)?", "float16|complex64", RAISES),
    # JAX's list of what integers become in floating point lacks these two, and its division then returns integers.
    DeliberateException("jax.*", "quotients", r"u?int2, [\w ]+|\w+, u?int2", "u?int2", RAISES),
    # PyTorch always has 64-bit dtypes, and has no setting for what a Python int counts as.
    DeliberateException("jax_without_x64", "sums|three", r".*\buint32\b.*|bool, Python int", "int32", "int64"),
    DeliberateException("jax_without_x64", "quotients", r".*\buint32\b.*|bool, Python int", "float32", "float64"),
)


def golden(name: str) -> Answers:
    return golden_answers((GOLDEN / f"{name}.txt").read_text(encoding="utf-8"))


def rule_for(name: str) -> PromotionRule:
    """The rule that a library is compared with."""
    _, rule, default_dtype = LIBRARIES.get(name, (None, name, "float32"))
    return promotion_rule(rule, getattr(torch, default_dtype))


def ours(rule: PromotionRule, section: str, operands: str) -> str | None:
    """A rule's result for operands spelled as in a table; None if this PyTorch lacks one of the dtypes."""
    given = [NUMBERS.get(word, getattr(torch, word, None)) for word in operands.split(", ")]
    if None in given:
        return None
    try:
        return dtype_name(rule.common(given, floats=section in ("quotients", "functions")))
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
AT_LEAST = {"numpy": 1_500, "jax": 1_800, "jax_without_x64": 900}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_rule_is_what_the_golden_table_says(name: str) -> None:
    differences, used, compared = compare(name, golden(name), rule_for(name))
    assert differences == []
    assert compared >= AT_LEAST[name]
    assert [e for e in EXCEPTIONS if re.fullmatch(e.library, name) and e not in used] == [], "stale exceptions"


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed; see `make test-jax`")


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("numpy", numpy_answers_without_ml_dtypes),
        pytest.param("numpy", lambda: numpy_answers()[1], marks=needs("ml_dtypes"), id="numpy with ml_dtypes"),
        ("array_api", array_api_answers),
        pytest.param("jax", lambda: jax_answers()[1], marks=needs("jax")),
        pytest.param("jax_without_x64", lambda: jax_answers_without_x64()[1], marks=needs("jax")),
    ],
)
def test_a_rule_is_what_the_installed_library_does(name: str, answers: Callable[[], Answers]) -> None:
    differences, _, compared = compare(name, answers(), rule_for(name))
    assert differences == []
    assert compared >= 600


def numpys(*operands: str) -> str:
    return str(np.result_type(*(NUMBERS[o] if o in NUMBERS else np.ones(2, o) for o in operands)))


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
