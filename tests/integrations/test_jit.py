"""TorchScript: traces made inside regions, and scripted code called inside them.

A trace records the casts that our wrappers make. Scripted code is cast by TorchScript's own compiler pass, which reads
stock's autocast state; it works because our regions also set that state.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from helpers.program_comparison import Region, assert_like_stock, grads

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Output nr 1. of the traced function does not match"),
]


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
