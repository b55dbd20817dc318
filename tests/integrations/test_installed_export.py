"""torch.export, make_fx and TorchScript while `install` is in force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import leaves_no_trace

pytestmark = [
    pytest.mark.usefixtures("nothing_installed", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]

HALF = torch.float16


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(x)
        with torch.autocast("cpu"):
            x = torch.softmax(self.first(x), -1)
            with torch.autocast("cpu", HALF):
                y = self.third(x)
            x = self.second(x)
        return x + 1, y


def nodes(module: nn.Module) -> list[str]:
    found: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, torch.fx.GraphModule):
            found += [f"{name}: {node.op} {node.target} {node.args}" for node in part.graph.nodes]
    return found


@pytest.mark.parametrize("arguments", [{}, {"cache": "all"}], ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_the_stock_policy_is_exported_as_stocks(strict: bool, arguments: Any) -> None:
    model, x = Inside(), torch.randn(3, 6)
    expected = torch.export.export(model, (x,), strict=strict)
    with leaves_no_trace(), tp.installed_as(**arguments):
        program = torch.export.export(model, (x,), strict=strict)
        assert nodes(program.graph_module) == nodes(expected.graph_module)
        assert any("autocast" in node for node in nodes(program.graph_module))
        inside = program.module()(x)
        assert_same(inside, model(x))
    assert_same(program.module()(x), inside)
