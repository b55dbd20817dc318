"""A small model on a CUDA device, its training step, and how its casts are launched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cuda_stand_in
import torch_promote as tp

__all__ = ["BESIDE", "LAYERS", "Layers", "batch", "casts_of", "forward", "layers", "ours", "step", "stock", "trained"]

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16)
stock = functools.partial(tp.stock_autocast, "cuda", dtype=torch.bfloat16)
LAYERS = 6
# Casts in a forward beside those of the weights: the input's, the loss's.
BESIDE = 2


class Layers(nn.Module):
    def __init__(self, count: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))

    def forward(self, x: Tensor, skip: frozenset[int] = frozenset()) -> Tensor:
        for at, layer in enumerate(self.layers):
            if at not in skip:
                x = torch.tanh(layer(x))
        return x


def layers() -> Layers:
    torch.manual_seed(0)
    return Layers().cuda()


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32, device="cuda").view(4, 8)


def casts_of(action: Callable[[], Any]) -> tuple[int, int]:
    """The number of casts from float32 that an action launches separately, and together with others."""
    with cuda_stand_in.counting() as counts:
        action()
    return counts.kernels["aten::copy_"], counts.kernels["aten::_foreach_copy_"]


def forward(region: Callable[..., Any], model: nn.Module, **options: Any) -> Tensor:
    with region():
        return model(batch().bfloat16(), **options).float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, region: Callable[..., Any] = ours) -> Tensor:
    loss = forward(region, model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def trained() -> tuple[Layers, torch.optim.Optimizer]:
    """A model after its first step."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer
