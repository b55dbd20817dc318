"""A compiled step under ours is the same code as under stock: graphs, kernels, graph breaks, guards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import torch_promote as tp
from benchmarks.cases import Settings
from benchmarks.measures import count_compiled, on_its_own
from benchmarks.models import subject
from benchmarks.suites import PLACES
from helpers.casts import Region, ours, stock
from helpers.compiling import BF16, HALF, Weights, called_in, inputs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TINY = Settings(tiny=True)
#: Where the region is an object from outside: ours checks its type and its contents, stock which object it is.
OBJECTS = ("one region object", "decorated")


class Graphs:
    """A backend that runs the aten graphs unchanged, and stores their code."""

    def __init__(self) -> None:
        self.code: list[str] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.code.append(graph.code)
        return make_boxed_func(graph.forward)


def steps(net: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> None:
    """Two training steps and two forwards, so that all versions are compiled."""
    for _ in range(2):
        run(x).float().sum().backward()
    with torch.no_grad():
        for _ in range(2):
            run(x)


EVERY_DAY = [("MLP", place) for place in PLACES] + [("Llama-like", "region inside"), ("conv net", "region around")]


@pytest.mark.parametrize(
    ("model", "place"),
    [
        pytest.param(model, place, marks=() if (model, place) in EVERY_DAY else pytest.mark.slow)
        for model in ("MLP", "Llama-like", "conv net")
        for place in PLACES
    ],
)
def test_the_same_graphs(model: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    compile_ = torch.compile
    for region in (tp.stock_autocast, tp.my_autocast):
        graphs, made = Graphs(), subject(model, TINY)
        monkeypatch.setattr(torch, "compile", functools.partial(compile_, backend=graphs.backend))
        run = PLACES[place](made.net, region)
        found.append((graphs.code, count_compiled(lambda made=made, run=run: steps(made.net, run, made.x))))
    (stock_graphs, stock_counts), (our_graphs, our_counts) = found
    assert len(stock_graphs) >= 3  # forward, backward, and the forward without a gradient
    assert our_graphs == stock_graphs
    frames = our_counts["frames"]
    our_counts["guards"] -= frames if place in OBJECTS else 0
    assert our_counts == stock_counts


def counts_of(function: Callable[..., Any], *arguments: Any) -> dict[str, int]:
    compiled = torch.compile(on_its_own(function), backend="aot_eager")
    return count_compiled(lambda: compiled(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"dtype": HALF}, {"enabled": False}, {"cache_enabled": False}, {"dtype": BF16, "enabled": True}],
    ids=str,
)
def test_a_region_costs_the_guards_of_stocks(arguments: dict[str, Any]) -> None:
    x, weights = inputs()

    def function(region: Any, x: torch.Tensor, w: Weights) -> Any:
        with region("cpu", **arguments):
            return x @ w[0]

    with_stock = counts_of(function, tp.stock_autocast, x, weights)
    assert counts_of(function, tp.my_autocast, x, weights) == with_stock


@pytest.mark.parametrize("around", [{}, {"dtype": HALF}], ids=str)
def test_the_same_recompilations(around: dict[str, Any]) -> None:
    """In and out of regions, of other dtypes, cached or not, and nested."""

    def program(region: Region) -> dict[str, int]:
        x, weights = inputs()

        def function(x: torch.Tensor, w: Weights) -> Any:
            with region(**around):
                first = x @ w[0]
            return first, x @ w[1]

        compiled = torch.compile(on_its_own(function), backend="aot_eager")

        def calls() -> None:
            places = [None, {}, {"dtype": HALF}, {"enabled": False}, {"cache_enabled": False}]
            for place in (*places, *places):
                called_in(None if place is None else (region, place), compiled, x, weights)
            with region(), region(dtype=HALF):
                compiled(x, weights)

        return count_compiled(calls)

    assert program(ours) == program(stock)


# --- a region is an object in compiled code too


def test_a_region_that_leaves_the_compiled_function() -> None:
    def function(x: torch.Tensor, w: Weights) -> Any:
        region = tp.my_autocast("cpu", HALF, overrides={"mm": "fp32"})
        with region as entered:
            y = x @ w[0]
        return y, region, entered

    args = inputs()
    y, region, entered = torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
    expected = function(*args)
    assert y.dtype is HALF
    assert region is entered
    assert type(region) is tp.my_autocast
    assert repr(region) == repr(expected[1])
    with region:
        assert (args[0] @ args[1][0]).dtype is HALF
