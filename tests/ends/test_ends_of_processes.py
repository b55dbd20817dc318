"""A process may end in any way, whatever torch_promote holds: its status is right, and it says nothing on stderr."""

from __future__ import annotations

import pytest
import torch

from helpers.ends import ENDS, STATES, program
from helpers.subprocesses import Program, run_python, run_together

#: The pairs of a state and an end that every test run has. They meet each state; `make test-all` has all pairs.
EVERYDAY = {(state, list(ENDS)[place % len(ENDS)]) for place, state in enumerate(STATES)}


def check(cells: list[tuple[str, str]]) -> None:
    """Runs programs together. A program that hangs raises TimeoutExpired."""
    ended = run_together([Program(program(state, end)) for state, end in cells], timeout=60 + 5 * len(cells))
    wrong = {
        (state, end): (done.returncode, done.stdout, done.stderr[-1500:])
        for (state, end), done in zip(cells, ended, strict=True)
        if not ENDS[end].is_met(done.returncode, done.stdout, done.stderr)
    }
    assert wrong == {}


def test_each_state_at_one_end() -> None:
    assert {state for state, _ in EVERYDAY} == set(STATES)
    assert {end for _, end in EVERYDAY} == set(ENDS)
    check(sorted(EVERYDAY))


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_every_state_at_each_end(end: str) -> None:
    check([(state, end) for state in STATES])


REGIONS = (
    "tp.my_autocast('cpu')",
    "tp.my_autocast('cpu', enabled=False)",
    "tp.my_autocast('cpu', cache='persistent')",
    "tp.my_autocast('cpu', overrides={'mm': 'fp32'})",
    "tp.promotion('numpy')",
)
#: Two threads make it likely that one of them waits for the GIL when Python ends.
REGIONS_IN_DAEMON_THREADS = """
import threading, time, torch_promote as tp

def work():
    while True:
        with {region}:
            pass

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


def test_daemon_threads_that_open_and_close_regions_end_quietly() -> None:
    """Regions of torch.autocast may abort such a process."""
    programs = [Program(REGIONS_IN_DAEMON_THREADS.format(region=region), finalize=True) for region in REGIONS]
    for region, done in zip(REGIONS, run_together(programs, timeout=120), strict=True):
        assert (done.returncode, done.stderr) == (0, ""), region


REGIONS_WHILE_A_THREAD_IS_DESTROYED = """
import threading, time, torch, torch_promote as tp

w, x = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)
region = tp.my_autocast("cpu", overrides={"matmul": "fp32"})
died, deadline = [], time.monotonic() + 30

class UsesRegions:
    def __del__(self):
        for _ in range(100):
            with tp.my_autocast("cpu"), region, tp.promotion("numpy"):
                pass
        died.append(1)

def work():
    torch._C._stash_obj_in_tls("last", UsesRegions())  # PyTorch's thread-local objects die after ours
    with tp.my_autocast("cpu"), region:
        x @ w

for _ in range(20):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
while len(died) < 20 and time.monotonic() < deadline:  # a thread is joined before it destroys its objects
    time.sleep(0.01)
print(len(died))
"""


@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="PyTorch 2.11 destroys such objects with a deleted PyThreadState: time.sleep(0) in one crashes without us",
)
def test_what_dies_last_in_a_thread_may_use_regions() -> None:
    done = run_python(REGIONS_WHILE_A_THREAD_IS_DESTROYED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "20\n", "")


FIRST_REGION_AT_THE_END = """
import sys, torch, torch_promote as tp

class Last:
    def __del__(self, tp=tp, torch=torch, x=torch.ones(2, 2)):
        with tp.my_autocast("cpu", cache={cache!r}, overrides={{"exp": "fp32"}}):
            print((x @ x).dtype, x.exp().dtype, flush=True)

sys.modules["dies with the modules"] = Last()
"""


@pytest.mark.parametrize("cache", ["weights", "persistent", "all", "none"])
def test_a_first_region_while_the_modules_are_destroyed(cache: str) -> None:
    done = run_python(FIRST_REGION_AT_THE_END.format(cache=cache), finalize=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch.bfloat16 torch.float32\n", "")
