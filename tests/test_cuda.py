"""Runs the tests of tests/cuda/, which need a CUDA device, on the stand-in, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cuda_stand_in
from helpers import under_install
from helpers.subprocesses import environment


def test_on_the_stand_in(request: pytest.FixtureRequest) -> None:
    if reason := cuda_stand_in.why_not():
        pytest.skip(reason)
    chosen = request.config.getoption("markexpr")
    marks = f"({chosen}) and not needs_gpu" if chosen else "not needs_gpu"
    options = ["-q", "-p", "no:cacheprovider", "--device", "cuda-stand-in", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name("cuda"))]
    # The process must not inherit the settings of a pytest-xdist worker.
    env = {name: value for name, value in environment().items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*command, *under_install.options(request.config)],
        env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
    assert "xfailed" not in done.stdout  # a limit is a test of the limit
