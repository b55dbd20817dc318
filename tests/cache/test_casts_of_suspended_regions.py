"""Casts of regions held across steps of a coroutine or generator are suspended and resumed with the regions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import BIG, CastCount, Region, X, entries, ours, resident_bytes, stock, weight
from helpers.comparison import assert_same
from helpers.probes import in_thread


def gradient_of(outputs: list[torch.Tensor], w: torch.Tensor) -> torch.Tensor:
    total = sum((output.float() * (index + 0.37)).square().mean() for index, output in enumerate(outputs))
    return torch.autograd.grad(total, w)[0]


def resume_in_another_thread(steps: Iterator[Any]) -> Any:
    return in_thread(lambda: next(steps, None))


# --- tasks


async def others_enter_regions(region: Region) -> None:
    for _ in range(3):
        with region():
            X @ weight()
        await asyncio.sleep(0)


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
def test_a_decorated_coroutine_casts_a_weight_once(cache: str) -> None:
    w = weight()

    @ours(cache=cache)
    async def held() -> list[Any]:
        outputs = []
        for _ in range(4):
            outputs.append(X @ w)
            await asyncio.sleep(0)
            outputs.append(X @ w)
        return outputs

    async def main() -> list[Any]:
        outputs, _ = await asyncio.gather(held(), others_enter_regions(ours))
        return outputs

    outputs = asyncio.run(main())
    with stock():
        of_stock = [X @ w for _ in range(8)]
    assert_same([*outputs, gradient_of(outputs, w)], [*of_stock, gradient_of(of_stock, w)])
    assert entries() == 0


# --- generators, step by step


@ours()
def products(w: Any, times: int) -> Iterator[Any]:
    for _ in range(times):
        yield X @ w


def test_suspended_casts_are_not_visible_to_other_code() -> None:
    w = weight()
    steps = products(w, 3)
    next(steps)
    assert entries() == 0
    with ours(), CastCount(of=w) as count:
        X @ w
    assert count.casts == 1
    with CastCount(of=w) as count:
        next(steps)
    assert count.casts == 0
    assert list(steps) != []
    assert entries() == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda w: torch.no_grad()(w.mul_)(3),
        lambda w: (w.data.mul_(3), torch.clear_autocast_cache()),
        lambda w: (w.data.mul_(3), tp.clear_cache()),
    ],
    ids=["in place", "torch.clear_autocast_cache", "clear_cache"],
)
def test_weights_changed_between_steps_are_cast_again(change: Callable[[Any], Any]) -> None:
    w = weight()
    steps = products(w, 2)
    next(steps)
    change(w)
    assert torch.equal(next(steps), X.bfloat16() @ w.detach().bfloat16())


@pytest.mark.parametrize("end", ["close", "del", "exhausted", "thrown into"])
def test_the_memory_ends_with_the_regions(end: str) -> None:
    w = nn.Parameter(torch.zeros(BIG, BIG))

    @ours()
    def body() -> Iterator[None]:
        torch.ones(1, BIG) @ w
        yield
        torch.ones(1, BIG) @ w

    steps = body()
    next(steps)
    before = resident_bytes()
    if end == "close":
        steps.close()
    elif end == "exhausted":
        assert list(steps) == []
    elif end == "thrown into":
        with pytest.raises(ValueError, match="thrown"):
            steps.throw(ValueError("thrown"))
    del steps
    assert before - resident_bytes() > BIG * BIG


def test_another_thread_may_go_on() -> None:
    w = weight()
    steps = products(w, 4)
    outputs = [next(steps), resume_in_another_thread(steps), next(steps), resume_in_another_thread(steps)]
    assert len({output.grad_fn.next_functions[1][0] for output in outputs}) == 1
    assert resume_in_another_thread(steps) is None
    assert entries() == 0
