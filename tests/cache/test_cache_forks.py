"""A fork while other threads use the cache does not deadlock the child."""

from __future__ import annotations

import pytest

from helpers.subprocesses import environment, output_of, run_python

FORKS = """
import sys, threading, torch
from torch import nn
import torch_promote as tp
from helpers.forking import fork_for

torch.set_num_threads(1)
weights = [nn.Parameter(torch.ones(2, 2), requires_grad=False) for _ in range(1500)]
x = torch.ones(2, 2)


def infer(some):
    with tp.my_autocast("cpu", cache="persistent"), torch.no_grad():
        for w in some:
            x @ w


infer(weights)
end = False


def work(first):
    while not end:
        infer(weights[first : first + 50])
        torch.clear_autocast_cache()


threads = [threading.Thread(target=work, args=(first,)) for first in (0, 500, 1000)]
for thread in threads:
    thread.start()


def in_child():
    weights[0].detach()
    infer(weights[:1])
    tp.clear_cache()
    with tp.my_autocast("cpu", overrides={"aten::exp": "fp32"}):
        torch.ones(1).exp()


forks, hung = fork_for(float(sys.argv[1]), in_child)
end = True
for thread in threads:
    thread.join()
print(forks, hung)
"""


@pytest.mark.parametrize("seconds", [2, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", [FORKS])
def test_no_child_hangs_that_is_forked_while_threads(program: str, seconds: int) -> None:
    done = run_python(program, str(seconds), quiet=True, timeout=seconds + 60)
    assert done.returncode == 0, done.stderr
    forks, hung = map(int, done.stdout.split())
    assert forks > 2
    assert hung == 0


# The handler that the process registers first runs last, while ours holds all mutexes. A thread then calls the action
# for the first time.
FORKS_IN_A_FIRST_CALL = """
import ctypes, os, signal, sys, threading, time, torch

torch.set_num_threads(1)
x, weights = torch.ones(2, 2), [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
with torch.autocast("cpu"):
    x @ weights[2]  # what PyTorch makes in a first call
forks = threading.Event()


@ctypes.CFUNCTYPE(None)
def prepare():
    forks.set()
    time.sleep(0.3)


ctypes.CDLL(None).__register_atfork(prepare, None, None, None)
import torch_promote as tp


def cast(w):
    x @ w


def cast_persistently(w):
    with tp.my_autocast("cpu", cache="persistent"):
        x @ w


action = locals()[sys.argv[1]]


def work():
    with tp.my_autocast("cpu"):
        forks.wait()
        action(weights[0])


worker = threading.Thread(target=work)
worker.start()
child = os.fork()
if child == 0:
    signal.alarm(10)
    tp.cache_info()  # a cast may wait for PyTorch's mutex
    os._exit(0)
worker.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("check_casts", ["0", "1"], ids=["", "checked"])
@pytest.mark.parametrize("action", ["cast", "cast_persistently"])
def test_a_fork_while_a_thread_calls_for_the_first_time(action: str, check_casts: str) -> None:
    env = environment(TORCH_PROMOTE_CHECK_CASTS=check_casts)
    assert output_of(FORKS_IN_A_FIRST_CALL, action, env=env, quiet=True) == "0\n"
