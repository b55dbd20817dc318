"""torch.compile with `promotion`: guards on the rule, regions inside, refusals and the lint while compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_promote as tp
from torch_promote.regions.promotion import PromotionEvent

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HALF = torch.full((3,), 1.5, dtype=torch.float16)
INTS = torch.arange(3, dtype=torch.int32)
SINGLE = torch.full((3,), 0.1)


def compute(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x + y
    w = x.clone()
    w += torch.ones((), dtype=w.dtype)
    return z, z * 2.5, torch.cat([x, y]), w, torch.where(x > y, x, y)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_is_compiled_anew_for_each_rule(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    rules = (None, "torch", "numpy", "jax", None, "numpy", "torch", "jax")
    for rule in rules:
        if rule is None:
            wanted, got = compute(INTS, SINGLE), compiled(INTS, SINGLE)
        else:
            with tp.promotion(rule):
                wanted, got = compute(INTS, SINGLE), compiled(INTS, SINGLE)
        for a, b in zip(wanted, got, strict=True):
            assert a.dtype is b.dtype
            assert torch.equal(a, b)
    assert counter.frame_count == 4


def test_regions_inside() -> None:
    outside = tp.promotion("numpy")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        with tp.promotion("numpy"):
            first = x + y
        with outside:
            second = x + y
        with tp.promotion("jax", matmul=True):
            third = x[None].float() @ y[:, None].half()
        return first, second, third, x + y

    dtypes = [result.dtype for result in function(INTS, SINGLE)]
    assert dtypes == [torch.float64, torch.float64, torch.float32, torch.float32]


def test_what_the_rule_refuses_is_refused_while_compiling() -> None:
    compiled = torch.compile(torch.add, backend="aot_eager")
    with tp.promotion("strict"), pytest.raises(Exception, match=r"Write x.to\(torch.float32\) for the int32 tensor"):
        compiled(INTS, SINGLE)
    with tp.promotion("strict"):
        assert torch.equal(compiled(SINGLE, SINGLE), SINGLE + SINGLE)


def test_the_lint_tells_of_the_line_once_while_compiling() -> None:
    events: list[PromotionEvent] = []

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with tp.promotion("torch", on_promotion=events.append):
        compiled(HALF, SINGLE)
        compiled(HALF, SINGLE)
    assert [(event.filename, event.lineno) for event in events] == [(__file__, function.__code__.co_firstlineno + 1)]
