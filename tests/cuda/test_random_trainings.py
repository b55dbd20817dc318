"""Random programs that train, write to weights and capture graphs have stock's bits, in each cache mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.random_trainings import outcome

pytestmark = pytest.mark.usefixtures("stand_in")

PROGRAMS = 16
MODES = ("weights", "persistent", "all", "mixed")


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tp.clear_cache()
        yield
        tp.clear_cache()


@pytest.mark.parametrize("part", range(4))
def test_bits_are_stocks(part: int) -> None:
    for seed in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        actions, expected = outcome(seed, None)
        assert len(expected) > len(actions) // 2
        for mode in MODES:
            assert_same(outcome(seed, mode)[1], expected, f"program {seed} with {mode}: {actions}")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_bits_of_many_programs_are_stocks(part: int) -> None:
    for seed in range(1000 + part * 100, 1100 + part * 100):
        expected = outcome(seed, None)[1]
        for mode in MODES:
            assert_same(outcome(seed, mode)[1], expected, f"program {seed} with {mode}")
