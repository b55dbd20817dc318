"""The rules compared with the installed libraries: NumPy and array-api-strict, and JAX with `make test-jax`."""

from __future__ import annotations

import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from helpers.array_libraries import (
    STANDARD,
    array_api_answers,
    jax_answers,
    jax_answers_without_x64,
    numpy_answers,
    numpy_answers_without_ml_dtypes,
)
from helpers.golden_comparison import compare, rule_for
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion_rules.rule import NUMBER_TYPES

with_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed; `make test-jax` installs it")
with_ml_dtypes = pytest.mark.skipif(
    find_spec("ml_dtypes") is None, reason="ml_dtypes is not installed; `make test-jax` installs it"
)


def test_numpy() -> None:
    differences, _, compared = compare("numpy", numpy_answers_without_ml_dtypes(), rule_for("numpy"))
    assert differences == []
    assert compared >= 900


@with_ml_dtypes
def test_numpy_with_ml_dtypes() -> None:
    differences, _, compared = compare("numpy", numpy_answers()[1], rule_for("numpy"))
    assert differences == []
    assert compared >= 1_000


def test_array_api_strict() -> None:
    differences, _, compared = compare("array_api", array_api_answers()[1], rule_for("array_api"))
    assert differences == []
    assert compared >= 800


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


@with_jax
@pytest.mark.parametrize("name", ["jax", "jax_without_x64"])
def test_jax(name: str) -> None:
    answers = jax_answers if name == "jax" else jax_answers_without_x64
    differences, _, compared = compare(name, answers()[1], rule_for(name))
    assert differences == []
    assert compared >= 600
