"""Runs of pytest inside of a test, for the tests of our plugins."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from helpers.subprocesses import environment

Run = Callable[..., pytest.RunResult]


def ends(result: pytest.RunResult) -> dict[str, str]:
    """How each test ended, by its name, from the short summary of -rA: "PASSED", "FAILED", "ERROR", ..."""
    found = [re.match(r"([A-Z]+) test_it\.py::(\S+)", line) for line in result.outlines]
    return {match[2]: match[1] for match in found if match}


@pytest.fixture
def plain_pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A `pytester` that no setting of the outer run reaches, with lines of 200 columns."""
    for variable in ("CI", "BUILD_NUMBER"):  # with CI, pytest repeats whole messages in its summary
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly")  # the tests in it have an order
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeini("[pytest]")
    return pytester
