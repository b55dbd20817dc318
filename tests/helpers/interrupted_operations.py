"""A program that interrupts an operation of torch_promote at every point, and compares the state with that before.

    python -m helpers.interrupted_operations NAME MOST            # NAME: a key of OPERATIONS; at MOST points, at most
    python -m helpers.interrupted_operations NAME RUNS SEED       # in so many runs, each at a random time

It prints the number of interrupts, and a line for each after which something was left or no longer worked.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.interrupted_calls import count_points, interrupt_at
from helpers.thread_state import thread_state
from torch_promote import _C
from torch_promote.integrations.checkpoint import _thread as recomputations
from torch_promote.integrations.checkpoint import checkpoint_contexts
from torch_promote.integrations.compile import graph_enter, graph_exit
from torch_promote.regions.installation import Installation
from torch_promote.regions.watching import _watchers

X, W = torch.ones(4, 4), nn.Parameter(torch.ones(4, 4))
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
TABLES = tp.Policy.stock().override_modules({"1": {"linear": "float16"}})
RULES = [tp.make_rule(f"rule {n}", {(torch.int32, torch.float16): torch.float32}, over="torch") for n in range(40)]
INSTALLATION = Installation(None, {"matmul": "float16"}, None)
GRAPH_SPEC = tp.my_autocast("cpu", torch.float16)._packed
_new = itertools.count()


class Operation(NamedTuple):
    """An operation.

    Attributes:
        run: It.
        undo: What a program calls to undo it, whether or not it was interrupted.
        ends_objects: Whether Python calls functions of it because an object dies. It ignores interrupts in these.
    """

    run: Callable[[], object]
    undo: Callable[[], object] = lambda: None
    ends_objects: bool = False


def _regions() -> None:
    with tp.my_autocast("cpu", overrides={"exp": "fp32"}), tp.my_autocast("cpu", cache="all"):
        X @ W


@tp.my_autocast("cpu", overrides={"matmul": "float16"})
def _decorated() -> None:
    X @ W


@tp.my_autocast("cpu")
def _steps() -> Iterator[Any]:
    yield X @ W
    with tp.my_autocast("cpu", torch.float16):
        yield X @ W


def _rule() -> None:
    with tp.promotion(RULES[next(_new) % len(RULES)], matmul=True):
        torch.ones(2, dtype=torch.int32) + torch.ones(2).half()


def _installed() -> None:
    tp.install(overrides={"matmul": "float16"})
    with torch.autocast("cpu"):
        X @ W


def _installed_as() -> None:
    with tp.installed_as(overrides={"matmul": "float16"}), torch.autocast("cpu"):
        X @ W


def _installed_over_another() -> None:
    with tp.installed_as(policy="off"), tp.installed_as(overrides={"matmul": "float16"}), torch.autocast("cpu"):
        X @ W


def _module_policies() -> None:
    tp.set_module_policy(MODEL, {"0": "fp32", "1": {"linear": "float16"}})
    with tp.my_autocast("cpu"):
        MODEL(X)


def _tables() -> None:
    with tp.my_autocast("cpu", policy=TABLES, model=MODEL):
        MODEL(X)


def _registered() -> None:
    tp.register_policy("tanh", "lower", replace=True)
    with tp.my_autocast("cpu"):
        X.tanh()


def _registered_for_a_block() -> None:
    with tp.register_policy("tanh", "lower"), tp.my_autocast("cpu"):
        X.tanh()


def _unregister() -> None:
    tp.register_policy("tanh", "fp32", replace=True).remove()


def _trace() -> None:
    with tp.trace(MODEL, values=True), tp.my_autocast("cpu"):
        MODEL(X).float().sum().backward()


def _nonfinite() -> None:
    with tp.find_nonfinite(MODEL), tp.my_autocast("cpu"):
        MODEL(X)


def _crosscheck() -> None:
    with tp.crosscheck(), tp.my_autocast("cpu"):
        X @ W


def _check_casts() -> None:
    with tp.check_casts(), tp.my_autocast("cpu"):
        X @ W
        X @ W


def _optimizer() -> None:
    with tp.my_autocast("cpu", cache="persistent"):
        (X @ W).float().sum().backward()
    torch.optim.SGD([W], lr=0.0, fused=True).step()


def _checkpointed(use_reentrant: bool) -> None:
    """The backward recomputes outside of the region of the forward, and so puts its policy in force."""
    with tp.my_autocast("cpu", overrides={"matmul": "float16"}):
        y = checkpoint(lambda x: (x @ W).exp(), X.clone().requires_grad_(), use_reentrant=use_reentrant)
    y.float().sum().backward()


def _checkpointed_in_backward_region() -> None:
    """A forward outside of regions, recomputed in one: autocast is off in the recomputation."""
    y = checkpoint(lambda x: (x @ W).exp(), X.clone().requires_grad_(), use_reentrant=False)
    with tp.my_autocast("cpu", overrides={"matmul": "float16"}):
        y.sum().backward()


def _checkpointed_with_contexts() -> None:
    with tp.my_autocast("cpu", overrides={"matmul": "float16"}):
        start = X.clone().requires_grad_()
        y = checkpoint(lambda x: (x @ W).exp(), start, use_reentrant=False, context_fn=checkpoint_contexts)
    y.float().sum().backward()


def _graph_region() -> None:
    graph_enter(GRAPH_SPEC)
    graph_exit(GRAPH_SPEC)


OPERATIONS = {
    "regions": Operation(_regions),
    "decorated function": Operation(_decorated),
    "generator": Operation(lambda: list(_steps())),
    "promotion": Operation(_rule),
    "install": Operation(_installed, tp.uninstall),
    "installed_as": Operation(_installed_as),
    "installed_as over another": Operation(_installed_over_another),
    "module policies": Operation(_module_policies, lambda: tp.remove_module_policy(MODEL)),
    "module tables": Operation(_tables, ends_objects=True),
    "register_policy": Operation(_registered, _unregister),
    "register_policy for a block": Operation(_registered_for_a_block),
    "set_default_policy": Operation(lambda: tp.set_default_policy("fp32_safe"), lambda: tp.set_default_policy(None)),
    "trace": Operation(_trace),
    "find_nonfinite": Operation(_nonfinite),
    "crosscheck": Operation(_crosscheck),
    "check_casts": Operation(_check_casts),
    "optimizer": Operation(_optimizer, tp.clear_cache),
    "checkpoint": Operation(lambda: _checkpointed(False)),
    "reentrant checkpoint": Operation(lambda: _checkpointed(True)),
    "checkpoint outside of regions": Operation(_checkpointed_in_backward_region),
    "checkpoint contexts": Operation(_checkpointed_with_contexts),
    "digest": Operation(INSTALLATION.digest),
    "region of a graph": Operation(_graph_region),
}


def state() -> dict[str, Any]:
    """Returns everything that an operation changes, and must restore."""
    found = thread_state()
    with tp.my_autocast("cpu"):
        found["dtypes"] = [(X @ W).dtype, X.tanh().dtype, X.exp().dtype, MODEL(X).dtype]
    found["keys"] = str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())
    found["rule"] = _C.promotion_rule()
    found["recomputes"] = recomputations.mirrors
    found["installed"] = tp.installed(), torch.autocast.__enter__, torch.autocast.__exit__, torch.autocast.__call__
    found["registered"] = dict(tp.registered_policies())
    found["default"] = tp.default_policy()
    found["module"] = [sorted(vars(one)) for one in MODEL.modules()]
    found["module hooks"] = [len(one._forward_pre_hooks) for one in MODEL.modules()]
    found["optimizer hooks"] = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    found["modes"] = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    found["watchers"] = len(_watchers)
    checked = _C.cast_check_counts()[0]
    with tp.my_autocast("cpu"):
        X @ W
        X @ W
    found["casts are checked"] = _C.cast_check_counts()[0] > checked
    return found


def check(operation: Operation, most: int) -> tuple[int, list[str]]:
    """Interrupts an operation at every point, or at `most` of them. Returns how many, and what went wrong."""
    for _ in range(3):  # what it loads and keeps from its first runs
        operation.run()
        operation.undo()
    before = state()
    points = count_points(operation.run)
    operation.undo()
    wrong = []
    chosen = range(1, points + 1, -(-points // most))
    ignored: list[object] = []
    sys.unraisablehook = lambda about: ignored.append(about.exc_type) if operation.ends_objects else None
    for point in chosen:
        interrupted, where = interrupt_at(operation.run, point)
        try:
            operation.undo()
            after = state()
            left = [name for name in before if after[name] != before[name]]
            if left:
                wrong.append(f"point {point}, {where}: left {', '.join(left)}")
                break
            if where and not interrupted and ignored != [KeyboardInterrupt]:
                wrong.append(f"point {point}, {where}: the interrupt was swallowed")
            ignored.clear()
            operation.run()
            operation.undo()
        except Exception:
            wrong.append(f"point {point}, {where}: afterwards {traceback.format_exc(limit=-3)}")
            break
    return len(chosen), wrong


def check_at_random_times(operation: Operation, runs: int, seed: int) -> tuple[int, list[str]]:
    """The same at random times, which may also be in PyTorch's code, or at a point that `check` leaves out."""
    armed = False

    def interrupt(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = lambda about: None  # interrupts that Python ignores, in what it calls because an object dies
    draw, seconds = random.Random(seed), []
    for _ in range(5):
        start = time.perf_counter()
        operation.run()
        seconds.append(time.perf_counter() - start)
        operation.undo()
    before, interrupts = state(), 0
    for run in range(runs):
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, min(seconds)))
            operation.run()
            armed = False
        except KeyboardInterrupt:
            armed = False
            interrupts += 1
        try:
            operation.undo()
            after = state()
        except Exception:
            return interrupts, [f"run {run}: afterwards {traceback.format_exc(limit=-3)}"]
        if left := [name for name in before if after[name] != before[name]]:
            return interrupts, [f"run {run}: left {', '.join(left)}"]
    return interrupts, []


def main(name: str, most: str, seed: str | None = None) -> None:
    operation = OPERATIONS[name]
    points, wrong = (
        check(operation, int(most)) if seed is None else check_at_random_times(operation, int(most), int(seed))
    )
    print(points)
    for line in wrong:
        print(line)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
