"""Kept casts live as long as stock's: until the thread's outermost autocast region ends, or a call clears them."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.casts import CastCount, Region, ours, stock
from helpers.comparison import assert_same
from helpers.subprocesses import environment

X = torch.linspace(-1, 1, 8 * 16).view(8, 16)
BIG = 4096  # a cast of such a square weight is memory of its own, which goes back to the system when it is freed


def weight() -> Any:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(16, 16))


def write_unseen(w: Any) -> None:
    w.data.mul_(3)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def entries() -> int:
    return tp.cache_info()["entries"]


@contextlib.contextmanager
def as_carried_by_the_engine() -> Iterator[None]:
    """The dispatch keys of a region, and no region: so the autograd engine's device threads find themselves."""
    with ours():
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*keys):
        yield


def run_python(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


# --- regions that are no autocast regions


def steps_in_promotion(region: Region) -> list[Any]:
    w, losses = weight(), []
    with tp.promotion("torch"):
        for _ in range(4):
            with region():
                y = X @ w
                loss = (y + (X @ w)).float().square().mean()
            (gradient,) = torch.autograd.grad(loss, w)
            w.data.sub_(0.1 * gradient)
            losses += [loss.detach(), gradient]
    return losses


def test_promotion_around_a_loop_prolongs_no_cast() -> None:
    losses = steps_in_promotion(ours)
    assert_same(losses, steps_in_promotion(stock))
    assert losses[0] > losses[2] > losses[4] > losses[6]


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


def cleared(region: Region) -> list[Any]:
    w = weight()
    with region():
        first = X @ w
        write_unseen(w)
        torch.clear_autocast_cache()
        second = X @ w
        third = X @ w
    (gradient,) = torch.autograd.grad((first + second + third).float().sum(), w)
    return [first, second, third, gradient]


def test_stocks_clearing_clears_ours() -> None:
    results = cleared(ours)
    assert_same(results, cleared(stock))
    assert not torch.equal(results[0], results[1])


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


@pytest.mark.parametrize("times", [1, 3])
def test_it_clears_each_time(times: int) -> None:
    w = weight()
    with ours():
        for _ in range(times):
            assert torch.equal(X @ w, X.bfloat16() @ w.detach().bfloat16())
            write_unseen(w)
            torch.clear_autocast_cache()
        with CastCount(of=w) as count:
            X @ w
            X @ w
        assert count.casts == 1


STATES: dict[str, Callable[[], Any]] = {
    "float16": lambda: ours(torch.float16),
    "overrides": lambda: ours(overrides={"matmul": torch.float16}),
    "no_grad": torch.no_grad,
    "dispatch mode": CastCount,
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "profiler": torch.profiler.profile,
    "anomaly mode": torch.autograd.detect_anomaly,
    "deterministic": lambda: deterministic(),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("state", STATES)
def test_it_is_noticed_in_every_state(state: str) -> None:
    w = weight()
    with ours():
        with STATES[state]():
            X @ w
        write_unseen(w)
        torch.clear_autocast_cache()
        assert torch.equal(X @ w, X.bfloat16() @ w.detach().bfloat16())


def test_nobody_sees_the_sentinel() -> None:
    w, seen = weight(), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def program() -> Any:
        with ours(), torch.profiler.profile(profile_memory=True) as profile:
            X @ w
        return [(event.name, event.cpu_memory_usage) for event in profile.events()]

    first = program()
    with ours():
        X @ weight()  # plants
        again = program()
    assert [name for name, _ in first] == [name for name, _ in again]
    with Mode(), ours():
        X @ w
    casts = [func for func in seen if func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)]
    assert len(casts) == 2


def test_gradients_are_summed_in_stocks_order() -> None:
    """The sentinel takes no sequence number from the autograd nodes of the program."""

    def numbers(region: Region) -> list[int]:
        w, before = weight(), torch.ones(1, requires_grad=True).exp()
        with region():
            product = X @ w
        assert product.grad_fn is not None
        assert before.grad_fn is not None
        return [product.grad_fn._sequence_nr() - before.grad_fn._sequence_nr()]

    assert numbers(ours) == numbers(stock)


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


def test_the_end_of_stocks_region_frees_the_memory_at_once() -> None:
    region = stock()
    with region:
        w = nn.Parameter(torch.zeros(BIG, BIG))
        with ours():
            torch.ones(1, BIG) @ w
        assert entries() == 1
        before = resident_bytes()
    assert before - resident_bytes() > BIG * BIG
    assert entries() == 0


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


def test_each_of_stocks_regions_has_its_own_casts() -> None:
    w, products = weight(), []
    for _ in range(2):
        with stock(), ours():
            products.append(X @ w)
        write_unseen(w)
    assert not torch.equal(*products)


# --- other threads


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
        in_another_thread(work)
        with CastCount(of=w) as count:
            X @ w
        assert count.casts == 0
        write_unseen(w)
        torch.clear_autocast_cache()
        assert torch.equal(X @ w, X.bfloat16() @ w.detach().bfloat16())


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_clearing_clears_the_casts_of_every_thread(where: str) -> None:
    w, ready, cleared = weight(), threading.Event(), threading.Event()

    def work() -> bool:
        with ours():
            X @ w
            ready.set()
            assert cleared.wait(60)
            return torch.equal(X @ w, X.bfloat16() @ w.detach().bfloat16())

    with ThreadPoolExecutor(1) as pool, ours():
        future = pool.submit(work)
        assert ready.wait(60)
        X @ w
        write_unseen(w)
        in_another_thread(torch.clear_autocast_cache) if where != "here" else torch.clear_autocast_cache()
        cleared.set()
        assert future.result(60)
        assert torch.equal(X @ w, X.bfloat16() @ w.detach().bfloat16())


def test_threads_that_begin_and_end_regions_at_once_miss_no_clearing() -> None:
    stop = threading.Event()

    def disturb(own: Any) -> int:
        rounds = 0
        while not stop.is_set():
            with ours():
                X @ own
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(disturb, weight()) for _ in range(3)]
        w, stale = weight(), 0
        for _ in range(300):
            with stock(), ours():
                X @ w
            with torch.no_grad():
                w.data.add_(0.5)
            with stock(), ours():
                stale += not torch.equal(X @ w, X.bfloat16() @ w.detach().bfloat16())
        stop.set()
        assert min(other.result(60) for other in others) > 0
    assert stale == 0


# --- threads of the autograd engine


def recomputation(region: Region, keys: Any) -> list[Any]:
    """What a checkpoint does on a device thread: the keys are the caller's, and the regions are PyTorch's."""
    w = weight()

    def work() -> list[Any]:
        with keys(), stock():
            outputs = [X @ w for _ in range(4)]
            held = entries()
        total = sum((output.float() * (index + 0.37)).square().mean() for index, output in enumerate(outputs))
        (gradient,) = torch.autograd.grad(total, w)
        assert (held, entries()) == ((1, 0) if region is ours else (0, 0))
        return [*outputs, gradient]

    return in_another_thread(work)


def test_regions_of_pytorch_in_a_thread_without_ours_keep_casts() -> None:
    assert_same(recomputation(ours, as_carried_by_the_engine), recomputation(stock, contextlib.nullcontext))


def test_a_thread_without_any_region_keeps_none() -> None:
    def work() -> int:
        with as_carried_by_the_engine():
            X @ weight()
            return entries()

    assert in_another_thread(work) == 0


def test_a_carried_policy_is_found_again_when_it_changes() -> None:
    seen = []

    def keys_of(**arguments: Any) -> Any:
        with ours(**arguments):
            slots = [(name, torch.get_autocast_dtype(name)) for name in ("privateuseone", "ipu", "maia", "hpu", "mtia")]
            return (
                torch._C._dispatch_tls_local_include_set(),
                torch._C._dispatch_tls_local_exclude_set(),
            ), slots

    def look(keys: Any, slots: Any) -> torch.dtype:
        with torch._C._ForceDispatchKeyGuard(*keys):
            for name, dtype in slots:
                torch.set_autocast_dtype(name, dtype)
            return (X @ X.t()).dtype

    carried = [
        keys_of(overrides={"matmul": torch.float16}),
        keys_of(),
        keys_of(overrides={"matmul": "fp32"}),
        keys_of(overrides={"matmul": torch.float16}),
    ]
    in_another_thread(lambda: seen.extend(look(*one) for one in carried for _ in range(2)))
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    assert seen == [f16, f16, bf16, bf16, f32, f32, f16, f16]


# --- where PyTorch's lock is held, and the end of the process


def test_a_region_entered_inside_stocks_cast_does_not_deadlock() -> None:
    result = run_python(
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
        """
    )
    assert result == "0\n"


@pytest.mark.parametrize("where", ["main", "thread", "suspended"])
def test_a_process_may_end_inside_regions(where: str) -> None:
    result = run_python(
        f"""
        import threading, torch, torch_promote as tp
        w, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
        def enter():
            torch.autocast("cpu").__enter__()
            tp.my_autocast("cpu").__enter__()
            x @ w
            ready.set()
            if {where!r} == "thread":
                threading.Event().wait()
        def steps():
            with tp.my_autocast("cpu"):
                yield x @ w
        ready = threading.Event()
        if {where!r} == "thread":
            threading.Thread(target=enter, daemon=True).start()
            ready.wait()
        elif {where!r} == "suspended":
            kept = tp.my_autocast("cpu")(steps)()
            next(kept)
        else:
            enter()
        print("done")
        """
    )
    assert result == "done\n"


def test_after_a_fork_both_processes_notice() -> None:
    result = run_python(
        """
        import os, sys, torch, torch_promote as tp
        torch.set_num_threads(1)
        w, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
        with tp.my_autocast("cpu"):
            x @ w
            child = os.fork()
            w.data.mul_(3)
            torch.clear_autocast_cache()
            fresh = (x @ w)[0, 0].item() == 12
            if child == 0:
                os._exit(fresh)
            print(fresh, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert result == "True 1\n"


def test_a_thread_that_ends_inside_a_region_is_no_holder_any_more() -> None:
    w = weight()
    kept = weakref.ref(w)

    def work(of: Any) -> None:
        ours().__enter__()
        X @ of

    in_another_thread(functools.partial(work, w))
    torch.clear_autocast_cache()
    del w
    gc.collect()
    assert kept() is None


def in_a_disabled_region(region: Region, device_type: str) -> list[Any]:
    w, results = weight(), []
    with tp.stock_autocast(device_type, enabled=False):
        h = X
        for _ in range(3):
            with region():
                h = torch.tanh(h @ w).float()
        h.sum().backward()
        with region(), torch.no_grad():
            results.append(X @ w)
            write_unseen(w)
            torch.clear_autocast_cache()
            results.append(X @ w)
    return [*results, w.grad]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_regions_inside_a_disabled_one_of_stock(device_type: str) -> None:
    assert_same(in_a_disabled_region(ours, device_type), in_a_disabled_region(stock, device_type))


def test_the_end_of_a_region_waits_for_no_cast_that_needs_the_gil() -> None:
    """Stock casts under its lock. A dispatch mode in there needs the GIL."""
    result = run_python(
        """
        import threading, time, torch, torch_promote as tp
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        torch.set_num_threads(1)
        x, w = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))
        end = time.monotonic() + 4

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
        """
    )
    assert result == "done\n"
