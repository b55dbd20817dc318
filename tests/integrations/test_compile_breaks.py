"""torch.compile with graph breaks, exceptions and aborted traces: no region is left open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.measures import on_its_own
from helpers.comparison import assert_same
from helpers.compiling import HALF, Body, Weights, called_in, inputs
from helpers.program_comparison import Region, ours, stock
from helpers.thread_state import thread_state

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


# --- exceptions


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
