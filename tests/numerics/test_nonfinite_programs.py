"""`find_nonfinite` on random programs with a planted fault, and the overrides that it suggests."""

from __future__ import annotations

import pytest

from helpers.nonfinite_programs import FAULTS, Program, make_program
from torch_promote.numerics.find_nonfinite import NonfiniteReport, find_nonfinite
from torch_promote.numerics.nonfinite_suggestion import _in_force

NAMES = list(FAULTS)


def check(program: Program) -> NonfiniteReport:
    """Runs a program, and compares the origin with the planted fault."""
    with find_nonfinite(program.model) as report:
        program.step()
    fault, origin = program.fault, report.origin
    found = None if origin is None else (origin.op, origin.module, origin.phase, origin.kind)
    assert found == ((fault.op, program.path, fault.phase, fault.kind) if fault.op else None), str(report)
    if origin is not None:
        assert "nonfinite_programs.py:" in origin.line
    return report


@pytest.mark.parametrize("name", NAMES)
def test_the_origin_is_exact(name: str) -> None:
    check(make_program(NAMES.index(name), name))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_the_origin_is_exact_in_random_programs(seed: int) -> None:
    check(make_program(seed))


def check_suggestion(program: Program) -> None:
    """Asks for an override, and runs the program under it."""
    report = check(program)
    policy = report.suggest(program.step)
    if not program.fault.curable:
        assert policy is None
        return
    assert policy is not None, str(report)
    worked = [attempt for attempt in report.tried if attempt.finite]
    assert worked
    assert not report.tried[0].finite
    program.model.zero_grad()
    with _in_force(worked[-1].overrides), find_nonfinite(program.model) as again:
        assert program.step().isfinite()
    assert not again.found


@pytest.mark.parametrize("name", ["mm", "cast of autocast", "masked", "backward of mm", "half", "log"])
def test_a_suggested_override_cures_the_program(name: str) -> None:
    check_suggestion(make_program(NAMES.index(name), name))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 360))
def test_suggested_overrides_cure_random_programs(seed: int) -> None:
    check_suggestion(make_program(seed))
