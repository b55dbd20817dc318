"""Casts from the cache under autograd, transforms, tracers and modes, and of weights that are not plain."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

import torch_promote as tp
from helpers.casts import CASTS, Program, Region, X, half, ours, stock, weight
from helpers.comparison import assert_same


def product(w: torch.Tensor) -> torch.Tensor:
    return (X @ w).float().pow(2).sum()


# --- programs whose gradients have stock's bits

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


@program
def weight_tied_to_an_embedding(region: Region) -> Any:
    """The embedding uses the weight itself, the head its cast, and the penalty the weight again."""
    embedding = nn.Embedding(16, 16)
    gradients = []
    with region():
        for _ in range(3):
            hidden = embedding(torch.arange(8))
            loss = (hidden @ embedding.weight.t()).float().logsumexp(1).sum()
            loss = loss + nn.functional.linear(hidden, embedding.weight).float().pow(2).sum()
            (loss + embedding.weight.pow(2).sum()).backward()
            gradients.append(embedding.weight.grad.clone())
    return gradients


@program
def requires_grad_off_and_on(region: Region) -> Any:
    w = weight()
    with region():
        kept = X @ w
        w.requires_grad_(False)
        frozen = X @ w
        w.requires_grad_(True)
        product(w).backward()
    return w.grad, kept, frozen


@program
def double_backward(region: Region) -> Any:
    """A double backward through a cast that is used in a second graph after the first has been freed."""
    w = weight()
    with region():
        product(w)
        loss = ((X @ w) @ w).float().pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
    gradient.pow(2).sum().backward()
    return gradient, w.grad


@program
def forward_mode(region: Region) -> Any:
    """A tangent on the weight, and a tangent on the input with the weight's cast from the cache."""
    w, direction = weight(), torch.linspace(0, 1, 256).view(16, 16)
    with region():
        X @ w
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(w, direction)
            along_weight = [forward_ad.unpack_dual(X @ dual).tangent for _ in range(2)]
            along_input = [forward_ad.unpack_dual(forward_ad.make_dual(X, X) @ w).tangent for _ in range(2)]
        after = X @ w
    assert along_weight[0] is not None
    assert along_input[0] is not None
    return along_weight, along_input, after


@pytest.mark.parametrize("run", PROGRAMS.values(), ids=PROGRAMS)
def test_gives_what_stock_gives(run: Program) -> None:
    results = []
    for region in (stock, ours):
        torch.manual_seed(0)
        results.append(run(region))
    assert_same(results[1], results[0])


# --- weights that are not plain (subclasses, fake tensors), and tools that trace their uses


class Wrapped(torch.Tensor):
    """Wraps a tensor, and counts the casts of wrapped tensors."""

    inner: torch.Tensor
    casts = 0

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.casts += func in CASTS
        plain = tree_map_only(Wrapped, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, func(*plain[0], **plain[1]))


class Named(torch.Tensor):
    """A subclass that dispatches nothing."""


def wrapped() -> nn.Parameter:
    return nn.Parameter(Wrapped(torch.randn(16, 4)))


def named() -> nn.Parameter:
    return nn.Parameter(torch.randn(16, 4).as_subclass(Named))


def parametrize(makers: list[Callable[[], Any]]) -> Any:
    return pytest.mark.parametrize("make", makers, ids=lambda make: make.__name__)


# --- subclasses


def run_subclass(make: Callable[[], Any], region: Region) -> Any:
    torch.manual_seed(0)
    w, results = make(), []
    Wrapped.casts = 0
    with region():
        for _ in range(2):
            loss = (X @ w).float().pow(2).sum() + (X @ w).float().sum()
            loss.backward()
            results.append(loss)
    plain = tree_map_only(Wrapped, lambda tensor: tensor.inner, [*results, w.grad])
    return [tensor.as_subclass(torch.Tensor) for tensor in plain], Wrapped.casts


@parametrize([wrapped, named])
def test_a_subclass_gives_what_stock_gives(make: Callable[[], Any]) -> None:
    expected, casts = run_subclass(make, stock)
    results, casts_of_ours = run_subclass(make, ours)
    assert_same(results, expected)
    assert casts_of_ours == casts


def test_a_wrapped_weight_is_cast_once_and_again_after_a_change() -> None:
    w = wrapped()
    Wrapped.casts = 0
    with ours():
        for _ in range(3):
            first: Any = X @ w
        assert Wrapped.casts == 1
        with torch.no_grad():
            w.mul_(3)
        changed: Any = X @ w
        assert Wrapped.casts == 2
        assert tp.cache_info()["entries"] == 1
    assert torch.equal(changed.inner, half(X) @ half(w.detach().inner))  # type: ignore[attr-defined]
    assert not torch.equal(changed.inner, first.inner)


# --- fake tensors


def test_a_fake_cast_of_a_real_weight_is_not_kept() -> None:
    w = nn.Parameter(torch.randn(16, 4))
    with ours():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(torch.mm(torch.empty(8, 16), w), FakeTensor)
        y = X @ w
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(torch.mm(torch.empty(8, 16), w), FakeTensor)
        again = X @ w
    assert type(y) is type(again) is torch.Tensor
    assert torch.equal(y, half(X) @ half(w))
    assert torch.equal(again, y)


class Twice(nn.Module):
    """Uses one weight twice in its own region."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 4))
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region():
            return (x @ self.w) + (x @ self.w).float().sin()


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_a_traced_module_follows_its_weight(cache: str, trainable: bool) -> None:
    """The tracer has to find the weight at every use; it would record a tensor from the cache as a constant."""
    region = functools.partial(ours, cache=cache)
    model = Twice(region).requires_grad_(trainable)
    with region(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(X)
        traced = torch.jit.trace(model, X)
    with torch.no_grad():
        model.w.copy_(torch.randn(16, 4))
    assert_same(traced(X), model(X))
