"""The end of casts with several threads: a region does not end another thread's casts, clearing ends all threads'."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers.casts import CastCount, Region, X, entries, ours, stock, weight, write_unseen
from helpers.comparison import assert_same
from helpers.probes import in_thread
from helpers.subprocesses import output_of


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
        in_thread(torch.clear_autocast_cache) if where != "here" else torch.clear_autocast_cache()
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
    assert output_of(program) == "1\n0\ntorch.bfloat16\n"


# --- threads of the autograd engine


@contextlib.contextmanager
def as_carried_by_the_engine() -> Iterator[None]:
    """The dispatch keys of a region, and no region: so the autograd engine's device threads find themselves."""
    with ours():
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*keys):
        yield


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

    return in_thread(work)


def test_regions_of_pytorch_in_a_thread_without_ours_keep_casts() -> None:
    assert_same(recomputation(ours, as_carried_by_the_engine), recomputation(stock, contextlib.nullcontext))


def test_a_thread_without_any_region_keeps_none() -> None:
    def work() -> int:
        with as_carried_by_the_engine():
            X @ weight()
            return entries()

    assert in_thread(work) == 0
