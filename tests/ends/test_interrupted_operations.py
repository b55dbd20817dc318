"""KeyboardInterrupt leaves nothing behind, at each point of an operation at which CPython looks for signals."""

from __future__ import annotations

import pytest

from helpers.interrupted_operations import OPERATIONS
from helpers.subprocesses import run_module

#: Operations that take long: they run functions of Python at each call of an op.
SLOW = ("trace", "find_nonfinite", "crosscheck", "register_policy", "register_policy for a block", "promotion")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in OPERATIONS]
)
def test_an_interrupt_leaves_nothing(name: str) -> None:
    done = run_module("helpers.interrupted_operations", name, "60", quiet=True)
    points, *wrong = done.stdout.splitlines()
    assert int(points) > 1
    assert wrong == []


#: PyTorch's checkpoints open regions of torch.autocast and push hooks; docs/reliability.md, "Ends".
NOT_AT_ANY_TIME = [name for name in OPERATIONS if "checkpoint" in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in NOT_AT_ANY_TIME])
def test_an_interrupt_at_a_random_time_leaves_nothing(name: str) -> None:
    done = run_module("helpers.interrupted_operations", name, "300", "0", quiet=True)
    interrupts, *wrong = done.stdout.splitlines()
    assert int(interrupts) > 50
    assert wrong == []
