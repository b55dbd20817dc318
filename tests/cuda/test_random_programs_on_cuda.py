"""Random programs on a CUDA device (tools/fuzz): training, writes and captured graphs have stock's bits."""

from __future__ import annotations

from itertools import islice

import pytest

import cuda_stand_in
from fuzz.drawing import MODES, draw_program, script_of
from fuzz.report import Counts
from fuzz.running import check, computes_in_host_memory, quiet
from fuzz.tree import names

pytestmark = pytest.mark.usefixtures("nothing_persists", "no_cast_checks", "stand_in")


def checked(seed: int, programs: range, mode: str | None = None) -> Counts:
    """Runs programs, and counts."""
    computes_in_host_memory(cuda_stand_in.running())
    counts = Counts()
    with quiet():
        for number in programs:
            program = draw_program(seed, number, "cuda", mode)
            verdict = check(program)
            assert not verdict.found, script_of(program, f"{number}: {verdict.detail}")
            counts.add(program, verdict)
    return counts


@pytest.mark.parametrize("part", range(4))
def test_bits_of_programs_are_stocks(part: int) -> None:
    counts = checked(0, range(part * 25, (part + 1) * 25))
    assert counts.outcomes["same"] >= 20
    assert counts.losses > 30
    assert counts.others > 150


def test_graphs_are_captured_and_replayed() -> None:
    """Programs that capture: of these, every mode has some."""
    for mode in MODES:
        drawn = ((number, set(names(draw_program(7, number, "cuda", mode)))) for number in range(600))
        numbers = [*islice((number for number, kinds in drawn if {"capture", "replay"} <= kinds), 4)]
        assert len(numbers) >= 3
        for number in numbers:
            checked(7, range(number, number + 1), mode)
