"""Threads that serve weights on a device while another trains them, and backwards of several threads at once.

The training thread makes the casts again in place. The autograd engine has one thread for all backwards of the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import torch_promote as tp
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
