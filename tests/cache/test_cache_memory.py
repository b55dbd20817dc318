"""The memory that casts take in the benchmark's programs: in each mode within the bounds of docs/casts.md."""

from __future__ import annotations

import functools

import pytest

from benchmarks.programs import PROGRAMS
from helpers.program_peaks import EVERY_PROGRAM, TRAINING, bytes_beyond_stock, check_bounds, peaks

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")


@functools.cache
def of_stock(name: str, around: bool = False) -> tuple[int, int]:
    return peaks(name, "stock", "cpu", around)


@pytest.mark.parametrize("around", [False, True], ids=["", "backward inside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_default_mode_takes_no_more_memory_than_stock(name: str, around: bool) -> None:
    check_bounds(name, "weights", "cpu", of_stock(name, around), around)


#: Every day, the mode that keeps most.
PROGRAMS_BY_MODE = [
    param if "all" in param.values else pytest.param(*param.values, marks=[*param.marks, pytest.mark.slow], id=param.id)
    for param in EVERY_PROGRAM
    if "weights" not in param.values
]


@pytest.mark.parametrize(("name", "mode"), PROGRAMS_BY_MODE)
def test_a_program_stays_within_the_bounds_of_the_mode(name: str, mode: str) -> None:
    check_bounds(name, mode, "cpu", of_stock(name))


def test_what_a_mode_keeps_is_needed() -> None:
    """Otherwise the bounds beyond stock's would be too wide to prove anything."""
    for name, mode in (("Llama-like, inference mode", "persistent"), ("Llama-like, inference mode", "all")):
        first, _ = peaks(name, mode, "cpu")
        assert first > of_stock(name)[0] + bytes_beyond_stock(name, mode, "cpu") / 2
    assert {bytes_beyond_stock(name, "weights", "cpu") for name in PROGRAMS} == {0}


def test_sharing_activations_takes_less_memory_in_training() -> None:
    name = "Llama-like, training"
    assert name in TRAINING
    assert peaks(name, "all", "cpu")[1] < 0.98 * of_stock(name)[1]
