"""The rules against the libraries as they are installed: NumPy and array-api-strict, and JAX with `make test-jax`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from held_against import compare, rule_for
from libraries import (
    array_api_answers,
    jax_answers,
    jax_answers_without_x64,
    numpy_answers,
    numpy_answers_without_ml_dtypes,
)

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


@with_jax
@pytest.mark.parametrize("name", ["jax", "jax_without_x64"])
def test_jax(name: str) -> None:
    answers = jax_answers if name == "jax" else jax_answers_without_x64
    differences, _, compared = compare(name, answers()[1], rule_for(name))
    assert differences == []
    assert compared >= 600
