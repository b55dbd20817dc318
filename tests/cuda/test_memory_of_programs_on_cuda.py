"""In each mode, the peak memory of programs on a device stays within the bounds of docs/casts.md."""

from __future__ import annotations

import functools

import pytest

from helpers.program_peaks import EVERY_PROGRAM, check_bounds, peaks

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks", "stand_in")


@functools.cache
def of_stock(name: str) -> tuple[int, int]:
    return peaks(name, "stock", "cuda")


@pytest.mark.parametrize(("name", "mode"), EVERY_PROGRAM)
def test_a_program_stays_within_the_bounds_of_the_mode(name: str, mode: str) -> None:
    check_bounds(name, mode, "cuda", of_stock(name))
