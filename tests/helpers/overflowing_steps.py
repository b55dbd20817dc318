"""A step that overflows in float16 where it multiplies, and needs one override."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["Scaled", "scaled"]


class Scaled(nn.Module):
    """Overflows in float16 where it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.linear(x) * 1e6 * 1e-6)).square().mean()


def scaled(dtype: torch.dtype = torch.float16) -> tuple[Scaled, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model = Scaled()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return model(torch.ones(2, 4) + 0.1 * torch.randn(2, 4))

    return model, step
