"""Runs the tests of tests/cuda/, which need a CUDA device, on the stand-in, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cuda_stand_in
from helpers import under_install
from helpers.subprocesses import environment

ROOT = Path(__file__).parents[2]


def run_tests(*arguments: str, timeout: float = 280) -> str:
    """Runs pytest on the stand-in, and returns its output. Fails if pytest fails; skips if there is no stand-in."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cuda-stand-in", *arguments]
    return _run(command, timeout)


def run_program(code: str, *arguments: str, timeout: float = 120) -> str:
    """Runs code on the stand-in, and returns its output."""
    return _run(["-m", "cuda_stand_in", "-c", code, *arguments], timeout)


def _run(command: list[str], timeout: float) -> str:
    if reason := cuda_stand_in.why_not():
        pytest.skip(reason)
    # The process must not inherit the settings of a pytest-xdist worker.
    env = {name: value for name, value in environment().items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, *command],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


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
