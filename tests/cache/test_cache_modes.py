"""Every cache mode: the bits of stock, forward and backward, with as many casts as the mode promises."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from benchmarks.measures import count_casts
from helpers.casts import CASTS, Region, half, ours, stock
from helpers.comparison import assert_same
from helpers.models import (
    EVERY_MODEL,
    checkpointed,
    loss_of,
    made,
    region_of,
    trained,
)
from helpers.probes import in_thread

pytestmark = pytest.mark.usefixtures("nothing_persists")

KEEPING = ("weights", "persistent", "all")
ALL_KEEPING = pytest.mark.parametrize("cache", KEEPING)
ALL_MODES = pytest.mark.parametrize("cache", [*KEEPING, "none"])


# --- bits


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@ALL_MODES
@EVERY_MODEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_has_stocks_bits(name: str, cache: str, dtype: torch.dtype) -> None:
    measure = functools.partial(stock, cache_enabled=cache != "none")
    for inside in (False, True):
        given = name, dtype, inside, SGD
        assert_same(trained(region_of(cache), *given), trained(measure, *given))


def trained_after_evaluation(region: Region, name: str, no_autograd: Callable[[], Any], warm: bool) -> Any:
    """In one region: the training finds casts that were made without gradients."""
    model, x = made(name)
    if warm:
        with region(), torch.no_grad():
            model(x)
    with region():
        with no_autograd():
            evaluated = model(x).clone()
        loss = loss_of(model, x)
    loss.backward()
    return [evaluated, loss, *(p.grad for p in model.parameters() if p.requires_grad)]


@ALL_KEEPING
@pytest.mark.parametrize("no_autograd", [torch.no_grad, torch.inference_mode])
@EVERY_MODEL
@pytest.mark.parametrize("warm", [False, True], ids=["", "warm"])
def test_training_after_evaluation_in_one_region_has_stocks_bits(
    name: str, cache: str, no_autograd: Callable[[], Any], warm: bool
) -> None:
    run = functools.partial(trained_after_evaluation, name=name, no_autograd=no_autograd, warm=warm)
    assert_same(run(region_of(cache)), run(stock))


@EVERY_MODEL
def test_each_step_has_another_loss(name: str) -> None:
    """Otherwise the tests above would not notice old casts."""
    losses = [seen.item() for seen in trained(stock, name, torch.bfloat16, False, SGD) if seen.dim() == 0]
    assert len(losses) == 6
    assert len(set(losses[::2])) == 3


@ALL_MODES
def test_a_weight_used_without_a_gradient_first_and_after_its_views_later(cache: str) -> None:
    """The position of its gradient in the sum is that of its first use in the region."""
    wide, narrow = torch.linspace(-1, 1, 128).view(8, 16), torch.linspace(-1, 1, 128).view(8, 16).bfloat16()

    def gradients(region: Region) -> list[torch.Tensor]:
        torch.manual_seed(0)
        w, seen = nn.Parameter(torch.randn(16, 16)), []
        for _ in range(2):
            with region():
                with torch.no_grad():
                    wide @ w
                views = (narrow @ w[:, :3]).float().pow(2).sum() / 7 + (w.t() @ narrow.t()).float().exp().sum() / 31
                loss = views + (wide @ w).float().pow(2).sum() + (narrow @ w[:, :3]).float().pow(2).sum()
                loss.backward()
            assert w.grad is not None
            seen.append(w.grad.clone())
        return seen

    assert_same(
        gradients(functools.partial(ours, cache=cache)),
        gradients(functools.partial(stock, cache_enabled=cache != "none")),
    )


# --- counts: (of weights, of activations) in a forward; a mode with nothing to reuse would make those of "none"

COUNTS: dict[tuple[str, str], tuple[int, int]] = {
    # 3 weights, 3 biases; the input
    ("mlp", "none"): (6, 1),
    ("mlp", "weights"): (6, 1),
    ("mlp", "all"): (6, 1),
    # 7 weights, 3 biases; y for q, k and v, z for gate and up
    ("qkv", "none"): (10, 5),
    ("qkv", "weights"): (10, 5),
    ("qkv", "all"): (10, 2),
    # the weight twice and its transpose, two biases
    ("tied", "none"): (5, 1),
    ("tied", "weights"): (4, 1),
    ("tied", "persistent"): (4, 1),
    ("tied", "all"): (4, 1),
    # each of 6 twice; x for the trunk and the adapter
    ("frozen", "none"): (12, 2),
    ("frozen", "weights"): (8, 2),  # stock casts the frozen weight and bias at each use
    ("frozen", "persistent"): (6, 2),
    ("frozen", "all"): (6, 1),
    ("half precision", "none"): (4, 1),
    ("half precision", "weights"): (4, 1),  # stock casts weights in half precision at each use
    ("half precision", "persistent"): (2, 1),
    ("half precision", "all"): (2, 1),
    # 5 views, two of them alike, twice; x for q, k and v, and again, when it has become a float32 sum
    ("chunks", "none"): (10, 6),
    ("chunks", "weights"): (10, 6),  # stock casts views at each use
    ("chunks", "persistent"): (10, 6),
    ("chunks", "all"): (10, 2),
}


@pytest.mark.parametrize(("name", "cache"), COUNTS, ids=lambda value: value)
def test_casts_of_a_forward(name: str, cache: str) -> None:
    model, x = made(name)

    def forward() -> None:
        with ours(cache=cache):
            model(x)

    casts = count_casts(forward, model.parameters())
    assert (casts["weights"], casts["activations"]) == COUNTS[name, cache]


#: Casts of views of weights (a transpose, query, key and value of one matrix), which are made at each use.
VIEWS_OF_WEIGHTS = {"tied": 1, "chunks": 10, "parts first": 2, "attention": 12, "encoder": 6}


@EVERY_MODEL
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_persistent_casts_no_weight_from_the_second_forward_on(name: str, grad: bool) -> None:
    model, x = made(name)
    model.train(grad)  # the encoder's fast path works on packed weights

    def forward(cache: str = "persistent") -> None:
        with ours(cache=cache), torch.set_grad_enabled(grad):
            loss = loss_of(model, x)
        if grad:
            loss.backward()

    first = count_casts(forward, model.parameters())["weights"]
    assert first == count_casts(functools.partial(forward, "all"), model.parameters())["weights"]
    later = [count_casts(forward, model.parameters())["weights"] for _ in range(2)]
    assert (first > 0, later) == (True, 2 * [VIEWS_OF_WEIGHTS.get(name, 0)])


@EVERY_MODEL
@ALL_KEEPING
def test_no_mode_makes_more_casts_than_stock_or_than_none(name: str, cache: str) -> None:
    def casts(region: Region) -> list[int]:
        model, x = made(name)

        def step() -> None:
            with region():
                loss = loss_of(model, x)
            loss.backward()

        counted = count_casts(step, model.parameters())
        return [counted[kind] for kind in ("weights", "activations", "gradients")]

    found = casts(region_of(cache))
    for region in (stock, region_of("none")):
        assert all(mine <= theirs for mine, theirs in zip(found, casts(region), strict=True))


# --- checkpointing


@ALL_KEEPING
@EVERY_MODEL
@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(name: str, cache: str, use_reentrant: bool, inside: bool) -> None:
    run = functools.partial(checkpointed, name=name, inside=inside, use_reentrant=use_reentrant)
    assert_same(run(region_of(cache)), run(stock))


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
