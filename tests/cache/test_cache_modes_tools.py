"""The cache modes under checkpointing, torch.compile, the cross-check, dispatch modes, threads and exceptions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
)

import torch_promote as tp
from helpers.casts import CASTS, Region, half, ours, stock
from helpers.comparison import assert_same
from helpers.models import EVERY_MODEL, loss_of, made, region_of
from helpers.probes import in_thread

pytestmark = pytest.mark.usefixtures("nothing_persists")

KEEPING = ("weights", "persistent", "all")
ALL_KEEPING = pytest.mark.parametrize("cache", KEEPING)

# --- checkpointing


def checkpointed(region: Region, name: str, inside: bool, **how: Any) -> Any:
    """Two steps over a model whose block is used twice, with an activation that is also cast before the block."""
    model, x = made(name)
    head = nn.Linear(16, 16)
    for _ in range(2):
        source = x.clone().requires_grad_()
        with region():
            hidden = source * 2
            before = head(hidden)
            hidden = checkpoint(model, checkpoint(model, hidden, **how).float(), **how)
            loss = (head(hidden) + before).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    return [loss, source.grad, *(p.grad for p in (*head.parameters(), *model.parameters()) if p.requires_grad)]


@ALL_KEEPING
@EVERY_MODEL
@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(name: str, cache: str, use_reentrant: bool, inside: bool) -> None:
    run = functools.partial(checkpointed, name=name, inside=inside, use_reentrant=use_reentrant)
    assert_same(run(region_of(cache)), run(stock))


# --- torch.compile


@pytest.mark.parametrize("name", ["mlp", "frozen", "qkv"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(name: str, backend: str) -> None:
    def losses(region: Region) -> Any:
        torch._dynamo.reset()
        model, x = made(name)
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        seen = []
        for _ in range(3):
            with region():
                loss = loss_of(compiled, x)  # type: ignore[arg-type]
            loss.backward()
            with torch.no_grad(), region():
                seen += [loss.detach().clone(), model(x).clone(), compiled(x).clone()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    expected = losses(stock)
    for cache in KEEPING:
        assert_same(losses(region_of(cache)), expected, what=cache)


# --- the cross-check


# --- code that runs inside a cast


class During(TorchDispatchMode):
    """Calls a function in the middle of every cast, except for casts that the function makes."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__()
        self.action, self.times, self.busy = action, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CASTS and not self.busy:
            self.busy, self.times = True, self.times + 1
            try:
                self.action()
            finally:
                self.busy = False
        return result


ACTIONS: dict[str, Callable[[Any, Any], Callable[[], Any]]] = {
    "uses the same": lambda x, w: lambda: torch.mm(x, w),
    "other modes": lambda x, w: lambda: [_use(x, w, cache) for cache in ("all", "persistent", "none", "weights")],
    "another dtype": lambda x, w: lambda: _use(x, w, "persistent", torch.float16),
    "clears": lambda x, w: tp.clear_cache,
    "another thread": lambda x, w: lambda: in_thread(lambda: _use(x, w, "persistent")),
    "many": lambda x, w: lambda: [_use(torch.randn(3, 4), nn.Parameter(torch.randn(4, 4)), "all") for _ in range(9)],
}


def _use(x: torch.Tensor, w: torch.Tensor, cache: str, dtype: torch.dtype = torch.bfloat16) -> None:
    with ours(dtype, cache=cache):
        torch.mm(x, w)


@ALL_KEEPING
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_a_mode_may_use_autocast_inside_a_cast(action: Any, frozen: bool, grad: bool, cache: str) -> None:
    x, w = torch.randn(3, 4), nn.Parameter(torch.randn(4, 4), requires_grad=not frozen)
    expected = torch.mm(half(x), half(w))
    with During(action(x, w)) as mode, torch.set_grad_enabled(grad):
        for _ in range(3):
            with ours(cache=cache):
                for _ in range(2):
                    assert torch.equal(torch.mm(x, w), expected)
                    assert torch.equal(torch.mm(w.t(), x.t()), expected.t())
    assert mode.times > 0


def _product(x: torch.Tensor, w: torch.Tensor, cache: str) -> torch.Tensor:
    with ours(cache=cache), torch.no_grad():
        return torch.mm(x, w)


# --- nested regions


def nested(make_outer: Region, make_inner: Region) -> Any:
    """Losses and gradients of two models, each used in regions of two dtypes and with autocast off."""
    model, x = made("qkv")
    twin, losses = copy.deepcopy(model), []
    for _ in range(2):
        with make_outer():
            y = model(x)
            with make_inner(torch.float16):
                y = twin(y.float()) + model(x)
            with make_inner(enabled=False):
                z = model(x)
            loss = (y.float() + model(z)).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, [p.grad for p in (*model.parameters(), *twin.parameters())]


@pytest.mark.parametrize("outer", [*KEEPING, "none"])
@pytest.mark.parametrize("inner", [*KEEPING, "none", None])
def test_nested_regions_of_all_modes(outer: str, inner: str | None) -> None:
    found = nested(region_of(outer), functools.partial(ours, cache=inner))
    # Stock has no cache here: it would use casts of the outer region's dtype in the inner one.
    without = functools.partial(stock, cache_enabled=False)
    losses, gradients = nested(without, without)
    assert_same(found[0], losses)
    if "none" not in (outer, inner):  # the gradient of a weight is summed where its cast is
        gradients = nested(region_of("weights"), region_of("weights"))[1]
        assert_same(found[1], gradients)
    elif inner in ("none", None) and outer == "none":
        assert_same(found[1], gradients)
