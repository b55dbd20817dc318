"""Runs pytest with the plugin inside a test, on a test file with a mismatch."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from helpers.subprocesses import environment
from torch_promote.reference import promotion as promotion_table

BAD = """
    import torch

    def mixed():
        return torch.ones(3, dtype=torch.int8) + torch.ones(3, dtype=torch.int16)

    def test_bad():
        mixed()
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeini("[pytest]")

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest("-p", "_torch_promote_hooks", "-p", "no:cacheprovider", *arguments)

    return run


@pytest.fixture
def wrong_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the reference: int8 and int16 promote to int32."""
    monkeypatch.setitem(promotion_table._TABLE, (torch.int8, torch.int16), torch.int32)


Run = Callable[..., pytest.RunResult]


def counted(result: pytest.RunResult, title: str) -> int:
    """A count of the summary."""
    found = [re.match(rf"{re.escape(title)} +(\d+)", line) for line in result.outlines]
    (match,) = filter(None, found)
    return int(match.group(1))
