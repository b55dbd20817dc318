"""torch.export of modules with regions inside, and make_fx under regions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.program_comparison import Region, assert_like_stock, ours, stock
from helpers.thread_state import thread_state
from torch_promote.errors import RegionError

HALF = torch.float16
OVERRIDES = {"linear": "fp32"}


class Inside(nn.Module):
    """A region in the middle of a forward, whose result keeps its dtype."""

    def __init__(self, region: Region, **arguments: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.region, self.arguments = region, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        with self.region(**self.arguments):
            x = self.second(torch.softmax(self.first(x), -1))
        return x + 1


class Nested(Inside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region(**self.arguments):
            x = self.first(x)
            with self.region(enabled=False):
                x = torch.relu(x.float())
            return self.second(x) + torch.cat([x[:, :4], x[:, 4:].half()], -1).sum()


class Decorated(Inside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region(**self.arguments)(lambda: self.second(self.first(x)))()


def graph(module: torch.nn.Module) -> list[str]:
    """The nodes of a graph module and, after them, of those inside it."""
    nodes: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, torch.fx.GraphModule):
            nodes += [f"{name}: {node.op} {node.target} {node.args} {node.kwargs}" for node in part.graph.nodes]
    return nodes


def export(module: nn.Module, x: torch.Tensor, strict: bool) -> tuple[torch.export.ExportedProgram, list[str]]:
    program = torch.export.export(module, (x,), strict=strict)
    return program, graph(program.graph_module)


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"dtype": HALF},
    {"dtype": torch.bfloat16, "enabled": False},
    {"cache_enabled": False},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=repr)
@pytest.mark.parametrize("module", [Inside, Nested, Decorated])
def test_region_is_exported_as_stocks(module: type[Inside], arguments: dict[str, Any]) -> None:
    def run(region: Region) -> Any:
        model, x = module(region, **arguments), torch.randn(3, 6)
        program, nodes = export(model, x, strict=False)
        exported, eager = program.module()(x), model(x)
        assert_same(exported, eager, what="exported against eager")
        return nodes, exported

    # A region in the graph is stock's when it runs, and stands there whatever ours casts.
    nodes, _ = assert_like_stock(lambda region: run(region), casts=False)
    assert any("wrap_with_autocast" in node for node in nodes)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=repr)
def test_strict_export(arguments: dict[str, Any]) -> None:
    """Strict export traces with Dynamo, where stock records the arguments and ours the resulting settings."""
    results = []
    for region in (ours, stock):
        torch.manual_seed(0)
        model, x = Inside(region, **arguments), torch.randn(3, 6)
        program, nodes = export(model, x, strict=True)
        results.append(program.module()(x))
        assert_same(results[-1], model(x), what="exported against eager")
        assert any("autocast" in node for node in nodes)
    assert_same(*results)


@pytest.mark.usefixtures("nothing_installed", "fresh_dynamo")
@pytest.mark.parametrize("strict", [False, True])
def test_an_installed_region_is_exported_as_stocks(strict: bool) -> None:
    model, x = Inside(functools.partial(torch.autocast, "cpu")), torch.randn(3, 6)
    _, expected = export(model, x, strict)
    with tp.installed_as():
        program, nodes = export(model, x, strict)
        assert nodes == expected
        assert any("autocast" in node for node in nodes)
        inside = program.module()(x)
        assert_same(inside, model(x))
    assert_same(program.module()(x), inside)


@pytest.mark.parametrize("strict", [False, True])
def test_overrides_cannot_be_exported(strict: bool) -> None:
    before = thread_state()
    with pytest.raises(RegionError, match=r"overrides.*cannot be exported.*which have neither"):
        export(Inside(ours, overrides=OVERRIDES), torch.randn(3, 6), strict=strict)
    assert thread_state() == before


# --- make_fx


def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ weight, -1) @ weight.t() + torch.cat([x, x.bfloat16()]).sum()


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("where", ["around", "within"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_make_fx(where: str, pre_dispatch: bool, tracing_mode: str, requires_grad: bool) -> None:
    def trace(region: Region) -> Any:
        x, weight = torch.randn(3, 6), torch.randn(6, 4, requires_grad=requires_grad)
        if where == "around":
            with region():
                traced = make_fx(compute, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(x, weight)
        else:
            traced = make_fx(region()(compute), tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(x, weight)
        return graph(traced), traced(x, weight)

    # A graph made above autocast has no casts in it.
    nodes, _ = assert_like_stock(trace, casts=not pre_dispatch)
    if not pre_dispatch:
        assert any("_to_copy" in node for node in nodes)
    elif where == "within":
        assert any("_enter_autocast" in node for node in nodes)
        assert any("_exit_autocast" in node for node in nodes)
