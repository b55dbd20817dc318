"""A backward in another thread reuses the forward's casts, and clearing the cache frees the casts of all threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import BIG, Region, X, half, kept_in, ours, resident_bytes, stock, weight
from helpers.probes import in_thread


def in_backward(function: Callable[[], Any]) -> Any:
    """Calls the function in a backward of this thread."""
    results: list[Any] = []
    leaf = torch.ones(1, requires_grad=True)
    twice = leaf * 2
    twice.register_hook(lambda grad: results.append(function()))
    twice.sum().backward()
    return results[0]


def in_backward_elsewhere(function: Callable[[], Any]) -> Any:
    """Calls the function like the engine's thread of a device: in a backward, in a thread without forwards."""
    return in_thread(functools.partial(in_backward, function))


def node_of_cast(product: torch.Tensor) -> Any:
    assert product.grad_fn is not None
    return product.grad_fn.next_functions[1][0]


# --- borrowing


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("around", [stock, ours], ids=["stock's region", "ours"])
def test_a_backward_in_another_thread_uses_the_forwards_cast(around: Region, grad: bool) -> None:
    w = weight()

    def use() -> Any:
        with ours(), torch.set_grad_enabled(grad):
            kept = kept_in(lambda: X @ w)
            return kept, X @ w

    with around(), ours():
        first = X @ w
        kept, product = in_backward_elsewhere(use)
    assert kept == 0
    assert torch.equal(product, first)
    assert not grad or node_of_cast(product) is node_of_cast(first)


def test_a_thread_without_a_region_borrows_and_keeps_nothing() -> None:
    """A thread of the engine has the caller's dispatch keys, but no open region."""
    w = weight()

    def use() -> Any:
        with torch._C._ForceDispatchKeyGuard(*keys):
            hits = tp.cache_info()["hits"]
            product = X @ w
            return product, tp.cache_info()["hits"] - hits, tp.cache_info()["entries"]

    with ours():
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        first = X @ w
        product, hits, entries = in_backward_elsewhere(use)
        assert (hits, entries) == (1, 0)
        assert torch.equal(product, first)
    product, hits, entries = in_backward_elsewhere(use)
    assert (hits, entries) == (0, 0)
    assert torch.equal(product, first)


def test_a_cast_is_borrowed_while_its_owner_uses_it() -> None:
    """Each use without an older one gives the owner's entry a new tensor, and the borrower copies the entry."""
    w = weight()

    def borrow() -> int:
        with torch._C._ForceDispatchKeyGuard(*keys):
            return sum(torch.equal(X @ w, right) for _ in range(300))

    with ThreadPoolExecutor(1) as pool, ours():
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        right, hits = X @ w, tp.cache_info()["hits"]
        node, uses = node_of_cast(right), 0
        borrowing = pool.submit(in_backward, borrow)
        while not borrowing.done() or uses < 300:
            assert node_of_cast(X @ w) is node
            uses += 1
        assert borrowing.result() == 300
        assert tp.cache_info()["hits"] - hits == uses


def clear_ours(w: torch.Tensor) -> None:
    w.data.mul_(3)
    tp.clear_cache()


def clear_stocks(w: torch.Tensor) -> None:
    w.data.mul_(3)
    torch.clear_autocast_cache()


def write(w: torch.Tensor) -> None:
    with torch.no_grad():
        w.mul_(3)


def write_fused(w: torch.Tensor) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=1.0, fused=True).step()
    w.grad = None


CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "clear_cache": clear_ours,
    "clear_autocast_cache": clear_stocks,
    "write": write,
    "fused step": write_fused,
}


@pytest.mark.parametrize("where", ["in the backward", "before it"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_cast_from_before_a_change_is_not_borrowed(change: str, where: str) -> None:
    w = weight()

    def use() -> Any:
        if where == "in the backward":
            CHANGES[change](w)
        with ours():
            return X @ w

    with ours():
        X @ w
        if where == "before it":
            CHANGES[change](w)
        assert torch.equal(in_backward_elsewhere(use), half(X) @ half(w))


def test_threads_that_run_forwards_keep_their_own_casts() -> None:
    w, ready, done = weight(), threading.Event(), threading.Event()

    def hold() -> None:
        with ours():
            X @ w
            ready.set()
            assert done.wait(60)

    def use() -> int:
        with ours():
            return kept_in(lambda: X @ w)

    def forward_and_backward() -> list[int]:
        return [use(), in_backward(use)]

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold)
        assert ready.wait(60)
        assert in_thread(use) == 1
        assert in_thread(forward_and_backward) == [1, 1]
        done.set()
        holder.result(60)


# --- freeing


@pytest.mark.parametrize("how", ["clear_autocast_cache", "the end of stock's region"])
@pytest.mark.parametrize("cache", ["weights", "all"])
@pytest.mark.parametrize("state", ["grad", "no_grad", "suspended"])
def test_a_clearing_frees_the_memory_of_every_threads_casts_at_once(cache: str, state: str, how: str) -> None:
    w, ready, cleared = nn.Parameter(torch.zeros(BIG, BIG)), threading.Event(), threading.Event()

    @ours(cache=cache)
    def steps() -> Iterator[None]:
        torch.ones(1, BIG) @ w
        yield

    def hold() -> None:
        with ours(cache=cache), torch.set_grad_enabled(state != "no_grad"):
            if state != "suspended":
                torch.ones(1, BIG) @ w
            ready.set()
            assert cleared.wait(60)

    suspended = steps()
    if state == "suspended":
        next(suspended)
    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold)
        assert ready.wait(60)
        before = resident_bytes()
        if how == "clear_autocast_cache":
            torch.clear_autocast_cache()
        else:
            with stock():
                X @ weight()
        assert before - resident_bytes() > BIG * BIG
        cleared.set()
        holder.result(60)
    suspended.close()
