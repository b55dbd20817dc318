"""KeyboardInterrupt at each point of an operation at which CPython looks for signals leaves nothing behind."""

from __future__ import annotations

import pytest

from helpers.interrupted_operations import OPERATIONS
from helpers.subprocesses import run_module

#: Operations that an interrupt at one point leaves half done. An entry that no longer fails is an error.
LEFT_HALF_DONE = {
    "module tables": "an interrupt in `Binding.__del__`, which Python ignores: the modules keep the tables",
}
#: Operations that take long: they run functions of Python at each call of an op.
SLOW = ("trace", "find_nonfinite", "crosscheck", "register_policy", "promotion")


def parameters() -> list[object]:
    found: list[object] = []
    for name in OPERATIONS:
        reason = LEFT_HALF_DONE.get(name)
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        found.append(pytest.param(name, marks=[*marks, pytest.mark.slow] if name in SLOW else marks))
    return found


@pytest.mark.parametrize("name", parameters())
def test_an_interrupt_leaves_nothing(name: str) -> None:
    done = run_module("helpers.interrupted_operations", name, "60", quiet=True)
    points, *wrong = done.stdout.splitlines()
    assert int(points) > 1
    assert wrong == []
