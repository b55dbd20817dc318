"""Processes end in any way, whatever torch_promote holds: with the right status, and nothing on stderr. Forks go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from helpers.subprocesses import Program, environment, run_python, run_together

PREAMBLE = """
import atexit, os, sys, threading, warnings, torch
warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)  # Python 3.12 warns wherever threads run
import torch_promote as tp
torch.set_num_threads(1)
x, w = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))

def use():
    y = x @ w
    y.float().sum().backward()
    with tp.my_autocast("cpu", overrides={"exp": "fp32"}), torch.autocast("cpu", dtype=torch.float16):
        assert (x @ w).dtype is torch.float16
    return y
"""

#: What a program has when it ends. The names are those of the table in docs/reliability.md.
STATES = {
    "region open": "tp.my_autocast('cpu').__enter__(); use()",
    "regions nested": """
        tp.my_autocast('cpu', overrides={'matmul': 'float16'}).__enter__()
        torch.autocast('cpu').__enter__()
        tp.my_autocast('cpu', cache='all').__enter__()
        use()
        """,
    "decorated function": """
        @tp.my_autocast('cpu', overrides={'matmul': 'float16'})
        def inside(): use(); end()
        """,
    "persistent casts": """
        weights = [torch.nn.Parameter(torch.ones(8, 4)) for _ in range(8)]
        with tp.my_autocast('cpu', cache='persistent'), torch.no_grad():
            casts = [torch.nn.functional.linear(x, weight) for weight in weights]
        assert tp.cache_info()['persistent_entries'] == 8
        """,
    "used at exit": """
        @atexit.register
        def at_exit():
            with tp.my_autocast('cpu', cache='persistent'): use()
            tp.promotion('jax').__enter__()
        # What these import evaluates code, by which Python forgets that a KeyboardInterrupt ended it.
        tp.promotion('jax')
        with tp.my_autocast('cpu', cache='persistent'): pass
        """,
    "used in __del__": """
        class Last:
            def __init__(self): self.tp, self.x, self.w = tp, x, w
            def __del__(self):
                with self.tp.my_autocast('cpu', overrides={'matmul': 'float16'}): self.x @ self.w
        last, sys.last = Last(), Last()
        cycle = [Last()]; cycle.append(cycle)
        """,
    "thread-local": """
        class OfThread(threading.local): pass
        of_thread = OfThread()
        of_thread.region = tp.my_autocast('cpu', cache='all'); of_thread.region.__enter__()
        of_thread.result = x @ w
        """,
    "install()": "tp.install(overrides={'matmul': 'float16'}, cache='all'); torch.autocast('cpu').__enter__(); x @ w",
    "promotion": "tp.promotion('jax').__enter__(); torch.ones(2, dtype=torch.int32) + torch.ones(2).half(); use()",
    "trace": "block = tp.trace(values=True); block.__enter__(); tp.my_autocast('cpu').__enter__(); x @ w",
    "crosscheck": "block = tp.crosscheck(); block.__enter__(); tp.my_autocast('cpu').__enter__(); x @ w",
    "suspended generator": """
        @tp.my_autocast('cpu', cache='all')
        def steps():
            with tp.promotion('jax'), tp.my_autocast('cpu', overrides={'matmul': 'float16'}):
                while True: yield x @ w
        suspended = steps(); next(suspended)
        sys.suspended = steps(); next(sys.suspended)
        """,
    "task pending": """
        import asyncio
        async def work():
            with tp.my_autocast('cpu'):
                x @ w
                await asyncio.Event().wait()
        async def main():
            global task
            task = asyncio.ensure_future(work())
            await asyncio.sleep(0)
        asyncio.run(main())
        """,
    "graph alive": """
        from torch.utils.checkpoint import checkpoint
        with tp.my_autocast('cpu', overrides={'matmul': 'float16'}):
            graph = checkpoint(lambda x: (x @ w).exp(), x, use_reentrant=False).sum() + (x @ w).float().sum()
        """,
    "module policies": """
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        tp.set_module_policy(model, {'0': 'fp32', '1': {'linear': 'float16'}})
        tables = tp.Policy.stock().override_modules({'1': {'linear': 'float16'}})
        handle = tables.apply_to(model)
        tp.my_autocast('cpu', policy=tables, model=model).__enter__()
        model(x)
        """,
    "registered policies": """
        handle = tp.register_policy('tanh', 'lower')
        tp.set_default_policy(tp.Policy.named('fp32_safe'))
        with tp.my_autocast('cpu'): assert x.tanh().dtype is torch.bfloat16
        """,
}


class End(NamedTuple):
    """A way in which a program ends: the body of a function that ends it, the exit status, and what it has printed."""

    code: str
    status: int = 0
    out: str = ""

    def is_met(self, status: int, out: str, err: str) -> bool:
        """Whether a program has ended like this, and said nothing else."""
        if self is ENDS["daemon threads"] and (status, err.strip()) == STOCK_ABORTS:
            return True
        if any(text in err for text in ("terminate called", "Fatal Python error", "Exception ignored")):
            return False
        said = err.splitlines()
        if self.status == -signal.SIGINT:  # the last line of a traceback
            return (status, out, said[-1:]) == (self.status, self.out, ["KeyboardInterrupt"])
        return (status, out, said) == (self.status, self.out, [])


#: Before Python 3.14, a daemon thread that waits for the GIL when Python ends is ended by pthread_exit. If PyTorch's
#: C++ is on its stack, as in any call of an op, that calls std::terminate. Programs without torch_promote end
#: like this, too.
STOCK_ABORTS = (-6, "terminate called without an active exception")

#: The ends.
ENDS = {
    "shutdown": End("pass"),
    "sys.exit": End("sys.exit(3)", 3),
    "sys.exit in a thread": End(
        """
        def leave():
            with tp.my_autocast('cpu'): use(); sys.exit(3)
        thread = threading.Thread(target=leave); thread.start(); thread.join()
        """
    ),
    "os._exit": End("os._exit(4)", 4),
    "fork, os._exit": End(
        """
        child = os.fork()
        if child == 0:
            with tp.my_autocast('cpu'): use()
            tp.clear_cache()
            os._exit(5)
        use()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """,
        out="5\n",
    ),
    "fork, sys.exit": End(
        """
        child = os.fork()
        if child == 0:
            use()
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """,
        out="5\n",
    ),
    "fork in a thread": End(
        """
        def work():
            tp.my_autocast('cpu').__enter__(); use()
            child = os.fork()
            if child == 0:
                use()
                os._exit(5)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        thread = threading.Thread(target=work); thread.start(); thread.join()
        """,
        out="5\n",
    ),
    "thread exit": End(
        """
        def work():
            tp.my_autocast('cpu', cache='all').__enter__()
            tp.my_autocast('cpu', overrides={'matmul': 'float16'}).__enter__()
            use()
        for _ in range(3):
            thread = threading.Thread(target=work); thread.start(); thread.join()
        use()
        """
    ),
    "daemon threads": End(
        """
        started = threading.Barrier(3)
        def work():
            started.wait()
            while True:
                with tp.my_autocast('cpu', cache='persistent'), torch.no_grad(): x @ w
                with tp.promotion('jax'), tp.my_autocast('cpu', overrides={'matmul': 'float16'}): x @ w
        for _ in range(2): threading.Thread(target=work, daemon=True).start()
        started.wait()
        """
    ),
    "KeyboardInterrupt": End("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
}


def program(state: str, end: str) -> str:
    """Returns the program that ends in a way while it has a state."""
    ending = textwrap.indent(textwrap.dedent(ENDS[end].code), "    ")
    having = textwrap.dedent(STATES[state])
    ends = "inside()" if "def inside" in having else "end()"
    return f"{PREAMBLE}\ndef end():\n{ending}\n\n{having}\n{ends}\n"


#: The pairs of a state and an end that every test run has. They meet each state; `make test-all` has all pairs.
EVERYDAY = {(state, list(ENDS)[place % len(ENDS)]) for place, state in enumerate(STATES)}


def check(cells: list[tuple[str, str]]) -> None:
    """Runs programs together. A program that hangs raises TimeoutExpired."""
    # What checkpoints import takes most of the time.
    programs = [Program(program(state, end), compiler=state == "graph alive") for state, end in cells]
    ended = run_together(programs, timeout=60 + 5 * len(cells))
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
    "tp.my_autocast('cpu', overrides={'mm.default': 'fp32'})",
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

for _ in range(5):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
while len(died) < 5 and time.monotonic() < deadline:  # a thread is joined before it destroys its objects
    time.sleep(0.01)
print(len(died))
"""


@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="PyTorch 2.11 destroys such objects with a deleted PyThreadState: time.sleep(0) in one crashes without us",
)
def test_what_dies_last_in_a_thread_may_use_regions() -> None:
    done = run_python(REGIONS_WHILE_A_THREAD_IS_DESTROYED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


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
