"""Regions in compiled functions: subclasses, explicit calls of the methods, graph breaks, and arguments that vary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import torch_promote as tp
from torch_promote import _C

X = torch.ones(2, 2)
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
Function = Callable[[torch.Tensor], torch.Tensor]


class Plain(tp.my_autocast):
    """A subclass without code of its own."""


class WithInit(tp.my_autocast):
    def __init__(self, enabled: bool) -> None:
        super().__init__("cpu", FP16, enabled=enabled)


class WithMethods(tp.my_autocast):
    def __enter__(self) -> Any:
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)


def inside(make: Callable[[], Any]) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        with make():
            return x @ x

    return function


def outside(region: Any) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        with region:
            return x @ x

    return function


def by_methods(x: torch.Tensor) -> torch.Tensor:
    region = tp.my_autocast("cpu")
    region.__enter__()
    product = x @ x
    region.__exit__(None, None, None)
    return product


def on_a_stack(x: torch.Tensor) -> torch.Tensor:
    with ExitStack() as stack:
        stack.enter_context(tp.my_autocast("cpu"))
        return x @ x


def with_a_break(x: torch.Tensor) -> torch.Tensor:
    with tp.my_autocast("cpu"):
        first = x @ x
        torch._dynamo.graph_break()
        return first + x @ x


OVERRIDES = {"matmul": "fp32"}
POLICY = tp.Policy.stock().override(OVERRIDES)

#: PyTorch 2.15 breaks the graph at a region on an ExitStack; under stock every release does.
BREAKS_ON_A_STACK = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)

#: A function, the dtype of its result, and whether Dynamo compiles all of it.
CASES: dict[str, tuple[Function, torch.dtype, bool]] = {
    "subclass": (inside(lambda: Plain("cpu")), BF16, True),
    "subclass, made outside": (outside(Plain("cpu", FP16)), FP16, True),
    "subclass with __init__": (inside(lambda: WithInit(True)), FP16, True),
    "subclass with methods": (inside(lambda: WithMethods("cpu")), BF16, False),
    "overrides": (inside(lambda: tp.my_autocast("cpu", overrides=OVERRIDES)), FP32, True),
    "policy": (inside(lambda: tp.my_autocast("cpu", policy=POLICY)), FP32, True),
    "explicit methods": (by_methods, BF16, True),
    "ExitStack": (on_a_stack, BF16, not BREAKS_ON_A_STACK),
    "graph break": (with_a_break, BF16, False),
}


@pytest.mark.parametrize(("function", "dtype", "fullgraph"), CASES.values(), ids=CASES)
def test_compiled(function: Function, dtype: torch.dtype, fullgraph: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    assert [compiled(X).dtype for _ in range(2)] == [dtype] * 2
    assert _C.depth() == 0


def test_a_subclass_that_is_defined_after_dynamo_was_imported() -> None:
    import torch._dynamo

    class Late(tp.my_autocast):
        """As `Plain`."""

    compiled = torch.compile(outside(Late("cpu", FP16)), backend="aot_eager", fullgraph=True)
    assert compiled(X).dtype is FP16
