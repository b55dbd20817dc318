"""Activation checkpointing in regions with overrides: the recomputation uses the policy of its forward."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

import torch_promote as tp
from helpers.checkpointing import KINDS, OTHERS, OVERRIDES, Block, Region, Run, ours, plainly, train
from helpers.comparison import assert_same
from torch_promote import _C
from torch_promote.integrations import checkpoint as _checkpoint
from torch_promote.integrations.checkpoint import checkpoint_contexts


@pytest.fixture(autouse=True)
def installed() -> None:
    _checkpoint.install()


@pytest.fixture
def quiet_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's debug mode leaves its logger changed, so that pytest would try to format its records, and cannot."""
    logger = logging.getLogger("LoggingTensor")
    for name, value in (("propagate", True), ("level", logging.WARNING), ("filters", [])):
        monkeypatch.setattr(logger, name, value)


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


@KINDS
def test_dtypes_of_both_runs(use_reentrant: bool) -> None:
    model = Block()
    train(functools.partial(checkpoint, use_reentrant=use_reentrant), model=model)
    assert model.seen == [(torch.float16, torch.float32)] * 2


@KINDS
def test_region_inside_a_checkpoint_outside_of_regions(use_reentrant: bool) -> None:
    """A region without a policy of its own starts from the default, also where the backward is in overrides."""

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with ours():
            return model(x)

    model = Block()

    def call(model: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(run, model, x, use_reentrant=use_reentrant)

    train(call, contextlib.nullcontext, functools.partial(ours, OVERRIDES), model)
    assert model.seen == [(torch.bfloat16, torch.bfloat16)] * 2


@KINDS
def test_stock_region_in_what_is_run_again(use_reentrant: bool) -> None:
    """Our key is on in the recomputation: a region of torch.autocast inside it has the overrides."""

    def body(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            off = model.first(x)
        with torch.autocast("cpu", dtype=torch.float16):
            return model(off.float())

    def call(model: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(body, model, x, use_reentrant=use_reentrant)

    assert_same(train(call), train(body))


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


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.mark.parametrize(
    "arguments",
    [
        {"context_fn": functools.partial(create_selective_checkpoint_contexts, keep_products)},
        {"context_fn": checkpoint_contexts},
        {"early_stop": False},
        {"determinism_check": "none"},
        {"debug": True},
    ],
    ids=["selective", "ours", "no early stop", "no check", "debug"],
)
def test_arguments(arguments: dict[str, Any], quiet_log: None) -> None:
    assert_same(train(functools.partial(checkpoint, use_reentrant=False, **arguments)), train(plainly))


@pytest.mark.parametrize("setting", [set_checkpoint_early_stop, set_checkpoint_debug_enabled])
@pytest.mark.parametrize("on", [True, False])
def test_settings(setting: Any, on: bool, quiet_log: None) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> Any:
        with setting(on):
            return checkpoint(model, x, use_reentrant=False)

    assert_same(train(call), train(plainly))


@KINDS
def test_random_state_not_preserved(use_reentrant: bool) -> None:
    """As without overrides: only dropout differs."""
    call = functools.partial(checkpoint, use_reentrant=use_reentrant, preserve_rng_state=False)
    model = Block()
    results = train(call, model=model)
    assert model.seen == [(torch.float16, torch.float32)] * 2
    assert results[0].dtype is torch.float16
    assert not torch.equal(results[1], train(plainly)[1]), "dropout has drawn again"


@KINDS
def test_sequential(use_reentrant: bool) -> None:
    def in_segments(model: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block(), Block())

    assert_same(train(in_segments, model=model()), train(plainly, model=model()))


@pytest.mark.parametrize("kind", CheckpointImpl)
def test_wrapped_modules(kind: CheckpointImpl) -> None:
    def wrapped() -> nn.Module:
        torch.manual_seed(0)
        return checkpoint_wrapper(Block(), kind)

    torch.manual_seed(0)
    plain = Block()
    assert_same(train(plainly, model=wrapped()), train(plainly, model=plain))


def test_composable_checkpoint() -> None:
    """It imports the functions that it needs by name, before they could be replaced."""
    torch.manual_seed(0)
    model, plain = Block(), Block()
    plain.load_state_dict(model.state_dict())
    assert_same(train(plainly, model=composable_checkpoint(model)), train(plainly, model=plain))
    assert model.seen == [(torch.float16, torch.float32)] * 2


@KINDS
def test_retained_graph(use_reentrant: bool) -> None:
    def gradients(call: Run) -> Any:
        torch.manual_seed(0)
        model, x = Block(), torch.randn(4, 8, requires_grad=True)
        with ours(OVERRIDES):
            output = call(model, x)
        for _ in range(2):
            output.float().sum().backward(retain_graph=True)
        return x.grad

    assert_same(gradients(functools.partial(checkpoint, use_reentrant=use_reentrant)), gradients(plainly))


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


def test_other_policy_in_the_function_is_found() -> None:
    """The determinism check still works: a function that has another dtype the second time."""
    dtypes = iter([torch.float16, torch.bfloat16])

    def changing(model: nn.Module, x: torch.Tensor) -> Any:
        with ours({"linear": next(dtypes)}):
            return model(x)

    with pytest.raises(CheckpointError, match="different metadata"):
        train(lambda model, x: checkpoint(changing, model, x, use_reentrant=False))


@KINDS
def test_default_policy_is_not_taken_for_an_override(use_reentrant: bool) -> None:
    """A default policy applies to regions of ours; the recomputation of a checkpoint outside of them has none."""
    change = _C.register_change([(_C.OP_ENTRY_NAMES.index("aten::linear"), 0, _C.POLICY_BYTES["fp32"])], True)
    _C.set_defaults(0, change)
    try:
        for around in (functools.partial(tp.stock_autocast, "cpu"), ours, functools.partial(ours, {"softmax": "fp16"})):
            for backward in (contextlib.nullcontext, ours, functools.partial(ours, OTHERS)):
                model, again = Block(), Block()
                train(plainly, around, backward, model)
                train(functools.partial(checkpoint, use_reentrant=use_reentrant), around, backward, again)
                assert again.seen == model.seen * 2
    finally:
        _C.set_defaults(0, 0)


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


def test_contexts_put_their_policy_in_force() -> None:
    with ours(OVERRIDES):
        forward, recompute = checkpoint_contexts()
        inside = _C.current_policy_id()
        with forward:
            assert _C.current_policy_id() == inside
    with recompute:
        assert _C.current_policy_id() == inside
        assert torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.AutocastPrivateUse1)
    assert _C.policy_is_stock()


def test_explicit_contexts_serve_every_backward_of_a_graph_that_is_kept() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with tp.my_autocast("cpu", overrides={"sin": "float64"}):
        y = checkpoint(lambda x: torch.sin(torch.sin(x)), x, use_reentrant=False, context_fn=checkpoint_contexts)
    y.sum().backward(retain_graph=True)
    first = x.grad
    assert first is not None
    x.grad = None
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, first)
