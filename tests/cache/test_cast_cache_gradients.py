"""Casts from the cache under autograd: gradients with stock's bits, derivatives of derivatives, hooks, transforms."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import torch_promote as tp
from helpers.casts import Program, Region, ours, stock
from helpers.comparison import assert_same

X = torch.linspace(-1, 1, 8 * 16).view(8, 16)


def weight() -> Any:
    return nn.Parameter(torch.randn(16, 16))


def product(w: torch.Tensor) -> torch.Tensor:
    return (X @ w).float().pow(2).sum()


# --- programs whose gradients have stock's bits

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


@program
def two_graphs_over_one_cast(region: Region) -> Any:
    w = weight()
    with region():
        first, second = product(w), product(w).sqrt()
        first.backward()
        second.backward()
    return w.grad


@program
def first_use_under_no_grad(region: Region) -> Any:
    w = weight()
    with region():
        with torch.no_grad():
            kept = X @ w
        ((X @ w) @ w).sum().backward()
    return w.grad, kept


@program
def lstm_twice(region: Region) -> Any:
    net, gradients = nn.LSTM(16, 8, num_layers=2), []
    with region():
        for _ in range(2):
            net(X.unsqueeze(1))[0].float().pow(2).sum().backward()
            gradients += [p.grad.clone() for p in net.parameters()]
    return gradients


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
def anomaly_mode(region: Region) -> Any:
    w = weight()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(), region():
            for _ in range(2):
                product(w).backward()
    return w.grad


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


@program
def function_transforms(region: Region) -> Any:
    w, func = weight(), torch.func

    def twice(x: torch.Tensor) -> torch.Tensor:
        return (x @ w) @ w

    def loss(x: torch.Tensor) -> torch.Tensor:
        return twice(x).float().pow(2).sum()

    with region():
        results = [twice(X)]
        for _ in range(2):
            results += [func.grad(loss)(X), func.vmap(twice)(X), func.jvp(twice, (X,), (X,))[1]]
            results += [func.jacrev(twice)(X), func.jacfwd(twice)(X), func.hessian(loss)(X)]
            results += [func.grad(lambda w: product(w) + product(w).sqrt())(w)]
        loss(X).backward()
    return results, w.grad


@program
def compiled_autograd(region: Region) -> Any:
    w, x = weight(), X.clone().requires_grad_()
    with region():
        X @ w
        loss = ((x @ w) @ w).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    return w.grad, x.grad


@pytest.mark.parametrize("run", PROGRAMS.values(), ids=PROGRAMS)
def test_gives_what_stock_gives(run: Program) -> None:
    results = []
    for region in (stock, ours):
        torch.manual_seed(0)
        results.append(run(region))
    assert_same(results[1], results[0])


# --- where stock has no answer to compare with


@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
def test_a_cast_made_below_autograd_does_not_cut_the_graph(keep: bool) -> None:
    """A dispatch mode runs below autograd, so the casts that it makes have no node."""
    w, kept = weight(), []

    class Prying(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.relu.default:
                with ours():
                    kept.append(X @ w)
            return func(*args, **(kwargs or {}))

    with ours():
        with Prying():
            torch.relu(X)
        assert kept[0].dtype is torch.bfloat16
        if not keep:
            kept.clear()
        product(w).backward()
    with ours():
        (expected,) = torch.autograd.grad(product(w), w)
    assert_same(w.grad, expected)


def test_a_cast_made_below_autograd_serves_a_graph_later() -> None:
    """The kernel of a custom op casts below autograd; stock returns that cast, without a graph, to later uses."""

    @torch.library.custom_op("torch_promote_test::product", mutates_args=())
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).clone()

    def gradient(region: Any) -> torch.Tensor | None:
        x, w = torch.ones(4, 4), nn.Parameter(torch.ones(4, 4))
        with region, torch.no_grad():
            product(x, w)
            with torch.enable_grad():
                y = x @ w
        return torch.autograd.grad(y.sum(), w)[0] if y.requires_grad else None

    assert gradient(tp.stock_autocast("cpu")) is None
    ours_gradient = gradient(tp.my_autocast("cpu"))
    assert ours_gradient is not None
    assert torch.equal(ours_gradient, torch.full((4, 4), 4.0))
