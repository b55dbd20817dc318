"""Kept casts keep no source alive, belong to one thread, and end when stock's end."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_promote as tp
from helpers.casts import (
    BIG,
    CastCount,
    Region,
    X,
    entries,
    half,
    ours,
    resident_bytes,
    stock,
    weight,
)
from helpers.comparison import assert_same
from helpers.probes import in_thread
from helpers.subprocesses import output_of, run_python


def use(w: torch.Tensor) -> None:
    assert torch.equal(X @ w, X @ half(w))


# --- sources that die


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_dropped_weight_dies_at_once(grad: bool) -> None:
    w = weight()
    tensor, storage = weakref.ref(w), StorageWeakRef(w.untyped_storage())
    with ours(), torch.set_grad_enabled(grad):
        X @ w
        X @ w
        del w
        assert tensor() is None
        assert storage.expired()


def test_a_finalizer_of_a_weight_may_clear_the_cache() -> None:
    w = weight()
    weakref.finalize(w, torch.clear_autocast_cache)
    with ours():
        for _ in range(5):
            (X @ w).sum().backward()
        del w
        torch.clear_autocast_cache()


def test_weights_made_and_dropped_in_a_region_do_not_pile_up() -> None:
    peak, dropped_before, alive = 0, tp.cache_info()["dropped"], weight()
    with ours(), CastCount(of=alive) as count:
        for _ in range(60):
            use(alive)
            use(weight())
            peak = max(peak, tp.cache_info()["entries"])
        assert peak < 20
        assert tp.cache_info()["bytes"] <= peak * 16 * 16 * 2
        assert tp.cache_info()["dropped"] - dropped_before > 40
    assert count.casts == 1


def test_weights_dropped_together_make_room_for_later_ones() -> None:
    with ours():
        first = [weight() for _ in range(60)]
        for w in first:
            use(w)
        assert tp.cache_info()["entries"] == 60
        del first, w
        for w in [weight() for _ in range(60)]:
            use(w)
            assert tp.cache_info()["entries"] < 120  # stock's number


def test_weights_at_the_address_of_dead_ones_get_casts_of_their_own() -> None:
    addresses = set()
    with ours():
        for _ in range(300):
            w = weight()
            addresses.add(w.data_ptr())
            use(w)
            del w
    assert len(addresses) < 300


# --- threads


def test_a_thread_that_ends_inside_a_region_takes_its_cache_along() -> None:
    refs: list[Any] = []

    def work() -> None:
        w = weight()
        refs.append(StorageWeakRef(w.untyped_storage()))
        region = ours()
        region.__enter__()
        X @ w

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert refs[0].expired()
    assert tp.cache_info()["entries"] == 0


# --- regions that are no autocast regions


def test_promotion_is_no_autocast_region_and_keeps_no_cast() -> None:
    with tp.promotion("jax"):
        assert nesting() == 0
        X @ weight()
        with ours():
            assert nesting() == 1
            X @ weight()
            assert entries() == 1
        assert entries() == 0
    with stock(), tp.promotion("jax"):
        assert nesting() == 1
        w = weight()
        X @ w
        assert entries() == 1
        with tp.promotion("torch"):
            X @ w
        assert entries() == 1
    assert entries() == 0


def test_regions_left_in_another_order_end_the_casts_with_the_last_autocast_region() -> None:
    promotion, region = tp.promotion("jax"), ours()
    for first, second in ((promotion, region), (region, promotion)):
        for left in ((first, second), (second, first)):
            first.__enter__()
            second.__enter__()
            X @ weight()
            for one in left:
                assert entries() == (nesting() > 0)
                one.__exit__(None, None, None)
            assert (entries(), nesting()) == (0, 0)


def nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


# --- torch.clear_autocast_cache


@pytest.mark.parametrize("cache", ["weights", "all"])
@pytest.mark.parametrize("around", [ours, stock, contextlib.nullcontext], ids=["ours", "stock", "nothing"])
def test_it_frees_the_memory_at_once(around: Any, cache: str) -> None:
    with around(), ours(cache=cache):
        w = nn.Parameter(torch.zeros(BIG, BIG))
        y = torch.ones(1, BIG) @ w
        del y
        before = resident_bytes()
        torch.clear_autocast_cache()
        assert before - resident_bytes() > BIG * BIG


# --- regions of torch.autocast around


def in_stocks_region(region: Region, **arguments: Any) -> list[Any]:
    w = weight()
    with stock():
        outputs = []
        for _ in range(4):
            with region(**arguments):
                outputs += [X @ w, torch.relu(X) @ w]
    total = sum((output.float() * (index + 0.37)).square().mean() for index, output in enumerate(outputs))
    (gradient,) = torch.autograd.grad(total, w)
    return [*outputs, gradient]


@pytest.mark.parametrize("cache", ["weights", "persistent", "all", "none"])
def test_regions_inside_stocks_share_their_casts(cache: str) -> None:
    arguments = {"cache_enabled": False} if cache == "none" else {}
    assert_same(in_stocks_region(ours, cache=cache), in_stocks_region(stock, **arguments))


def test_casts_beyond_stocks_end_with_our_regions() -> None:
    w, frozen = weight(), nn.Parameter(torch.randn(16, 16), requires_grad=False)
    with stock():
        with ours(cache="all"):
            X @ w
            X @ frozen
            assert entries() == 3
        assert entries() == 1
        with CastCount(of=w) as count, ours():
            X @ w
        assert count.casts == 0


# --- several threads: a region does not end another thread's casts, clearing ends all threads'


@pytest.mark.parametrize("end", ["region of ours", "nested regions of ours", "suspended"])
def test_the_end_of_our_region_in_another_thread_leaves_the_casts_here(end: str) -> None:
    w, other = weight(), weight()

    def work() -> None:
        with ours(), ours() if end.startswith("nested") else contextlib.nullcontext():
            X @ other
        if end == "suspended":

            @ours()
            def steps() -> Iterator[Any]:
                yield X @ other

            next(steps())

    with ours():
        X @ w
        in_thread(work)
        with CastCount(of=w) as count:
            X @ w
        assert count.casts == 0
        w.data.mul_(3)  # without a change of its version
        torch.clear_autocast_cache()
        assert torch.equal(X @ w, X.bfloat16() @ w.detach().bfloat16())


def test_a_thread_that_ended_inside_a_region_runs_no_python_for_the_casts_of_a_subclass() -> None:
    """The cast is leaked: its end would call Python, in which the thread has no state any more."""
    program = """
        import threading

        import torch
        import torch_promote as tp

        from torch.utils._pytree import tree_map_only

        class Wrapped(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

            def __init__(self, inner):
                self.inner = inner

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                args, kwargs = tree_map_only(Wrapped, lambda wrapped: wrapped.inner, (args, kwargs or {}))
                return tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))

        w = torch.nn.Parameter(Wrapped(torch.ones(16, 4)))

        def work():
            tp.my_autocast("cpu").__enter__()
            torch.ones(8, 16) @ w
            print(tp.cache_info()["entries"])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print(tp.cache_info()["entries"])
        with tp.my_autocast("cpu"):
            print((torch.ones(8, 16) @ w).dtype)
    """
    assert output_of(program, compiler=True) == "1\n0\ntorch.bfloat16\n"


# --- where the end of a region could deadlock


def test_a_region_entered_inside_stocks_cast_does_not_deadlock() -> None:
    result = output_of(
        """
        import torch, torch_promote as tp
        from torch.utils._python_dispatch import TorchDispatchMode
        w, inner, x = (torch.ones(4, 4, requires_grad=grad) for grad in (True, True, False))
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten._to_copy.default and args[0] is w:
                    with tp.my_autocast("cpu"):
                        x @ inner
                return func(*args, **(kwargs or {}))
        with torch.autocast("cpu"), Mode():
            x @ w
        print(tp.cache_info()["entries"])
        """,
        compiler=True,
    )
    assert result == "0\n"


@pytest.mark.parametrize("seconds", [0.5, pytest.param(10, marks=pytest.mark.slow)])
def test_the_end_of_a_region_waits_for_no_cast_that_needs_the_gil(seconds: float) -> None:
    """Stock casts while it holds its lock, and a dispatch mode called by the cast needs the GIL."""
    result = output_of(
        """
        import sys, threading, time, torch, torch_promote as tp
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        torch.set_num_threads(1)
        x, w = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))
        end = time.monotonic() + float(sys.argv[1])

        def stock():
            while time.monotonic() < end:
                with Mode(), torch.autocast("cpu"):
                    x @ torch.nn.Parameter(x)

        def ours():
            while time.monotonic() < end:
                with tp.my_autocast("cpu"):
                    x @ w

        threads = [threading.Thread(target=stock), threading.Thread(target=ours)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("done")
        """,
        str(seconds),
        compiler=True,
    )
    assert result == "done\n"


# --- forks while other threads use the cache

FORKS = """
import os, signal, sys, threading, time, torch
from torch import nn
import torch_promote as tp

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


def fork_for(seconds):
    # Forks children that call `in_child` and end; stops when one hangs for 20 seconds.
    forks = hung = 0
    started = time.monotonic()
    while (forks < 3 or time.monotonic() - started < seconds) and not hung:
        child = os.fork()
        if child == 0:
            in_child()
            os._exit(0)
        forks += 1
        deadline = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                hung += 1
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.001)
    return forks, hung


forks, hung = fork_for(float(sys.argv[1]))
end = True
for thread in threads:
    thread.join()
print(forks, hung)
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_no_child_hangs_that_is_forked_while_threads_use_the_cache(seconds: int) -> None:
    done = run_python(FORKS, str(seconds), quiet=True, timeout=seconds + 60)
    assert done.returncode == 0, done.stderr
    forks, hung = map(int, done.stdout.split())
    assert forks > 2
    assert hung == 0
