"""Threads that serve weights on a device while another trains them, and backwards of several threads at once.

The training thread makes the casts again in place. The autograd engine has one thread for all backwards of the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.threads_at_once import CountedDown, at_once

pytestmark = pytest.mark.usefixtures("nothing_persists", "stale_casts_on_purpose")  # a cast of what is being written

ROUNDS = [30, pytest.param(200, marks=pytest.mark.slow)]
persistent = functools.partial(tp.my_autocast, "cuda", torch.bfloat16, cache="persistent")


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_no_thread_gets_a_cast_from_before_a_step(fused: bool, rounds: int) -> None:
    weights = CountedDown("cuda")
    optimizer = torch.optim.SGD(weights.weights, lr=1.0, fused=fused, foreach=not fused)

    def train() -> None:
        weights.use(persistent)  # so that the step makes the casts again in place
        weights.give_gradients()
        with weights.writing():
            optimizer.step()
        torch.cuda.synchronize()

    actions: dict[str, Callable[[], object]] = {
        "train": train,
        "serve": functools.partial(weights.use, persistent),
        "serve too": functools.partial(weights.use, persistent),
        "backward": functools.partial(weights.use, persistent, backward=True),
        "default cache": functools.partial(weights.use, functools.partial(persistent, cache="weights"), backward=True),
        "clear": tp.clear_cache,
    }
    ran = at_once(actions, "train", rounds)
    assert ran["train"] == weights.done == rounds
    weights.use(persistent)


@pytest.mark.parametrize("cache", ["weights", "all", "persistent"])
def test_models_that_train_at_once(cache: str) -> None:
    """Their backwards, with the recomputation of a checkpoint, share the engine's thread."""

    def training() -> Callable[[], tuple[torch.Tensor, ...]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(4, 8).cuda()

        def step() -> tuple[torch.Tensor, ...]:
            with tp.my_autocast("cuda", torch.bfloat16, cache=cache):
                loss = checkpoint(model, x, use_reentrant=False).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return tuple(parameter.detach().clone() for parameter in model.parameters())

        return step

    steps = 8
    alone = training()
    expected = [alone() for _ in range(steps)]
    trainings = [training() for _ in range(4)]
    results: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in trainings]

    def train(index: int) -> None:
        if len(results[index]) < steps:
            results[index].append(trainings[index]())

    actions: dict[str, Callable[[], object]] = {
        f"train {index}": functools.partial(train, index) for index in range(len(trainings))
    }
    actions["clear"] = tp.clear_cache
    at_once(actions, "train 0", steps)
    for index, result in enumerate(results):
        while len(result) < steps:
            train(index)
        assert_same(result, expected, "a model that trains beside others")
