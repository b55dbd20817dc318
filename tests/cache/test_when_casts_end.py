"""Kept casts live as long as stock's: until the thread's outermost autocast region ends, or a call clears them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.casts import BIG, CastCount, Region, X, entries, ours, resident_bytes, stock, weight, write_unseen
from helpers.comparison import assert_same

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


def test_the_sentinel_is_not_visible_to_programs() -> None:
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
