"""The cache keeps no source alive, drops dead entries, belongs to one thread, and is reentrant during a cast."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.casts import CASTS, CastCount, half, ours

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.bfloat16).view(8, 16)


def weight() -> Any:
    return nn.Parameter(torch.randn(16, 4))


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
    peak, dropped_before = 0, tp.cache_info()["dropped"]
    with ours():
        for _ in range(60):
            use(weight())
            peak = max(peak, tp.cache_info()["entries"])
        assert peak < 20
        assert tp.cache_info()["bytes"] <= peak * 16 * 4 * 2
        assert tp.cache_info()["dropped"] - dropped_before > 40


def test_weights_dropped_together_make_room_for_later_ones() -> None:
    with ours():
        first = [weight() for _ in range(60)]
        for w in first:
            use(w)
        assert tp.cache_info()["entries"] == 60
        del first, w
        later = [weight() for _ in range(60)]
        for w in later:
            use(w)
            assert tp.cache_info()["entries"] < 120  # stock's number
        with CastCount() as count:
            for w in later:
                use(w)
        assert count.casts == 60  # those of `half`: every later cast is still there


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


def test_threads_share_a_weight_and_no_casts() -> None:
    w, barrier = weight(), threading.Barrier(4, timeout=60)

    def work(dtype: torch.dtype) -> dict[str, int]:
        with ours(dtype):
            for _ in range(20):
                barrier.wait()
                assert torch.equal(X.to(dtype) @ w, X.to(dtype) @ half(w, dtype))
            barrier.wait()
            return tp.cache_info()

    dtypes = [torch.bfloat16, torch.float16] * 2
    with ours(), ThreadPoolExecutor(4) as pool:
        X @ w
        infos = list(pool.map(work, dtypes))
        with CastCount(of=w) as count:
            X @ w
    assert count.casts == 0
    assert [(info["entries"], info["misses"], info["hits"]) for info in infos] == [(1, 1, 19)] * 4


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


# --- coming back while a cast is being made


class During(TorchDispatchMode):
    """Calls a function in the middle of every cast, except for casts that the function makes."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__()
        self.action, self.times, self.busy = action, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CASTS and not self.busy:
            self.busy, self.times = True, self.times + 1
            try:
                self.action()
            finally:
                self.busy = False
        return result


def in_a_nested_region(w: Any) -> None:
    with ours():
        use(w)


def in_a_nested_region_of_another_dtype(w: Any) -> None:
    with ours(torch.float16):
        assert torch.equal(X.half() @ w, X.half() @ half(w, torch.float16))


def on_another_weight(w: Any) -> None:
    with ours():
        use(weight())


def clear(w: Any) -> None:
    tp.clear_cache()


def write(w: Any) -> None:
    with torch.no_grad():
        w.mul_(3)
    torch.autograd.graph.increment_version(w)  # inside a dispatch mode the version is left to whoever writes


ACTIONS = [
    in_a_nested_region,
    in_a_nested_region_of_another_dtype,
    on_another_weight,
    clear,
]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_the_cache_may_be_used_while_a_cast_is_made(action: Callable[[Any], None]) -> None:
    w = weight()
    with ours():
        with During(lambda: action(w)) as mode:
            y = X @ w
        assert mode.times == 1
        assert torch.equal(y, X @ half(w))
        use(w)
        (y.sum() + (X @ w).sum()).backward()
    assert torch.equal(w.grad, (X.t() @ torch.full((8, 4), 2.0, dtype=torch.bfloat16)).float())


@pytest.mark.parametrize("action", [write])
def test_a_weight_that_changes_while_it_is_cast_is_cast_again(action: Callable[[Any], None]) -> None:
    w = weight()
    with ours():
        with During(lambda: action(w)) as mode:
            X @ w
        assert mode.times == 1
        use(w)
