"""Regions in what PyTorch traces: torch.export, make_fx, TorchScript, and higher-order operators, which compile."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.program_comparison import Region, assert_like_stock, grads, ours, stock
from helpers.thread_state import thread_state
from torch_promote.errors import RegionError

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Output nr 1. of the traced function does not match"),
]

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


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("strict", [False, True])
def test_an_installed_region_is_exported_as_stocks(strict: bool) -> None:
    model, x = Inside(functools.partial(torch.autocast, "cpu")), torch.randn(3, 6)
    _, expected = export(model, x, strict)
    with tp.install():
        program, nodes = export(model, x, strict)
        assert nodes == expected
        assert any("autocast" in node for node in nodes)
        inside = program.module()(x)
        assert_same(inside, model(x))
    assert_same(program.module()(x), inside)


@pytest.mark.parametrize("overrides", [OVERRIDES, {"linear": "float8"}], ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_overrides_cannot_be_exported(strict: bool, overrides: dict[str, Any]) -> None:
    before = thread_state()
    with pytest.raises(RegionError, match=r"overrides.*cannot be exported.*which have neither"):
        export(Inside(ours, overrides=overrides), torch.randn(3, 6), strict=strict)
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


# --- TorchScript
#
# A trace records the casts that our wrappers make. Scripted code is cast by TorchScript's own compiler pass, which
# reads stock's autocast state; it works because our regions also set that state.


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Softmax(-1))


def ops(module: Any) -> list[str]:
    """The nodes of a TorchScript module, without the numbers that make names unique."""
    return [re.sub(r"\.___torch_mangle_\d+|%\w*\d+", "", str(node)) for node in module.inlined_graph.nodes()]


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_trace_made_inside_a_region(training: bool, cache_enabled: bool) -> None:
    """The casts are in the trace, so it gives the same inside and outside of any region."""

    def trace(region: Region) -> Any:
        model, x = network().requires_grad_(training), torch.randn(4, 8)
        with region(cache_enabled=cache_enabled):
            traced = torch.jit.trace(model, x, check_trace=False)
            outputs = [traced(x)]
        outputs += [traced(x), traced(x * 2)]
        if training:
            sum(output.float().square().sum() for output in outputs).backward()
        with region(dtype=torch.float16), torch.no_grad():
            outputs.append(traced(x))
        return outputs, ops(traced), grads(model)

    outputs, kinds, _ = assert_like_stock(trace)
    assert outputs[1].dtype is torch.bfloat16
    assert any("aten::to" in kind for kind in kinds)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.mm(x, self.weight)
        if hidden.dtype == torch.bfloat16:
            hidden = hidden * 2
        return torch.softmax(hidden, -1) + x.sum()


# The backward of scripted code fails in float16: TorchScript mixes the two dtypes then, under stock too.
@pytest.mark.parametrize(("frozen", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)])
@pytest.mark.parametrize("make_model", [Scripted, network])
def test_scripted_code_called_inside_a_region(make_model: Any, frozen: bool, dtype: torch.dtype) -> None:
    """Several times each, outside and inside: the executor specializes code after a few calls."""

    def run(region: Region) -> Any:
        x, model, seen = torch.randn(4, 8), make_model(), []
        scripted = torch.jit.freeze(torch.jit.script(model.eval())) if frozen else torch.jit.script(model)
        for _ in range(3):
            seen.append(scripted(x))
            with region(dtype=dtype):
                seen.append(scripted(x))
                with region(enabled=False):
                    seen.append(scripted(x))
        if not frozen:
            sum(output.float().square().sum() for output in seen).backward()
        return seen, grads(model)

    seen, _ = assert_like_stock(run, casts=False)
    assert seen[0].dtype is torch.float32
    assert not torch.equal(seen[1].float(), seen[0]), "TorchScript has cast nothing"


# --- higher-order operators fall through on our key


X, W = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(1, 2, 16).view(4, 4)
OPERATORS: dict[str, Callable[[], Any]] = {
    "cond": lambda: torch.cond(torch.tensor(True), lambda a: a @ W, lambda a: (a @ W).sin(), (X,)),
    "while_loop": lambda: while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, (a @ W).float()), (torch.tensor(0), X)),
    "map": lambda: map_over(lambda row: row + 1, X),
    "scan": lambda: scan(lambda carry, row: (carry + row, carry * row), torch.zeros(4), X),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", OPERATORS.values(), ids=OPERATORS)
def test_the_result_is_stocks(run: Callable[[], Any]) -> None:
    with tp.stock_autocast("cpu"):
        stock = run()
    torch._dynamo.reset()
    with tp.my_autocast("cpu"):
        ours = run()
    assert_same(ours, stock)
