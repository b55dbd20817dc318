"""In each mode, the peak memory of typical programs stays within the bounds of docs/casts.md."""

from __future__ import annotations

import functools

import pytest

from benchmarks.programs import PROGRAMS
from helpers.program_peaks import EVERY_PROGRAM, TRAINING, bytes_beyond_stock, check_bounds, peaks

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")


@functools.cache
def of_stock(name: str) -> tuple[int, int]:
    return peaks(name, "stock", "cpu")


#: Every day, the mode that keeps most; tests/cuda has all modes on the device made of host memory, which is faster.
CHOSEN = [
    param if "all" in param.values else pytest.param(*param.values, marks=[*param.marks, pytest.mark.slow], id=param.id)
    for param in EVERY_PROGRAM
]


@pytest.mark.parametrize(("name", "mode"), CHOSEN)
def test_a_program_stays_within_the_bounds_of_the_mode(name: str, mode: str) -> None:
    check_bounds(name, mode, "cpu", of_stock(name))


def test_what_a_mode_keeps_is_needed() -> None:
    """Otherwise the bounds beyond stock's would be too wide to prove anything."""
    for name, mode in (("Llama-like, inference mode", "persistent"), ("Llama-like, inference mode", "all")):
        first, _ = peaks(name, mode, "cpu")
        assert first > of_stock(name)[0] + bytes_beyond_stock(name, mode, "cpu") / 2


def test_sharing_activations_takes_less_memory_in_training() -> None:
    name = "Llama-like, training"
    assert peaks(name, "all", "cpu")[1] < 0.98 * of_stock(name)[1]


def test_programs_are_told_apart() -> None:
    assert set(PROGRAMS) > TRAINING
    assert {bytes_beyond_stock(name, "weights", "cpu") for name in PROGRAMS} == {0}
