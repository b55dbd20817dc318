"""Activation checkpointing, with the policy of its forward, and autograd functions with custom_fwd and custom_bwd."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_promote as tp
from helpers.checkpointing import KINDS, OTHERS, OVERRIDES, Block, Run, plainly, train
from helpers.checkpointing import ours as under
from helpers.comparison import assert_same
from helpers.program_comparison import Region, assert_like_stock, grads
from helpers.subprocesses import run_python
from torch_promote import _C
from torch_promote.integrations import checkpoint as _checkpoint

pytestmark = pytest.mark.usefixtures("nothing_installed")

BACKWARD_INSIDE = pytest.mark.parametrize("backward_inside", [True, False])


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.3), nn.GELU(), nn.Linear(12, 8), nn.LayerNorm(8))


def forward_and_backward(
    region: Callable[[], Any], model: nn.Module, call: Callable[..., torch.Tensor], backward_inside: bool
) -> Any:
    x = torch.randn(4, 8, requires_grad=True)
    with region():
        output = call(x)
        loss = output.float().square().mean()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return output, loss, grads(model, x)


# --- activation checkpointing


@BACKWARD_INSIDE
def test_selective_checkpoint(backward_inside: bool) -> None:
    def train(region: Region) -> Any:
        model, asked = block(), []

        def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            asked.append((op._schema.name, [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]))
            return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
        call = functools.partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
        return forward_and_backward(region, model, call, backward_inside), asked

    _, asked = assert_like_stock(train)
    assert ("aten::_to_copy", [torch.float32]) in asked, "the casts are among the ops that the policy is asked about"


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


# --- autograd functions with custom_fwd and custom_bwd


def linear_function(cast_inputs: torch.dtype | None) -> type[torch.autograd.Function]:
    class Linear(torch.autograd.Function):
        seen: list[tuple[str, bool, torch.dtype]] = []  # noqa: RUF012 (a record of the class)

        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            Linear.seen.append(("forward", torch.is_autocast_enabled("cpu"), x.dtype))
            ctx.save_for_backward(x, weight)
            return x.mm(weight.t())

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            Linear.seen.append(("backward", torch.is_autocast_enabled("cpu"), grad.dtype))
            x, weight = ctx.saved_tensors
            return grad.mm(weight), grad.t().mm(x)

    return Linear


@BACKWARD_INSIDE
@pytest.mark.parametrize("cast_inputs", [None, torch.float32, torch.float16])
def test_custom_fwd_and_custom_bwd(cast_inputs: torch.dtype | None, backward_inside: bool) -> None:
    def train(region: Region) -> Any:
        function = linear_function(cast_inputs)
        model = nn.Linear(8, 8)
        result = forward_and_backward(
            region, model, lambda x: function.apply(F.relu(model(x)), model.weight), backward_inside
        )
        return result, function.seen

    result, seen = assert_like_stock(train)
    with tp.install():
        torch.manual_seed(0)
        assert_same(train(functools.partial(torch.autocast, "cpu")), (result, seen), what="installed")
    enabled = cast_inputs is None
    assert [state for *state, _ in seen] == [["forward", enabled], ["backward", enabled]]


# --- activation checkpointing in regions with overrides: the recomputation uses the policy of its forward


@pytest.fixture(autouse=True)
def installed() -> None:
    _checkpoint.install()


@KINDS
@pytest.mark.parametrize(
    "around",
    [
        functools.partial(under, OVERRIDES),
        functools.partial(under, OTHERS, dtype=torch.float16),
        functools.partial(under, OVERRIDES, cache_enabled=False),
        functools.partial(under, OVERRIDES, enabled=False),
        under,
        functools.partial(tp.stock_autocast, "cpu"),
        contextlib.nullcontext,
    ],
    ids=["overrides", "others", "no cache", "disabled", "no overrides", "stock", "nothing"],
)
@pytest.mark.parametrize(
    "around_backward",
    [contextlib.nullcontext, functools.partial(under, OTHERS), functools.partial(tp.stock_autocast, "cpu"), under],
    ids=["outside", "in others", "in stock", "in ours"],
)
def test_same_as_without(use_reentrant: bool, around: Callable[[], Any], around_backward: Callable[[], Any]) -> None:
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
        with under({"linear": "fp32"}):
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
        with under(OVERRIDES):
            output = checkpoint(model, x, use_reentrant=use_reentrant)
        output.float().sum().backward()
        del model, output
        assert died() is None
    finally:
        gc.enable()


# --- under torch.compile


@pytest.mark.parametrize("place", ["inside the compiled function", "around it"])
@KINDS
def test_compiled(use_reentrant: bool, place: str, fresh_dynamo: None) -> None:
    """The policy is in the graph, and with it in what the compiler runs again."""

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        if place == "around it":
            return checkpoint(model.second, torch.softmax(model.first(x), -1), use_reentrant=use_reentrant)
        with under(OVERRIDES):
            return checkpoint(model.second, torch.softmax(model.first(x), -1), use_reentrant=use_reentrant)

    around = functools.partial(under, OVERRIDES) if place == "around it" else contextlib.nullcontext
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    result = train(compiled, around, around)  # a compiled function has the backward of the region of its call
    assert result[0].dtype is torch.float16
    assert_same(result, train(run, around, around))


def test_compiled_autograd(fresh_dynamo: None) -> None:
    def gradients(compiler: Any) -> Any:
        torch.manual_seed(0)
        model, x = Block(), torch.randn(4, 8, requires_grad=True)
        with under(OVERRIDES):
            output = checkpoint(model, x, use_reentrant=False)
        with compiler:
            output.float().square().sum().backward()
        return [output, x.grad, *(parameter.grad for parameter in model.parameters())]

    compiler = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    assert_same(gradients(compiler), gradients(contextlib.nullcontext()))


# --- the hooks in torch.utils.checkpoint


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("opening", ["tp.register_policy('sin', 'float64')", "tp.set_default_policy('fp32_safe')"])
def test_policies_of_the_whole_program_are_kept_too(opening: str, use_reentrant: bool) -> None:
    """In a process in which no other test has installed the hooks."""
    program = f"""
import torch, torch_promote as tp
from torch.utils.checkpoint import checkpoint
{opening}
seen = []
def step(x):
    y = torch.exp(torch.sin(x))
    seen.append((torch.sin(x).dtype, y.dtype))
    return torch.sin(y)
x = torch.ones(2, dtype=torch.float16, requires_grad=True)
with tp.my_autocast("cpu"):
    y = checkpoint(step, x, use_reentrant={use_reentrant})
y.sum().backward()
print(len(seen), len(set(seen)), seen[0][1] is torch.float16)
"""
    done = run_python(program, compiler=True)
    assert done.stdout.split() == ["2", "1", "False"], done.stderr


# --- under install


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("around", ["stock", "nothing"])
def test_checkpoint_of_a_forward_in_stock(around: str, use_reentrant: bool) -> None:
    """Recomputed in a region of stock's, and regions that the function itself opens in ours, as in the forward."""
    seen: list[tuple[bool, torch.dtype]] = []
    weight = torch.randn(4, 4, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        before = _C.depth()
        y = nn.functional.linear(x, weight)
        with torch.autocast("cpu"):
            seen.append((_C.depth() > before, y.dtype))
            return nn.functional.linear(y, weight).float()

    before = tp.set_default_policy(tp.Policy.stock().override({"linear": "fp32"}))
    try:
        with tp.install():
            with tp.stock_autocast("cpu", enabled=around == "stock"):
                y = checkpoint(inner, torch.randn(2, 4, requires_grad=True), use_reentrant=use_reentrant)
            y.sum().backward()
    finally:
        tp.set_default_policy(before)
    assert seen == [(True, torch.bfloat16 if around == "stock" else torch.float32)] * 2
