"""The argument `cache` of a region inside a compiled function: it is part of the constant that the graph holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.compiling import Weights, called_in, compute, inputs
from torch_promote import _C


class Watching:
    """A backend that runs the graph as it is, and notes the specs of the regions in it."""

    def __init__(self) -> None:
        self.specs: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, example: Any) -> Any:
        self.specs += [n.args[0] for n in module.graph.nodes if getattr(n.target, "__name__", "") == "graph_enter"]
        return module.forward


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("cache", ["weights", "persistent", "all", "none"])
@pytest.mark.parametrize("made", ["inside", "outside", "decorator"])
def test_the_spec_in_the_graph(cache: str, made: str) -> None:
    region = tp.my_autocast("cpu", cache=cache)

    @tp.my_autocast("cpu", cache=cache)
    def decorated(x: torch.Tensor, weights: Weights) -> Any:
        return compute(x, weights)

    def function(x: torch.Tensor, weights: Weights) -> Any:
        if made == "decorator":
            return decorated(x, weights)
        with region if made == "outside" else tp.my_autocast("cpu", cache=cache):
            return compute(x, weights)

    backend, args = Watching(), inputs()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert_same(called_in(None, compiled, *args), called_in(None, function, *args))
    assert backend.specs == [region._packed]
    assert _C.cache_mode() == "weights"


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("arguments", [{"cache": "al"}, {"cache": "all", "cache_enabled": False}], ids=str)
def test_what_is_refused_is_refused_there_too(arguments: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", **arguments):
            return x @ x

    with pytest.raises(tp.OptionError) as eager:
        function(torch.ones(2, 2))
    with pytest.raises(tp.OptionError) as compiled:
        torch.compile(function, backend="eager")(torch.ones(2, 2))
    assert str(compiled.value) == str(eager.value)
