"""The state of a random training: its layers, its optimizer, and its results."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OPTIMIZERS", "SIZE", "Trained", "loss_of"]

SIZE = 8
BATCH = 4

OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    functools.partial(torch.optim.SGD, lr=0.05, foreach=False),
    functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    functools.partial(torch.optim.SGD, lr=0.05, fused=True),
    functools.partial(torch.optim.AdamW, lr=0.01, foreach=False),
    functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
)


class Trained:
    """The state of one program under one kind of region."""

    def __init__(self, draw: random.Random, region: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.draw = draw
        self.region = region
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=draw.random() < 0.3) for _ in range(6)).cuda()
        self.optimizer = draw.choice(OPTIMIZERS)(self.layers.parameters())
        self.x = torch.linspace(-1, 1, BATCH * SIZE, device="cuda").view(BATCH, SIZE)
        self.used: set[int] = set()
        self.graphs: list[tuple[Any, Tensor]] = []
        self.held: list[Any] = []
        self.seen: list[Tensor] = []

    def note(self, *tensors: Tensor | None) -> None:
        self.seen += [tensor.detach().clone() for tensor in tensors if tensor is not None]

    def layer(self, at: int) -> nn.Linear:
        layer: Any = self.layers[at]
        self.used.add(id(layer.weight))  # which layers may share
        return layer

    def some_layers(self) -> list[int]:
        """All in order, most in order, or some in any order."""
        kind = self.draw.random()
        if kind < 0.5:
            return list(range(len(self.layers)))
        if kind < 0.8:
            return [at for at in range(len(self.layers)) if self.draw.random() < 0.7]
        return self.draw.choices(range(len(self.layers)), k=self.draw.randint(1, 6))

    @contextlib.contextmanager
    def open(self, **options: Any) -> Iterator[None]:
        self.used.clear()
        with self.region(**options):
            yield
        self.used.clear()

    def options(self) -> dict[str, Any]:
        dtype = self.draw.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        return {"dtype": dtype, "choice": self.draw.random()}

    def forward(self, hidden: Tensor, layers: list[int], writes: bool = False) -> Tensor:
        for at in layers:
            if writes and self.draw.random() < 0.3:
                write_to_unused(self, at)
            use = self.draw.randrange(6)
            weight = self.layer(at).weight
            if use == 0:
                hidden = hidden @ weight[: SIZE // 2].t() @ weight[: SIZE // 2]
            elif use == 1:
                hidden = hidden @ weight.t()
            else:
                hidden = self.layer(at)(hidden)
            hidden = torch.tanh(hidden)
        return hidden


def write_to_unused(run: Trained, at: int) -> None:
    """In a region, to a weight that it has not used: as a layer does that masks or clips its weight."""
    kind = run.draw.randrange(6)
    weight: Any = run.layers[at].weight
    if id(weight) in run.used or (run.graphs and kind == 2):
        return
    with torch.no_grad():
        if kind == 0:
            weight.mul_(0.75)
        elif kind == 1:
            weight.data *= 0.75
        elif kind == 2:
            weight.data = weight * 0.75
        elif kind == 3:
            weight.data.clamp_(-0.2, 0.2)
        elif kind == 4:
            weight.detach().mul_(0.75)
        else:
            nn.init.constant_(weight, 0.03)


def loss_of(hidden: Tensor) -> Tensor:
    return hidden.float().square().mean()
