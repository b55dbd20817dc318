"""Runs the tests of tests/cuda/, which need a CUDA device, on the stand-in, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import under_install
from helpers.on_stand_in import run_tests

FILES = sorted(Path(__file__).with_name("cuda").glob("test_*.py"))
#: The number of processes. Starting one takes as long as many tests, so there is one per core of the test machines.
GROUPS = 2


@pytest.mark.parametrize("group", range(GROUPS))
def test_on_the_stand_in(group: int, request: pytest.FixtureRequest) -> None:
    chosen = request.config.getoption("markexpr")
    marks = f"({chosen}) and not needs_gpu" if chosen else "not needs_gpu"
    output = run_tests(*map(str, FILES[group::GROUPS]), "-m", marks, *under_install.options(request.config))
    assert " passed" in output
    assert "skipped" not in output
    assert "xfailed" not in output  # a limit is a test of the limit
