"""torch.compile: functions called in regions, and regions inside functions, each in one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func

import torch_promote as tp
from benchmarks.cases import Settings
from benchmarks.measures import count_compiled, on_its_own
from benchmarks.programs import subject
from benchmarks.suites import PLACES
from helpers.comparison import assert_same
from helpers.compiling import HALF, Body, Place, Weights, called_in, compute, inputs, with_gradients
from helpers.program_comparison import Region, assert_like_stock, ours, stock
from helpers.thread_state import thread_state

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


# --- a compiled function, called in different regions

#: Regions to call it in, one after the other; None is no region. Each comes again later, to be found compiled.
PROGRAM: list[Place] = [
    None,
    (ours, {}),
    (ours, {"dtype": HALF}),
    (ours, {"enabled": False}),
    (stock, {}),
    (ours, {"overrides": {"matmul": "fp32"}}),
    (ours, {"overrides": {"matmul": "fp32", "cat": "fp16"}}),
    (stock, {"dtype": HALF}),
    (ours, {"overrides": {"matmul": HALF}}),
    (ours, {"dtype": HALF, "overrides": {"matmul": "fp32"}}),
    (ours, {"overrides": {"matmul": "fallthrough", "mm": "fallthrough"}}),
    None,
]


@BACKENDS
def test_compiled_function_called_in_different_regions(backend: str) -> None:
    args = inputs()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    frames = []
    for _ in range(2):
        for place in PROGRAM:
            assert_same(called_in(place, compiled, *args), called_in(place, compute, *args), what=str(place))
        frames.append(counter.frame_count)
    assert frames[1] == frames[0], "a region that has been seen is compiled for once"


# --- regions inside a compiled function. That our wrappers do the casts is the same in all, and is asked once.


def simple(region: Region, x: torch.Tensor, w: Weights) -> Any:
    before = x @ w[2]
    with region():
        inside = compute(x, w)
    return before, inside, x @ w[3]


def nested(region: Region, x: torch.Tensor, w: Weights) -> Any:
    with region():
        outer = x @ w[0]
        with region(dtype=HALF):
            inner = x @ w[1]
            with region(enabled=False):
                off = x @ w[2]
            again = x @ w[3]
        return outer, inner, off, again, x @ w[4]


def decorated_inside(region: Region, x: torch.Tensor, w: Weights) -> Any:
    @region(dtype=HALF)
    def body(x: torch.Tensor) -> torch.Tensor:
        return x @ w[0]

    return body(x), x @ w[1]


def exception(region: Region, x: torch.Tensor, w: Weights) -> Any:
    try:
        with region():
            hidden = x @ w[0]
            raise ValueError
    except ValueError:
        return hidden, x @ w[1]


BODIES: tuple[Body, ...] = (simple, nested, decorated_inside, exception)


@pytest.mark.parametrize(
    ("body", "backend"), [*((body, "aot_eager") for body in BODIES), (simple, "eager"), (nested, "eager")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_region_inside(body: Body, backend: str) -> None:
    """In one graph, and with the bits of eager and of stock, wherever the compiled function is called."""

    def run(region: Region) -> Any:
        args = inputs()

        def function(x: torch.Tensor, weights: Weights) -> Any:
            return body(region, x, weights)

        compiled = torch.compile(function, backend=backend, fullgraph=True)
        results = []
        for place in (None, (region, {"dtype": HALF}), (region, {"enabled": False})):
            results.append(called_in(place, compiled, *args))
            assert_same(results[-1], called_in(place, function, *args), what=f"compiled against eager in {place}")
        return results

    assert_like_stock(run, casts=body is simple)


@BACKENDS
def test_overrides_inside(backend: str) -> None:
    def function(x: torch.Tensor, w: Weights) -> Any:
        with ours(overrides={"matmul": "fp32"}):
            first = x @ w[0]
            with ours(dtype=HALF, overrides={"softmax": "fp16"}):
                second = torch.softmax(x, -1), x @ w[1], torch.mm(x, w[2])
        with ours(overrides={"matmul": HALF}):
            return first, second, x @ w[3]

    args = inputs()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for place in (None, (ours, {}), (ours, {"overrides": {"matmul": "keep"}}), (stock, {}), None):
        assert_same(called_in(place, compiled, *args), called_in(place, function, *args), what=str(place))


@pytest.mark.parametrize("order", ["decorated, then compiled", "compiled, then decorated"])
@pytest.mark.parametrize("arguments", [{}, {"dtype": HALF}, {"enabled": False}], ids=repr)
def test_decorated_function(arguments: dict[str, Any], order: str) -> None:
    def run(region: Region) -> Any:
        args, scope = inputs(), region(**arguments)
        compile_ = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
        function = compile_(scope(compute)) if order.startswith("decorated") else scope(compile_(compute))
        results = [with_gradients(function, *args)]
        assert_same(results[0], with_gradients(scope(compute), *args), what="compiled against eager")
        with region(dtype=HALF):
            results.append(function(*args))
        return results

    assert_like_stock(run, casts=False)


def test_region_made_outside_of_the_compiled_function() -> None:
    """As a global, an attribute, a default: stock's regions can be entered so, in one graph."""

    def run(region: Region) -> Any:
        scope, args = region(dtype=HALF), inputs()

        def function(x: torch.Tensor, w: Weights) -> Any:
            with scope:
                first = x @ w[0]
            return first, x @ w[1]

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        return [called_in(place, compiled, *args) for place in (None, (region, {}))]

    assert_like_stock(run, casts=False)


# --- graph breaks and exceptions: no region is left open


def break_inside(region: Region, x: torch.Tensor, w: Weights) -> Any:
    with region():
        first = x @ w[0]
        torch._dynamo.graph_break()
        second = x @ w[1]
    return first, second, x @ w[2]


def break_in_the_inner_of_two(region: Region, x: torch.Tensor, w: Weights) -> Any:
    with region():
        first = x @ w[0]
        with region(dtype=HALF):
            second = x @ w[1]
            torch._dynamo.graph_break()
            third = x @ w[2]
        fourth = x @ w[3]
    return first, second, third, fourth, x @ w[4]


@pytest.mark.parametrize("body", [break_inside, break_in_the_inner_of_two], ids=lambda body: body.__name__)
def test_graph_break(body: Body) -> None:
    """Against stock's compiled code, and against eager where that has eager's bits."""
    args = inputs()

    def compiled(region: Region) -> Any:
        return torch.compile(on_its_own(lambda x, weights: body(region, x, weights)), backend="aot_eager")

    under_ours, under_stock = compiled(ours), compiled(stock)
    for arguments in (None, {"dtype": HALF}, None):
        mine, stocks = ((region, arguments) if arguments is not None else None for region in (ours, stock))
        before = thread_state()
        result = called_in(mine, under_ours, *args)
        assert thread_state() == before
        assert_same(result, called_in(stocks, under_stock, *args), what=f"compiled, in {arguments}")
        eager = called_in(stocks, lambda x, weights: body(stock, x, weights), *args)
        assert_same(result, eager, what=f"eager, in {arguments}")


class PlannedError(Exception):
    pass


def raises_while_traced(x: torch.Tensor) -> torch.Tensor:
    raise PlannedError


@torch._dynamo.disable
def raises_when_run(x: torch.Tensor) -> torch.Tensor:
    raise PlannedError


@pytest.mark.parametrize("raising", [raises_while_traced, raises_when_run])
@pytest.mark.parametrize("around", [False, True])
def test_exception_leaves_the_compiled_function(raising: Callable[..., Any], around: bool) -> None:
    def function(x: torch.Tensor, w: Weights) -> Any:
        with ours():
            hidden = x @ w[0]
            with ours(dtype=HALF, overrides={"matmul": "fp32"}):
                hidden = hidden + x @ w[1]
                return raising(hidden)

    compiled = torch.compile(function, backend="aot_eager")
    with ours(enabled=around):
        before = thread_state()
        for _ in range(2):
            with pytest.raises(PlannedError):
                compiled(*inputs())
            assert thread_state() == before


# --- a compiled step is the same code as under stock: graphs, graph breaks, guards


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
