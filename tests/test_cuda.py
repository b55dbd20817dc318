"""Runs the tests of tests/cuda/, which need a CUDA device, on the stand-in, each file in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.on_stand_in import run_tests

FILES = sorted(Path(__file__).with_name("cuda").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_on_the_stand_in(file: Path, request: pytest.FixtureRequest) -> None:
    output = run_tests(str(file), "-m", request.config.getoption("markexpr"))
    assert " passed" in output
    assert "skipped" not in output
