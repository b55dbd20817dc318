"""Threads that train, serve, clear, end and suspend regions, all at once, in a process that forks meanwhile."""

from __future__ import annotations

import pytest

from helpers.subprocesses import environment, run_python

ATTACK = """
import sys, threading, torch
from concurrent.futures import ThreadPoolExecutor
from torch import nn
from torch.utils.checkpoint import checkpoint
import torch_promote as tp
from helpers.forking import fork_for

torch.set_num_threads(1)
shared = [nn.Parameter(torch.full((8, 8), 1.0 / 8)) for _ in range(6)]
x = torch.ones(4, 8)
right = [x]
for w in shared:
    right.append((right[-1].bfloat16() @ w.detach().bfloat16()).float())
end, wrong, rounds = False, [], [0] * 6


def forward(hidden):
    for index, w in enumerate(shared):
        hidden = (hidden @ w).float()
        if not torch.equal(hidden, right[index + 1]):
            wrong.append(index)
    return hidden


def train(cache, run=lambda backward: backward()):
    source = x.clone().requires_grad_()
    with tp.my_autocast("cpu", cache=cache):
        y = checkpoint(forward, source, use_reentrant=False)
        run(lambda: torch.autograd.grad(y.sum(), [source, *shared]))


def hand_over(cache):
    # The backward in a thread of its own, which ends.
    def run(backward):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    train(cache, run)


def serve(cache):
    with tp.my_autocast("cpu", cache=cache), torch.no_grad():
        forward(x)
        forward(x)


def clear(cache):
    torch.clear_autocast_cache()
    with torch.autocast("cpu"), tp.my_autocast("cpu", cache=cache):
        forward(x)


def end_inside(cache):
    # A thread that ends with casts.
    def work():
        tp.my_autocast("cpu", cache=cache).__enter__()
        forward(x)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def suspend(cache):
    @tp.my_autocast("cpu", cache=cache)
    def steps():
        forward(x)
        yield
        forward(x)
    for _ in steps():
        pass


def repeat(index, action):
    while not end:
        for cache in ("weights", "all", "persistent"):
            action(cache)
        rounds[index] += 1


train("weights")  # imports what a checkpoint needs: beside the other threads that takes many times as long
actions = [train, hand_over, serve, clear, end_inside, suspend]
pool = ThreadPoolExecutor(len(actions))
running = [pool.submit(repeat, index, action) for index, action in enumerate(actions)]


def in_child():
    # A new thread has new casts, which takes our lock. A region may take PyTorch's, which no fork releases.
    thread = threading.Thread(target=tp.cache_info)
    thread.start()
    thread.join()


forks, hung = fork_for(float(sys.argv[1]), in_child, enough=lambda: min(rounds) > 0)
end = True
for one in running:
    one.result(60)
print(forks, hung, len(wrong), min(rounds))
"""


@pytest.mark.parametrize("check_casts", ["0", "1"], ids=["", "checked"])
@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_threads_that_train_clear_end_and_fork(seconds: int, check_casts: str) -> None:
    env = environment(TORCH_PROMOTE_CHECK_CASTS=check_casts)
    done = run_python(ATTACK, str(seconds), env=env, quiet=True, timeout=seconds + 120)
    assert (done.returncode, done.stderr) == (0, "")
    forks, hung, wrong, rounds = map(int, done.stdout.split())
    assert (hung, wrong) == (0, 0)
    assert min(forks, rounds) > 0
