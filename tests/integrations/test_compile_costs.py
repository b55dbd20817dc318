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
from benchmarks.measures import count_compiled
from benchmarks.models import subject
from benchmarks.suites import PLACES

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


# --- a region is an object in compiled code too
