"""torch.compile: functions called in regions, and regions inside functions, each in one graph."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.comparison import assert_same
from helpers.compiling import HALF, Body, Place, Weights, called_in, compute, inputs, with_gradients
from helpers.program_comparison import Region, assert_like_stock, ours, stock

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
