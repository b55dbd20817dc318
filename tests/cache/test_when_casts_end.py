"""Kept casts live as long as stock's: until the thread's outermost autocast region ends, or a call clears them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import BIG, CastCount, Region, X, entries, ours, resident_bytes, stock, weight, write_unseen
from helpers.comparison import assert_same

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
