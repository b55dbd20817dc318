"""Random programs over one weight, in every cache mode: at every step the gradients have stock's bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_cast_cache_gradients import STEPS, Step, add_cast, backward, use_under_no_grad, weight

from helpers.casts import Region, ours, stock
from helpers.support import assert_same

pytestmark = pytest.mark.usefixtures("nothing_persists")

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.bfloat16).view(8, 16)


def add_view(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    losses.append(torch.mm(X, w[:, :3]).float().pow(2).sum() / 7)


def add_transposed(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    losses.append(torch.mm(w.t(), X.t()).float().exp().sum() / 31)


def use_in_inference_mode(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    with torch.inference_mode():
        torch.mm(X, w)


def use_frozen(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    w.requires_grad_(False)
    torch.mm(X, w)
    w.requires_grad_(True)


OF_VIEWS: list[Step] = [*STEPS, add_view, add_transposed]


def gradients_after(regions: list[list[Step]], region: Region) -> list[torch.Tensor]:
    torch.manual_seed(0)
    w, kept, gradients = weight(), [], []  # type: ignore[var-annotated]
    for steps in regions:
        losses: list[torch.Tensor] = []
        with region():
            for step in [*steps, backward]:
                step(w, region, losses, kept)
                if w.grad is not None:
                    gradients.append(w.grad.clone())
    return gradients


def check_random_programs(steps: list[Step], cache: str, programs: int) -> None:
    def region(**arguments: Any) -> Any:
        return ours(**arguments) if "cache_enabled" in arguments else ours(cache=cache, **arguments)

    compared = 0
    for seed in range(programs):
        draw = random.Random(seed)
        regions = [draw.choices(steps, k=draw.randint(2, 8)) for _ in range(3)]
        expected = gradients_after(regions, stock)
        names = [[step.__name__ for step in steps] for steps in regions]
        assert_same(gradients_after(regions, region), expected, f"program {seed}: {names}")
        compared += len(expected)
    assert compared > programs


MODES = pytest.mark.parametrize("cache", ["weights", "persistent", "all"])


@MODES
def test_random_programs(cache: str) -> None:
    check_random_programs(OF_VIEWS, cache, 100)


@MODES
@pytest.mark.parametrize("step", [use_in_inference_mode, use_frozen], ids=lambda step: step.__name__)
def test_random_programs_with_uses_that_stock_has_no_cast_for(step: Step, cache: str) -> None:
    check_random_programs([*OF_VIEWS, step, step], cache, 60)


@MODES
def test_a_weight_used_without_a_gradient_first_and_after_its_views_later(cache: str) -> None:
    """The place of its gradient in the sum is that of its first use in the region."""
    regions = [[add_cast], [use_under_no_grad, add_view, add_transposed, add_cast, add_view]]
    assert_same(gradients_after(regions, lambda **a: ours(cache=cache, **a)), gradients_after(regions, stock))
