"""Random programs that use one weight in many ways: after every step the gradients have stock's bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.casts import Region, ours, stock
from helpers.comparison import assert_same

pytestmark = pytest.mark.usefixtures("nothing_persists")

WIDE = torch.linspace(-1, 1, 8 * 16).view(8, 16)
X = WIDE.bfloat16()


def weight() -> Any:
    return nn.Parameter(torch.randn(16, 16))


def product(w: torch.Tensor) -> torch.Tensor:
    return (WIDE @ w).float().pow(2).sum()


# --- steps of programs


def add_cast(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    losses.append(product(w))


def add_cast_without_cache(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    with region(cache_enabled=False):
        losses.append(product(w).sqrt())


def add_direct(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    losses.append((w * 1.1).pow(2).sum())


def add_direct_otherwise(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    losses.append((w.sin() * 0.7).sum())


def use_under_no_grad(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    with torch.no_grad():
        WIDE @ w


def use_and_drop(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    WIDE @ w


def use_and_keep(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    kept.append(WIDE @ w)


def backward(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    if losses:
        torch.stack(losses).sum().backward()
        losses.clear()


Step = Callable[[Any, Region, list[torch.Tensor], list[Any]], None]
STEPS: list[Step] = [
    add_cast,
    add_cast,
    add_cast_without_cache,
    add_direct,
    add_direct_otherwise,
    use_under_no_grad,
    use_and_drop,
    use_and_keep,
    backward,
]


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


def test_random_programs_of_one_region() -> None:
    compared = 0
    for seed in range(300):
        draw = random.Random(seed)
        steps = draw.choices(STEPS, k=draw.randint(3, 12))
        expected = gradients_after([steps], stock)
        assert_same(gradients_after([steps], ours), expected, f"program {seed}: {[step.__name__ for step in steps]}")
        compared += len(expected)
    assert compared > 500


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
