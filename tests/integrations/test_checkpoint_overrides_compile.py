"""Checkpointing with overrides under torch.compile."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.checkpointing import KINDS, OVERRIDES, Block, ours, train
from helpers.comparison import assert_same
from torch_promote.integrations import checkpoint as _checkpoint


@pytest.fixture(autouse=True)
def installed() -> None:
    _checkpoint.install()


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("place", ["inside the compiled function", "around it"])
@KINDS
def test_compiled(use_reentrant: bool, place: str, fresh_dynamo: None) -> None:
    """The policy is in the graph, and with it in what the compiler runs again."""

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        if place == "around it":
            return checkpoint(model.second, torch.softmax(model.first(x), -1), use_reentrant=use_reentrant)
        with ours(OVERRIDES):
            return checkpoint(model.second, torch.softmax(model.first(x), -1), use_reentrant=use_reentrant)

    around = functools.partial(ours, OVERRIDES) if place == "around it" else contextlib.nullcontext
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    result = train(compiled, around, around)  # a compiled function has the backward of the region of its call
    assert result[0].dtype is torch.float16
    assert_same(result, train(run, around, around))


def test_compiled_autograd(fresh_dynamo: None) -> None:
    def gradients(compiler: Any) -> Any:
        torch.manual_seed(0)
        model, x = Block(), torch.randn(4, 8, requires_grad=True)
        with ours(OVERRIDES):
            output = checkpoint(model, x, use_reentrant=False)
        with compiler:
            output.float().square().sum().backward()
        return [output, x.grad, *(parameter.grad for parameter in model.parameters())]

    compiler = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    assert_same(gradients(compiler), gradients(contextlib.nullcontext()))
