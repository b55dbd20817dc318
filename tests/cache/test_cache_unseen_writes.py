"""Writes that leave the version unchanged, for weights that stock casts at each use; and which uses share a cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import Region, half, ours, stock

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def frozen() -> nn.Parameter:
    return nn.Parameter(torch.randn(16, 4), requires_grad=False)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "data in place": lambda w: w.data.mul_(2),
    "data assigned": lambda w: setattr(w, "data", w.data * 2),
    "added to data": lambda w: setattr(w, "data", w.data.add_(1)),
    "data of another geometry": lambda w: setattr(w, "data", w.data.t().contiguous().t()),
    "NumPy": lambda w: w.numpy().__setitem__(0, 5.0),
    "detached": lambda w: w.detach().zero_(),
}


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_frozen_weight_is_written_in_a_region(write: Callable[[nn.Parameter], object], cache: str) -> None:
    w = frozen()
    with ours(cache=cache):
        X @ w
        write(w)
        after = X @ w
    assert torch.equal(after, half(X) @ half(w))


@pytest.mark.parametrize("cache", ["weights", "persistent"])
def test_a_view_of_a_weight_is_not_served_when_the_weights_data_is_written(cache: str) -> None:
    w = nn.Parameter(torch.randn(4, 16))
    with ours(cache=cache):
        X @ w.t()
        w.data.mul_(2)
        assert torch.equal(X @ w.t(), half(X) @ half(w.t()))


def test_a_flat_buffer_behind_a_frozen_weight() -> None:
    flat, w = torch.randn(64), frozen()
    w.data = flat.view(16, 4)
    with ours(cache="persistent"):
        X @ w
        flat.mul_(2)
        assert torch.equal(X @ w, half(X) @ half(w))


def test_no_cast_is_kept_while_a_storage_is_held() -> None:
    w = frozen()
    with ours(cache="persistent"):
        storage = w.untyped_storage()
        X @ w
        storage.fill_(0)
        assert (X @ w).count_nonzero() == 0


def test_a_storage_that_was_asked_for_and_let_go() -> None:
    w = frozen()
    w.untyped_storage().nbytes()
    with ours(cache="persistent"):
        X @ w
    assert tp.cache_info()["persistent_entries"] == 1
    tp.clear_cache()


def trained_gradients(region: Region, **cache: str) -> tuple[torch.Tensor, ...]:
    x, w = X.clone().requires_grad_(), nn.Parameter(torch.linspace(-1, 1, 64).view(16, 4))
    with region(**cache):
        # A leaf with and without a view of it: whether other tensors share its data changes from use to use.
        loss = (torch.mm(x, x.t()) @ x).float().pow(2).mean()
        with torch.inference_mode():
            x @ w
        w.requires_grad_(False)
        x @ w
        w.requires_grad_(True)
        loss = loss + (x @ w).float().pow(2).mean() + (x @ w).float().sum()
    loss.backward()
    assert x.grad is not None
    assert w.grad is not None
    return loss.detach(), x.grad, w.grad


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_uncached_uses_do_not_split_cached_ones(cache: str) -> None:
    for mine, theirs in zip(trained_gradients(ours, cache=cache), trained_gradients(stock), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_einsum_returns_no_view_of_what_others_use(cache: str) -> None:
    w, x = nn.Parameter(torch.randn(8, 8), requires_grad=False), torch.randn(4, 8, requires_grad=True)
    with ours(cache=cache, overrides={"einsum": torch.bfloat16}):
        y = x @ w
        torch.einsum("ij->ji", w).mul_(2)
        assert torch.equal(x @ w, y)
    y.sum().backward()
    assert torch.equal(x.grad, (torch.ones(4, 8, dtype=torch.bfloat16) @ half(w).t()).float())
