"""Activation checkpointing in regions with overrides: the recomputation uses the policy of its forward."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
)

import torch_promote as tp
from helpers.checkpointing import KINDS, OTHERS, OVERRIDES, Block, Region, Run, ours, plainly, train
from helpers.comparison import assert_same
from torch_promote.integrations import checkpoint as _checkpoint


@pytest.fixture(autouse=True)
def installed() -> None:
    _checkpoint.install()


@KINDS
@pytest.mark.parametrize(
    "around",
    [
        functools.partial(ours, OVERRIDES),
        functools.partial(ours, OTHERS, dtype=torch.float16),
        functools.partial(ours, OVERRIDES, cache_enabled=False),
        functools.partial(ours, OVERRIDES, enabled=False),
        ours,
        functools.partial(tp.stock_autocast, "cpu"),
        contextlib.nullcontext,
    ],
    ids=["overrides", "others", "no cache", "disabled", "no overrides", "stock", "nothing"],
)
@pytest.mark.parametrize(
    "around_backward",
    [contextlib.nullcontext, functools.partial(ours, OTHERS), functools.partial(tp.stock_autocast, "cpu"), ours],
    ids=["outside", "in others", "in stock", "in ours"],
)
def test_same_as_without(use_reentrant: bool, around: Region, around_backward: Region) -> None:
    """Independent of the policy in force at the backward."""
    call = functools.partial(checkpoint, use_reentrant=use_reentrant)
    # The backward's own ops see its region, with and without checkpointing.
    assert_same(train(call, around, around_backward), train(plainly, around, around_backward))


@pytest.mark.parametrize("inner", [True, False], ids=["reentrant inside", "not reentrant inside"])
@KINDS
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True"
)  # inside the first run of a reentrant one
def test_nested(use_reentrant: bool, inner: bool) -> None:
    def body(model: nn.Module, x: torch.Tensor, call: Run) -> Any:
        hidden = model(x)
        with ours({"linear": "fp32"}):
            return call(model, hidden)

    def with_checkpoints(model: nn.Module, x: torch.Tensor) -> Any:
        call = functools.partial(checkpoint, use_reentrant=inner)
        return checkpoint(body, model, x, call, use_reentrant=use_reentrant)

    assert_same(train(with_checkpoints), train(functools.partial(body, call=plainly)))


@KINDS
def test_error_in_what_is_run_again(use_reentrant: bool) -> None:
    """No region is left open, which the autouse fixture checks."""
    calls = []

    def fails_later(model: nn.Module, x: torch.Tensor) -> Any:
        calls.append(None)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return model(x)

    with pytest.raises(KeyboardInterrupt):
        train(lambda model, x: checkpoint(fails_later, model, x, use_reentrant=use_reentrant))


@KINDS
def test_graph_is_freed(use_reentrant: bool) -> None:
    """No reference cycle keeps the checkpointed function alive."""
    model = Block()
    x = torch.randn(4, 8, requires_grad=True)
    died = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        with ours(OVERRIDES):
            output = checkpoint(model, x, use_reentrant=use_reentrant)
        output.float().sum().backward()
        del model, output
        assert died() is None
    finally:
        gc.enable()
