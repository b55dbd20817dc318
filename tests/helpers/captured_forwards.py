"""A small model on a CUDA device, its captured forward, and the casts that a replay makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cuda_stand_in
import torch_promote as tp

__all__ = ["LAYERS", "Captured", "Region", "casts_of", "layers", "ours", "stock"]

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16, cache="persistent")
stock = functools.partial(tp.stock_autocast, "cuda", dtype=torch.bfloat16)
LAYERS = 3

Region = Callable[..., Any]


def layers(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))).cuda().requires_grad_(not frozen)


class Captured:
    """A forward, captured after one that warms up."""

    def __init__(self, model: nn.Module, region: Region = ours, before: Callable[[], object] = lambda: None) -> None:
        self.x = torch.linspace(-1, 1, 32, device="cuda").view(4, 8).bfloat16()

        def forward() -> Tensor:
            before()
            with region(), torch.no_grad():
                return model(self.x)

        forward()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = forward()

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.result.clone()

    @property
    def known(self) -> Any:
        return self.graph._torch_promote_casts  # type: ignore[attr-defined]


def casts_of(run: Callable[[], Any]) -> tuple[int, int]:
    """The number of casts from float32 that an action makes, and the number of kernels."""
    with cuda_stand_in.counting() as counts:
        run()
    casts = [cast for cast in counts.casts if cast.source == "Float"]
    return len(casts), len({cast.launch for cast in casts})
