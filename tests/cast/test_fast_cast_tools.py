"""Casts under PyTorch's tools, and what a program may do with a cast that it gets hold of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensorMode
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.casts import Region, ours, stock
from helpers.comparison import assert_same
from helpers.fast_cast import BF16, FP16, FP32, cast, network, run

# --- tools


def test_the_profiler_shows_casts_with_their_shapes_and_their_nodes() -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run(ours)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    shapes = [list(event.shapes()) for event in events if event.name() == "torch_promote::cast"]
    assert [[3, 6]] in shapes
    assert [[6, 6]] in shapes
    assert any("CastBackward" in event.name() for event in events)


def test_compiled_autograd_takes_casts_in() -> None:
    compiler = functools.partial(torch.compile, backend="eager", fullgraph=True)
    expected = run(stock)
    torch._dynamo.reset()
    with compiled_autograd._enable(compiler()):
        found = run(ours)
    assert_same(found, expected)


class Ops(TorchDispatchMode):
    """Records the ops, with the dtypes of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dtypes = [leaf.dtype for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        self.ops.append((str(func), dtypes))
        return result


def test_a_dispatch_mode_sees_each_cast_forward_and_backward() -> None:
    def seen(region: Region) -> Any:
        with Ops() as mode:
            results = run(region)
        return mode.ops, results

    (expected, by_stock), (found, by_ours) = seen(stock), seen(ours)
    casts = [("aten._to_copy.default", [FP32, BF16]), ("aten._to_copy.default", [BF16, FP32])]
    assert all(found.count(one) >= 2 for one in casts)
    # Stock casts the view of the weight that it has cast itself; we find none of the view, and cast it too.
    assert found == expected
    assert_same(by_ours, by_stock)


def test_fake_tensors() -> None:
    def dtypes(region: Region) -> Any:
        with FakeTensorMode():
            y, x_grad, w_grad = run(region)
        return [(type(t), t.dtype, t.stride(), t.device) for t in (y, x_grad, w_grad)]

    assert dtypes(ours) == dtypes(stock)
    with FakeTensorMode() as mode:
        assert cast(torch.ones(2, 2), BF16).fake_mode is mode  # type: ignore[attr-defined]
        meta = torch.ones(2, 2, device="meta")
        assert meta.device.type == "meta"


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(tracing_mode: str) -> None:
    def graph(region: Region) -> list[str]:
        torch.manual_seed(0)

        def traced(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            with region():
                return network(x, w)

        module = make_fx(traced, tracing_mode=tracing_mode)(torch.randn(3, 6), torch.randn(6, 6))
        return [str(node.target) for node in module.graph.nodes]

    assert graph(stock).count("aten._to_copy.default") >= 3
    assert graph(ours) == graph(stock)


# --- functorch

TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor, torch.Tensor], Any]] = {
    "vmap": lambda f, x, w: vmap(f, (0, None))(x.expand(4, 3, 6) + torch.arange(4.0).view(4, 1, 1), w),
    "grad": lambda f, x, w: grad(lambda a, b: f(a, b).float().sum(), (0, 1))(x, w),
    "jvp": lambda f, x, w: jvp(f, (x, w), (torch.ones_like(x), torch.ones_like(w))),
    "vjp": lambda f, x, w: vjp(lambda a, b: f(a, b).float().sum(), x, w)[1](torch.tensor(1.0)),
    "jacrev": lambda f, x, w: jacrev(lambda a: f(a, w).float().sum(0))(x),
    "jacfwd": lambda f, x, w: jacfwd(lambda a: f(a, w).float().sum(0))(x),
    "grad of grad": lambda f, x, w: grad(lambda a: grad(lambda b: f(b, w).float().sum())(a).square().sum())(x),
    "vmap of grad": lambda f, x, w: vmap(grad(lambda a: f(a[None], w).float().sum()))(x),
}


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, cache: str) -> None:
    def transformed(region: Region) -> Any:
        torch.manual_seed(0)
        x, w = torch.randn(3, 6), nn.Parameter(torch.randn(6, 6))
        results = []
        with region():
            for parameter in (w, w.detach()):
                results.append(TRANSFORMS[name](network, x, parameter))
                results.append(network(x, parameter))  # casts made inside the transform are not valid here
        return [leaf.detach() for leaf in tree_leaves(results)]

    assert_same(transformed(functools.partial(ours, cache=cache)), transformed(stock))


# --- tensors that are not plain


NOT_PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "negative bit": lambda: torch._neg_view(torch.randn(2, 3)),
    "zero tensor": lambda: torch._efficientzerotensor((2, 3)),
}


@pytest.mark.parametrize("make", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_other_kinds_of_tensors(make: Callable[[], torch.Tensor]) -> None:
    x = make()
    for cache in ("weights", "all"):
        with ours(overrides={"aten::dropout": FP16}, cache=cache):
            found = [torch.dropout(x, 0.5, False) for _ in range(2)]
        for one in found:
            expected = x.half()
            assert (one.dtype, one.is_neg(), one._is_zerotensor()) == (
                FP16,
                expected.is_neg(),
                expected._is_zerotensor(),
            )
            assert torch.equal(one.float(), expected.float())
