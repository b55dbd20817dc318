"""Which casts the cache keeps and for how long, compared with stock's counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import CastCount, Region, half, ours, stock
from torch_promote import _C

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.bfloat16).view(8, 16)


def weight(rows: int = 16, columns: int = 4) -> Any:
    return nn.Parameter(torch.randn(rows, columns))


# --- which casts are kept


def view_of_a_larger_leaf() -> torch.Tensor:
    return torch.randn(32, 4)[:16].requires_grad_()


def frozen() -> torch.Tensor:
    return weight().requires_grad_(False)


persistent: Region = functools.partial(ours, cache="persistent")

#: A function that makes weights, and the number of casts for three uses in one region: under stock and our default
#: mode, which keep the same casts, and in a mode that also reuses casts that stock repeats.
WEIGHTS: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
    "parameter": (weight, 1, 1),
    "leaf that requires grad": (lambda: torch.randn(16, 4, requires_grad=True), 1, 1),
    "detached leaf": (lambda: weight().detach().requires_grad_(), 1, 1),
    "leaf with its own strides": (lambda: torch.empty_strided((16, 4), (1, 16)).fill_(1.0).requires_grad_(), 1, 1),
    "buffer": (lambda: torch.randn(16, 4), 3, 3),
    "frozen parameter": (frozen, 3, 1),
    "not a leaf": (lambda: weight() * 2, 3, 3),
    "transposed parameter": (lambda: weight(4, 16).t(), 3, 3),
    "columns of a frozen parameter": (lambda: weight(16, 8).requires_grad_(False)[:, 2:6], 3, 3),
    "view of what is no weight": (lambda: torch.randn(4, 16).t(), 3, 3),
    "leaf that is a view": (view_of_a_larger_leaf, 3, 3),
    "float16": (lambda: torch.randn(16, 4, dtype=torch.float16, requires_grad=True), 3, 1),
    "bfloat16": (lambda: torch.randn(16, 4, dtype=torch.bfloat16, requires_grad=True), 0, 0),
}


@pytest.mark.parametrize("region", [stock, ours, persistent], ids=["stock", "ours", "persistent"])
@pytest.mark.parametrize(("make", "by_stock", "beyond_stock"), WEIGHTS.values(), ids=WEIGHTS)
def test_keeps_casts_of_weights(make: Callable[[], Any], by_stock: int, beyond_stock: int, region: Region) -> None:
    w = make()
    right = half(X) @ half(w)
    with CastCount(of=w) as count, region():
        for grad in (False, True, True):  # a cast that was made without a gradient serves uses with one
            with torch.set_grad_enabled(grad):
                assert torch.equal(X @ w, right)
    assert count.casts == (beyond_stock if region is persistent else by_stock)


#: Uses of a tensor whose casts stock does not keep.
NOT_KEPT_BY_STOCK: dict[str, Callable[[], Any]] = {
    "frozen parameter": lambda: X @ frozen(),
    "transposed parameter": lambda: X @ weight(4, 16).t(),
    "rows of a parameter": lambda: X @ weight(32, 4)[:16],
    "float16 parameter": lambda: X @ nn.Parameter(torch.randn(16, 4, dtype=torch.float16)),
    "inference mode": lambda: torch.inference_mode()(torch.mm)(X, weight()),
    "activation": lambda: X @ (weight() * 2),
}


@pytest.mark.parametrize("use", NOT_KEPT_BY_STOCK.values(), ids=NOT_KEPT_BY_STOCK)
def test_the_default_mode_holds_nothing_that_stock_does_not(use: Callable[[], Any]) -> None:
    nothing = {"entries": 0, "bytes": 0, "persistent_entries": 0, "persistent_bytes": 0}
    before = tp.cache_info()
    with ours():
        alive = [use() for _ in range(2)]
        assert tp.cache_info() == before | nothing
    del alive


@pytest.mark.parametrize("make", [weight, frozen], ids=["trainable", "frozen"])
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_only_the_modes_beyond_stock_attach_something_to_a_weight(make: Callable[[], Any], grad: Any) -> None:
    w = make()
    for region in (ours, functools.partial(ours, cache="weights"), functools.partial(ours, cache="none")):
        with region(), grad():
            X @ w, X @ w
        assert not _C.has_backend_meta(w)
    with persistent(), grad():
        X @ w
    assert _C.has_backend_meta(w)
    tp.clear_cache()


# --- how long


def test_goes_when_the_outermost_region_ends_and_not_before() -> None:
    w = weight()
    with CastCount(of=w) as count:
        with ours():
            with ours():
                X @ w
            with ours(enabled=False):
                pass
            with stock():
                X @ w
            assert tp.cache_info()["entries"] == 1
            X @ w
            assert count.casts == 1
        assert tp.cache_info()["entries"] == 0
        with ours():
            X @ w
    assert count.casts == 2


def test_info_counts_what_happened() -> None:
    w = weight()
    before = tp.cache_info()
    with ours():
        X @ w, X @ w
        with torch.no_grad():
            w.add_(1)
        X @ w
        grown = {name: count - before[name] for name, count in tp.cache_info().items()}
    expected = {"entries": 1, "bytes": 2 * w.numel(), "hits": 1, "misses": 2, "stale": 1, "dropped": 0}
    assert grown == {**expected, "persistent_entries": 0, "persistent_bytes": 0}
