"""Runs the tests of tests/cuda/, which need a CUDA device, on the stand-in, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import under_install
from helpers.on_stand_in import run_program, run_tests

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


FAILING_COUNT = """
import torch, torch_promote as tp
from torch_promote import _C

def fail():
    raise RuntimeError("not counted")

_C.set_capture_functions(None, fail, fail)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda()
x = torch.ones(2, 4, device="cuda")
with tp.stock_autocast("cuda", dtype=torch.bfloat16):
    expected = model(x)
for _ in range(2):
    with tp.my_autocast("cuda", dtype=torch.bfloat16):
        result = model(x)
    print(torch.equal(result, expected), _C.depth())
"""


def test_an_error_of_the_functions_that_count_replays_is_reported_and_the_region_ends() -> None:
    output = run_program(FAILING_COUNT)
    assert output.count("Exception ignored in: <function fail at ") == 1
    assert "RuntimeError: not counted" in output
    assert [line for line in output.splitlines() if line.endswith(" 0")] == ["True 0", "True 0"]


INTERRUPTED_COUNT = """
import torch, torch_promote as tp
from torch_promote import _C

calls = []

def count():
    calls.append(1)
    if len(calls) == 1:
        raise KeyboardInterrupt

_C.set_capture_functions(None, count, count)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda()
x = torch.ones(2, 4, device="cuda")
for _ in range(4):
    try:
        with tp.my_autocast("cuda", dtype=torch.bfloat16):
            model(x)
    except KeyboardInterrupt:
        print("interrupted", _C.depth())
print(len(calls))
"""


def test_an_interrupt_of_the_functions_that_count_replays_is_the_programs_and_they_are_called_again() -> None:
    assert run_program(INTERRUPTED_COUNT).splitlines()[-2:] == ["interrupted 0", "2"]
