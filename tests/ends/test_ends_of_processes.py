"""Processes end in any way, whatever torch_promote holds: with the right status, and nothing on stderr. Forks go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.ends import ENDS, STATES, program
from helpers.subprocesses import Program, environment, run_python, run_together

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
        for cache in ("weights", "persistent", "all", "none"):
            with tp.my_autocast("cpu", cache=cache, overrides={"exp": "fp32"}):
                print((x @ x).dtype, x.exp().dtype, flush=True)

sys.modules["dies with the modules"] = Last()
"""


def test_a_first_region_while_the_modules_are_destroyed() -> None:
    done = run_python(FIRST_REGION_AT_THE_END, finalize=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch.bfloat16 torch.float32\n" * 4, "")


#: A worker sees the regions that were open if it was forked, and no region if it was spawned. Both can open their own,
#: and a region that came with the pickled dataset.
SCRIPT = """
import json, sys
import torch
import torch_promote as tp

class Items(torch.utils.data.Dataset):
    def __init__(self, region):
        self.region, self.weight = region, torch.ones(2, 2, requires_grad=True)

    def __len__(self):
        return 2

    def __getitem__(self, at):
        x = torch.ones(2, 2)
        around = x @ self.weight
        with self.region:
            inside = x @ self.weight
            inside.float().sum().backward()
        return str(around.dtype), str(inside.dtype), str((x @ x).dtype), self.weight.grad.clone()

def loaded(method, around, inside):
    items = Items(inside)
    loader = torch.utils.data.DataLoader(
        items, batch_size=None, num_workers=1, multiprocessing_context=method, persistent_workers=True
    )
    seen = []
    with around:
        torch.ones(2, 2) @ items.weight
        for _ in range(2):
            seen += [[*dtypes, grad.tolist()] for *dtypes, grad in loader]
        after = str((torch.ones(2, 2) @ items.weight).dtype)
    return [*seen, after, str((torch.ones(2, 2) @ items.weight).dtype)]

def main():
    method, results = sys.argv[1], {}
    for kind, autocast in (("stock", tp.stock_autocast), ("ours", tp.my_autocast)):
        results[kind] = [
            loaded(method, autocast("cpu"), autocast("cpu")),
            loaded(method, autocast("cpu", enabled=False), autocast("cpu")),
        ]
    overrides = tp.my_autocast("cpu", cache="persistent", overrides={"matmul": torch.float64})
    results["overrides"] = loaded(method, overrides, overrides)
    print(json.dumps(results))

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
"""


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_workers_that_start_in_a_region(tmp_path: Path, method: str) -> None:
    script = tmp_path / "loads.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), method]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(done.stdout)
    assert results["ours"] == results["stock"]
    around = "torch.bfloat16" if method == "fork" else "torch.float32"
    assert results["ours"][0][0][:3] == [around, "torch.bfloat16", around]
    assert results["overrides"][0][1] == "torch.float64"
