"""cache="persistent": casts of weights outlive regions, as long as the weight lives and is unchanged."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_promote as tp
from helpers.casts import CastCount, stock
from helpers.casts import ours as region
from helpers.persistent_casts import BF16, FP16, GRAD, X, casts_in, held, ours, product, right, weight

pytestmark = pytest.mark.usefixtures("nothing_persists")


# --- what is kept


@GRAD
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_is_cast_once_for_many_regions(grad: bool, frozen: bool) -> None:
    w = weight().requires_grad_(not frozen)
    for turn in range(4):
        assert casts_in(lambda: product(w, grad)) == (turn == 0)
        assert torch.equal(product(w, not grad), right(w))
        assert held() == (1, 16 * 4 * 2)


def test_persistent_casts_take_no_more_bytes_than_the_weight() -> None:
    w = weight()
    for dtype in (BF16, FP16, BF16, FP16):
        assert torch.equal(product(w, dtype=dtype), right(w, dtype))
    assert held() == (2, w.nbytes)
    assert casts_in(lambda: (product(w), product(w, dtype=FP16), product(w))) == 1  # that of X
    product(w[:, :2])
    assert held() == (2, w.nbytes)  # views are cast at each use, as under stock
    low = nn.Parameter(torch.randn(16, 4, dtype=BF16))
    with region(overrides={"mm": "fp32"}, cache="persistent"):
        torch.mm(X, low)
    assert held()[1] <= w.nbytes  # a cast in float32 weighs twice the weight


# --- the end of a weight


def test_casts_die_with_their_weight() -> None:
    w, v = weight(), weight()
    product(w), product(v, grad=True)
    assert held()[0] == 2
    tensor, storage = weakref.ref(w), StorageWeakRef(w.untyped_storage())
    del w
    assert tensor() is None
    assert storage.expired()
    assert held() == (1, v.nbytes // 2)


def test_clear_cache_drops_them_in_and_outside_of_regions_and_of_every_thread() -> None:
    w = weight()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(product, w).result()
    assert held()[0] == 1
    tp.clear_cache()
    assert held() == (0, 0)
    with ours(), torch.no_grad():
        torch.mm(X, w)
        tp.clear_cache()
        assert held() == (0, 0)
        assert casts_in(lambda: torch.mm(X, w)) == 1
        torch.mm(X, w)
    assert held()[0] == 1


def test_the_end_of_the_last_region_and_stocks_clearing_leave_them() -> None:
    w = weight()
    product(w)
    torch.clear_autocast_cache()
    with stock():
        torch.mm(X, w)
    assert casts_in(lambda: product(w)) == 0


# --- copies


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "to": lambda module: copy.deepcopy(module).to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_no_casts_and_gets_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    module: Any = nn.Linear(4, 16, bias=False)
    product(module.weight)
    twin: Any = copied(module)
    with torch.no_grad():
        twin.weight.mul_(-3)
    for one in (module, twin, module):
        assert torch.equal(product(one.weight), right(one.weight))
    assert held()[0] == 2


# --- threads


def test_threads_share_persistent_casts() -> None:
    w, barrier = weight(), threading.Barrier(4, timeout=60)
    expected = {dtype: right(w, dtype) for dtype in (BF16, FP16)}
    wrong: list[int] = []

    def work(number: int) -> int:
        dtype = (BF16, FP16)[number % 2]
        barrier.wait()
        for turn in range(100):
            if not torch.equal(product(w, grad=turn % 3 == 0, dtype=dtype).detach(), expected[dtype]):
                wrong.append(number)
            if number == 0 and turn % 10 == 0:
                tp.clear_cache()
        barrier.wait()  # nobody clears any more
        product(w, dtype=dtype)
        barrier.wait()
        x = X.to(dtype)
        with CastCount(of=w) as count, ours(dtype), torch.no_grad():
            torch.mm(x, w)
        return count.casts

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0] * 4
    assert wrong == []
    assert held()[1] <= w.nbytes


def test_the_casts_of_a_frozen_weight_that_dies_inside_a_region_die_with_it() -> None:
    w = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    with tp.my_autocast("cpu", cache="persistent"):
        torch.ones(4, w.shape[0]) @ w
        assert tp.cache_info()["persistent_bytes"] > 0
        del w
        assert tp.cache_info()["persistent_bytes"] == 0
