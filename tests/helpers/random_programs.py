"""Random programs that use one weight in many ways, on any device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.casts import Region
from helpers.comparison import assert_same

__all__ = [
    "OF_VIEWS",
    "STEPS",
    "Step",
    "add_cast",
    "add_transposed",
    "add_view",
    "check_random_programs",
    "gradients_after",
    "use_frozen",
    "use_in_inference_mode",
    "use_under_no_grad",
]

_WIDE = torch.linspace(-1, 1, 8 * 16).view(8, 16)
_NARROW = _WIDE.bfloat16()


def product(w: torch.Tensor) -> torch.Tensor:
    return (_WIDE.to(w.device) @ w).float().pow(2).sum()


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
        product(w)


def use_and_drop(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    product(w)


def use_and_keep(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    kept.append(product(w))


def backward(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    if losses:
        torch.stack(losses).sum().backward()
        losses.clear()


def add_view(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    losses.append(torch.mm(_NARROW.to(w.device), w[:, :3]).float().pow(2).sum() / 7)


def add_transposed(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    losses.append(torch.mm(w.t(), _NARROW.to(w.device).t()).float().exp().sum() / 31)


def use_in_inference_mode(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    with torch.inference_mode():
        torch.mm(_NARROW.to(w.device), w)


def use_frozen(w: Any, region: Region, losses: list[torch.Tensor], kept: list[Any]) -> None:
    w.requires_grad_(False)
    torch.mm(_NARROW.to(w.device), w)
    w.requires_grad_(True)


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
OF_VIEWS: list[Step] = [*STEPS, add_view, add_transposed]


# --- programs


def gradients_after(regions: list[list[Step]], region: Region, device: str = "cpu") -> list[torch.Tensor]:
    """Runs each list of steps in its own region; returns the weight's gradient after each step."""
    torch.manual_seed(0)
    w, kept, gradients = nn.Parameter(torch.randn(16, 16, device=device)), [], []  # type: ignore[var-annotated]
    for steps in regions:
        losses: list[torch.Tensor] = []
        with region():
            for step in [*steps, backward]:
                step(w, region, losses, kept)
                if w.grad is not None:
                    gradients.append(w.grad.clone())
    return gradients


def check_random_programs(stock: Region, ours: Region, steps: list[Step], programs: int, device: str = "cpu") -> None:
    """Compares the gradients of random programs of three regions each."""
    compared = 0
    for seed in range(programs):
        draw = random.Random(seed)
        regions = [draw.choices(steps, k=draw.randint(2, 8)) for _ in range(3)]
        expected = gradients_after(regions, stock, device)
        names = [[step.__name__ for step in steps] for steps in regions]
        assert_same(gradients_after(regions, ours, device), expected, f"program {seed}: {names}")
        compared += len(expected)
    assert compared > programs
