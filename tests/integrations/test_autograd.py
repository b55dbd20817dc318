"""Features built on autograd: checkpointing, autograd functions, torch.func, hooks, higher derivatives."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from helpers.comparison import assert_same
from helpers.program_comparison import Region, assert_like_stock, grads, ours

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
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checkpoint(dtype: torch.dtype, use_reentrant: bool, backward_inside: bool) -> None:
    def train(region: Region, checkpointed: bool) -> Any:
        first, second = block(), block()

        def call(x: torch.Tensor) -> torch.Tensor:
            if not checkpointed:
                return second(first(x))
            hidden = checkpoint(first, x, use_reentrant=use_reentrant)
            return checkpoint(second, hidden, use_reentrant=use_reentrant)

        model = nn.ModuleList([first, second])
        return forward_and_backward(functools.partial(region, dtype=dtype), model, call, backward_inside)

    result = assert_like_stock(lambda region: train(region, checkpointed=True))
    torch.manual_seed(0)
    assert_same(result, train(ours, checkpointed=False), what="checkpointed against not")


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

    _, seen = assert_like_stock(train)
    enabled = cast_inputs is None
    assert [state for *state, _ in seen] == [["forward", enabled], ["backward", enabled]]


# --- torch.func


def network(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight).float().square().sum(-1)


WEIGHT_AND_INPUT = (0, 1)
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f, w, x: torch.vmap(f, in_dims=(None, 0))(w, x),
    "grad": lambda f, w, x: torch.func.grad(lambda *args: f(*args).sum(), argnums=WEIGHT_AND_INPUT)(w, x),
    "per-sample grad": lambda f, w, x: torch.vmap(torch.func.grad(f), in_dims=(None, 0))(w, x),
    "vjp": lambda f, w, x: vjp(f, w, x),
    "jvp": lambda f, w, x: torch.func.jvp(f, (w, x), (torch.ones_like(w), x.flip(0))),
    "jacrev": lambda f, w, x: torch.func.jacrev(f, argnums=WEIGHT_AND_INPUT)(w, x),
    "jacfwd": lambda f, w, x: torch.func.jacfwd(f, argnums=WEIGHT_AND_INPUT)(w, x),
    "hessian": lambda f, w, x: torch.func.hessian(lambda *args: f(*args).sum())(w, x),
    "grad of grad": lambda f, w, x: torch.func.grad(
        lambda v: torch.func.grad(lambda u: f(u, x).sum())(v).square().sum()
    )(w),
    "functionalize": lambda f, w, x: torch.func.functionalize(f)(w, x),
}  # fmt: skip


def vjp(f: Callable[..., torch.Tensor], weight: torch.Tensor, x: torch.Tensor) -> Any:
    output, pull_back = torch.func.vjp(f, weight, x)
    return output, pull_back(torch.ones_like(output))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("where", ["around", "within"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name: str, where: str, requires_grad: bool) -> None:
    """The cache keeps casts of weights that require a gradient."""

    def transformed(region: Region) -> Any:
        weight, x = torch.randn(6, 4, requires_grad=requires_grad), torch.randn(3, 6)
        if where == "around":
            with region():
                first = TRANSFORMS[name](network, weight, x)
                return first, TRANSFORMS[name](network, weight, x), network(weight, x)
        return TRANSFORMS[name](region()(network), weight, x)

    assert_like_stock(transformed)


# --- higher derivatives, and several backwards over one cast


def test_double_backward_through_a_cast_that_is_found_again() -> None:
    """The first graph is gone when the second is built over the same cached cast."""

    def penalty(region: Region) -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        seen = []
        with region():
            for _ in range(3):
                x = torch.randn(4, 8, requires_grad=True)
                slopes = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], create_graph=True)
                torch.stack([slope.square().sum() for slope in slopes]).sum().backward()
                seen.append((slopes, grads(model, x)))
                del slopes
        return seen

    assert_like_stock(penalty)


def test_backward_in_another_thread() -> None:
    def train(region: Region) -> Any:
        model = block()
        with region():
            loss = model(torch.randn(4, 8)).square().mean()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        return loss, grads(model)

    assert_like_stock(train)
