"""Training in every cache mode: losses, gradients and weights after several steps have stock's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from helpers.casts import Region
from helpers.comparison import assert_same
from helpers.models import EVERY_MODEL, MODELS, loss_of, made, trained

pytestmark = pytest.mark.usefixtures("nothing_persists")

MODES = ("weights", "persistent", "all", "none")
ALL_MODES = pytest.mark.parametrize("cache", MODES)
DTYPES = (torch.float16, torch.bfloat16)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.05, foreach=True),
    "fused SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "fused AdamW": functools.partial(torch.optim.AdamW, lr=0.05, fused=True),
}


def stock(cache: str) -> Region:
    """Stock's region for a mode: without its cache, each use of a weight has its own gradient."""
    return functools.partial(tp.stock_autocast, "cuda", cache_enabled=cache != "none")


def ours(cache: str) -> Region:
    return functools.partial(tp.my_autocast, "cuda", cache=cache)


def on_cuda(name: str) -> tuple[nn.Module, Tensor]:
    model, x = made(name)
    return model.cuda(), x.cuda()


def check(name: str, cache: str, dtype: torch.dtype, inside: bool, optimizer: str) -> None:
    # Fused optimizers are for float32.
    optimizer = optimizer.removeprefix("fused ") if name == "half precision" else optimizer
    given = name, dtype, inside, OPTIMIZERS[optimizer], "cuda"
    expected = trained(stock(cache), *given)
    assert len({tensor.item() for tensor in expected if tensor.dim() == 0}) > 3, "a step changes the loss"
    assert_same(trained(ours(cache), *given), expected)


@ALL_MODES
@EVERY_MODEL
def test_training(name: str, cache: str) -> None:
    """Each model and mode once, with alternating dtypes and optimizers."""
    number = list(MODELS).index(name) + MODES.index(cache)
    check(name, cache, DTYPES[number % 2], bool(number // 2 % 2), list(OPTIMIZERS)[number % 4])


# --- GradScaler


def scaled(region: Region, optimizer: str) -> list[Any]:
    """Steps with a scaled loss; one of them is skipped, because a gradient is infinite."""
    model, x = on_cuda("mlp")
    made_optimizer = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        with region(dtype=torch.float16):
            loss = loss_of(model, x)
        scaler.scale(loss).backward()
        if step == 2:
            next(model.parameters()).grad.view(-1)[3] = float("inf")
        if step % 2:
            scaler.unscale_(made_optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(made_optimizer)
        scaler.update()
        made_optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
    return [loss.detach(), *(p.detach() for p in model.parameters())]


@ALL_MODES
@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW"])
def test_grad_scaler(optimizer: str, cache: str) -> None:
    assert_same(scaled(ours(cache), optimizer), scaled(stock(cache), optimizer))
