"""The memory that casts take: no more than stock's by default, and how much more in the modes that keep more."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

import torch_promote as tp
from benchmarks.measures import peak_bytes
from benchmarks.programs import PROGRAMS
from helpers.casts import Region, ours, stock
from helpers.memory_uses import LARGE, NAMES, USES, Use, model_and_input
from helpers.program_peaks import EVERY_PROGRAM, TRAINING, bytes_beyond_stock, check_bounds, peaks

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks")


def peak(use: Use, region: Region, name: str) -> int:
    """The peak memory of the program above the model and its input, including casts that outlive it."""
    use(region, *model_and_input(name, "cpu"))  # what PyTorch allocates once
    tp.clear_cache()
    model, x = model_and_input(name, "cpu")
    return peak_bytes(lambda: use(region, model, x), "cpu", warm=False)


def uses_of_models() -> Iterator[Any]:
    """The large models are used in every way, the others every day in these."""
    for name in NAMES:
        for use in USES:
            every_day = name in LARGE or use in ("train", "inference_mode")
            yield pytest.param(name, use, marks=() if every_day else pytest.mark.slow)


@pytest.mark.parametrize(("name", "use"), list(uses_of_models()))
def test_the_default_mode_takes_no_more_memory_than_stock(name: str, use: str) -> None:
    assert 0 < peak(USES[use], ours, name) <= 1.05 * peak(USES[use], stock, name)


# --- the programs of the benchmark stay within the bounds of docs/casts.md, in each mode


@functools.cache
def of_stock(name: str) -> tuple[int, int]:
    return peaks(name, "stock", "cpu")


#: Every day, the mode that keeps most; tests/cuda has all modes on the device made of host memory, which is faster.
PROGRAMS_BY_MODE = [
    param if "all" in param.values else pytest.param(*param.values, marks=[*param.marks, pytest.mark.slow], id=param.id)
    for param in EVERY_PROGRAM
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
