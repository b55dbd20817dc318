"""Casts under PyTorch's tools, and what a program may do with a cast that it gets hold of."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.profiler import ProfilerActivity, profile

from helpers.casts import Region, ours, stock
from helpers.comparison import assert_same
from helpers.fast_cast import run

# --- tools


def test_the_profiler_shows_casts_with_their_shapes_and_their_nodes() -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run(ours)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    shapes = [list(event.shapes()) for event in events if event.name() == "torch_promote::cast"]
    assert [[3, 6]] in shapes
    assert [[6, 6]] in shapes
    assert any("CastBackward" in event.name() for event in events)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_trace_of_jit_holds_its_casts() -> None:
    layer = nn.Linear(6, 6).requires_grad_(False)
    x = torch.randn(3, 6)

    def traced(region: Region, **arguments: Any) -> torch.jit.ScriptModule:
        with region(**arguments), torch.no_grad():
            layer(x)  # casts that the trace is not to take for constants
            return torch.jit.trace(lambda t: torch.mm(layer(t), t.t()), x)  # type: ignore[no-any-return,no-untyped-call]

    other = torch.randn(3, 6)
    expected = traced(stock, cache_enabled=False)(other)
    for cache in ("weights", "persistent", "all"):
        assert torch.equal(traced(ours, cache=cache)(other), expected)


def test_compiled_autograd_takes_casts_in() -> None:
    compiler = functools.partial(torch.compile, backend="eager", fullgraph=True)
    expected = run(stock)
    torch._dynamo.reset()
    with compiled_autograd._enable(compiler()):
        found = run(ours)
    assert_same(found, expected)
