"""Cases in which stock autocast fails and ours works. Each test checks both, so a fix in PyTorch makes it fail.

docs/differences.md names these tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.casts import CastCount, Region, X, half, ours, stock
from helpers.probes import in_thread
from helpers.subprocesses import Program, output_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
F8 = torch.float8_e4m3fn


def enabled() -> bool:
    return torch.is_autocast_enabled("cpu")


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(16, 4))


# --- 1. a weight updated inside a region


def losses(region: Region, steps_in_one_region: int) -> list[float]:
    """Five steps of SGD, so many of them in each region."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer, result = torch.optim.SGD(model.parameters(), lr=0.5), []
    for start in range(0, 5, steps_in_one_region):
        with region():
            for _ in range(start, min(start + steps_in_one_region, 5)):
                optimizer.zero_grad()
                loss = model(X).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                result.append(loss.item())
    return result


def test_a_weight_updated_in_a_region_is_cast_again() -> None:
    expected = losses(stock, 1)
    assert len(set(expected)) == 5
    assert losses(stock, 5) == [expected[0]] * 5
    assert losses(ours, 5) == losses(ours, 1) == expected


def test_a_weight_whose_data_is_assigned_in_a_region_is_cast_again() -> None:
    def run(region: Region) -> tuple[torch.Tensor, torch.Tensor]:
        w = weight()
        with region():
            X @ w
            w.data = torch.randn(16, 4)
            return X @ w, half(X) @ half(w)

    assert not torch.equal(*run(stock))
    assert torch.equal(*run(ours))


# --- 2. a nested region of another dtype


def test_a_nested_region_of_another_dtype_gets_a_cast_of_its_own() -> None:
    def run(region: Region) -> torch.Tensor:
        w = weight()
        with region(BF16):
            X @ w
            with region(FP16):
                result = X @ w
        return torch.stack((result, half(X, FP16) @ half(w, FP16)))

    with pytest.raises(RuntimeError, match="same dtype"):
        run(stock)
    result, expected = run(ours)
    assert result.dtype is FP16
    assert torch.equal(result, expected)


# --- 3. threads


def in_another_thread_of_another_dtype(region: Region) -> torch.dtype:
    w = weight()

    def other() -> torch.dtype:
        with region(FP16):
            return (X @ w).dtype

    with region(BF16):
        X @ w
        return in_thread(other)


def casts_around_another_threads_region(region: Region) -> int:
    w = weight()

    def other() -> None:
        with region():
            pass

    with CastCount(of=w) as count, region():
        X @ w
        in_thread(other)
        X @ w
    return count.casts


def test_threads_do_not_hit_each_others_casts() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        in_another_thread_of_another_dtype(stock)
    assert in_another_thread_of_another_dtype(ours) is FP16


def test_a_threads_region_ends_without_clearing_the_caches_of_others() -> None:
    assert casts_around_another_threads_region(stock) == 2
    assert casts_around_another_threads_region(ours) == 1


# --- 4. autocast inside a cast

REENTRANT = """
    import torch, torch_promote as tp
    from torch.utils._python_dispatch import TorchDispatchMode

    x, w, other = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)

    class During(TorchDispatchMode):
        busy = False
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {{}}))
            if func is torch.ops.aten._to_copy.default and args[0] is w and not self.busy:
                self.busy = True
                print("in the cast", flush=True)
                {action}
                self.busy = False
            return result

    with {region}("cpu"):
        with During():
            y = x @ w
    print("done", y.dtype)
"""
REENTRANT_ACTIONS = {
    "a nested region": "with {region}('cpu'): x @ other",
    "clearing the cache": "{clear}()",
}
KINDS = {
    "stock": {"region": "tp.stock_autocast", "clear": "torch.clear_autocast_cache"},
    "ours": {"region": "tp.my_autocast", "clear": "tp.clear_cache"},
}


@pytest.mark.parametrize("action", [pytest.param("a nested region", marks=pytest.mark.slow), "clearing the cache"])
def test_autocast_may_be_used_while_a_weight_is_cast(action: str) -> None:
    scripts = {
        kind: REENTRANT.format(**names, action=REENTRANT_ACTIONS[action].format(**names))
        for kind, names in KINDS.items()
    }
    assert output_of(scripts["ours"]) == "in the cast\ndone torch.bfloat16\n"
    read, write = os.pipe()
    stock = Program(scripts["stock"], stdout=write)
    os.close(write)
    with open(read, "rb", buffering=0) as output:
        assert output.readline() == b"in the cast\n"  # once it is there, what is left takes no time
        with pytest.raises(subprocess.TimeoutExpired):
            stock.wait(timeout=3)
        assert output.read() == b""


# --- 5. memory


def alive_in_the_region(region: Region) -> int:
    """The number of 60 used and dropped weights that are still alive before the region ends."""
    dropped = []
    with region():
        for _ in range(60):
            w = weight()
            X @ w
            dropped.append(weakref.ref(w))
            del w
        return sum(ref() is not None for ref in dropped)


def test_a_region_does_not_keep_dropped_weights_alive() -> None:
    assert alive_in_the_region(stock) == 60
    assert alive_in_the_region(ours) == 0


# --- 6. one object, entered twice


def on_after_one_object_was_nested_in_itself(region: Region) -> bool:
    once = region()

    def run() -> bool:
        with once, once:
            pass
        return enabled()

    return in_thread(run)


def test_an_object_may_be_nested_in_itself() -> None:
    assert on_after_one_object_was_nested_in_itself(stock)
    assert not on_after_one_object_was_nested_in_itself(ours)


# --- 7. promote


def cat(region: Region, *dtypes: torch.dtype) -> torch.dtype:
    with region(BF16):
        return torch.cat([torch.ones(2, dtype=dtype) for dtype in dtypes]).dtype


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((FP16, FP16), FP16),
        ((FP16, BF16), FP32),
        ((BF16, FP16), FP32),
        ((FP16, FP32), FP32),
        ((F8, F8), F8),
        ((F8, BF16), FP32),
        ((BF16, F8), FP32),
        ((F8, FP32), FP32),
    ],
    ids=str,
)
def test_promote_has_an_answer_for_every_mixture(dtypes: tuple[torch.dtype, ...], expected: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        cat(stock, *dtypes)
    assert cat(ours, *dtypes) is expected


def test_promote_does_not_depend_on_the_order() -> None:
    assert cat(stock, FP32, FP16) is FP32
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        cat(stock, FP16, FP32)
    assert cat(ours, FP32, FP16) is cat(ours, FP16, FP32) is FP32


# --- 8. code that runs in steps


def decorated_coroutine(region: Region) -> bool:
    @region()
    async def body() -> bool:
        await asyncio.sleep(0)
        return enabled()

    return asyncio.run(body())


def decorated_generator(region: Region) -> bool:
    @region()
    def body() -> Generator[bool, None, None]:
        yield enabled()

    return next(body())


def decorated_async_generator(region: Region) -> bool:
    @region()
    async def body() -> AsyncGenerator[bool, None]:
        yield enabled()

    async def first() -> bool:
        generator = body()
        result = await anext(generator)
        await generator.aclose()
        return result

    return asyncio.run(first())


@pytest.mark.parametrize(
    "run", [decorated_coroutine, decorated_generator, decorated_async_generator], ids=lambda run: run.__name__
)
def test_a_decorated_body_that_runs_in_steps_sees_its_region(run: Callable[[Region], bool]) -> None:
    assert not run(stock)
    assert run(ours)


AWAITING = """
    import asyncio, torch, torch_promote as tp

    async def holder():
        with {region}("cpu"):
            await asyncio.sleep(0)
            inside.append(torch.is_autocast_enabled("cpu"))
            await asyncio.sleep(0)

    async def other():
        for _ in range(2):
            outside.append(torch.is_autocast_enabled("cpu"))
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(holder(), other())

    for _ in range(2):
        inside, outside = [], []
        asyncio.run(both())
        print(inside, outside)
"""


def test_a_region_held_across_an_await_does_not_show_in_other_tasks() -> None:
    """In separate processes, because the first region that a process enters in an event loop matters as well."""
    output = {kind: output_of(AWAITING.format(**names)) for kind, names in KINDS.items()}
    assert output["stock"] == "[True] [True, True]\n" * 2
    assert output["ours"] == "[True] [False, False]\n" * 2


# --- found later


def requires_grad_after_a_use_below_autograd(region: Region) -> bool:
    w = weight()

    class During(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.relu.default:
                with region():
                    X @ w
            return func(*args, **(kwargs or {}))

    with region():
        with During():
            torch.relu(X)
        return (X @ w).requires_grad


def test_a_use_below_autograd_does_not_cut_later_uses_off_from_their_gradient() -> None:
    assert not requires_grad_after_a_use_below_autograd(stock)
    assert requires_grad_after_a_use_below_autograd(ours)


def left_open(kind: str, interrupts: int) -> int:
    program = "import sys; from helpers import interrupts; interrupts.main(*sys.argv[1:])"
    return int(output_of(program, kind, str(interrupts)))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="not tried on this version of CPython")
def test_an_interrupt_leaves_no_region_open() -> None:
    assert left_open("stock", 300) > 0
    assert left_open("my_autocast", 800) == 0
    assert left_open("promotion", 800) == 0


# --- 11. forks

FORKED = """
import os, signal, threading, torch, torch_promote as tp
from torch.utils._python_dispatch import TorchDispatchMode

x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
casting, forked = threading.Event(), threading.Event()
class During(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and not casting.is_set():
            casting.set(); forked.wait()
        return func(*args, **(kwargs or {{}}))

def train():
    with {region}("cpu"), During(): x @ w

thread = threading.Thread(target=train)
thread.start(); casting.wait()
child = os.fork()
if child == 0:
    signal.alarm(3)
    with {region}("cpu"): pass
    os._exit(0)
forked.set(); thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_may_fork_while_a_thread_casts_a_weight() -> None:
    assert output_of(FORKED.format(**KINDS["stock"])) == f"{-signal.SIGALRM}\n"  # the child hung
    assert output_of(FORKED.format(**KINDS["ours"])) == "0\n"
