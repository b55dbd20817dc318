"""Uses of a model that hold casts in different ways, and models that consist of weights, to compare memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.casts import Region
from helpers.models import MODELS, loss_of, made

#: Takes a maker of regions, a model and its input.
Use = Callable[[Region, nn.Module, Tensor], Any]


def train(region: Region, model: nn.Module, x: Tensor, inside: bool = False) -> None:
    for _ in range(2):
        with region():
            loss = loss_of(model, x)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    model.zero_grad(set_to_none=True)


def checkpointed(region: Region, model: nn.Module, x: Tensor, reentrant: bool, inside: bool = False) -> None:
    with region():
        y = checkpoint(model, x.detach().requires_grad_(), use_reentrant=reentrant)
        loss = checkpoint(model, y.float().reshape(-1)[: x.numel()].view_as(x), use_reentrant=reentrant)
        loss = loss.float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    model.zero_grad(set_to_none=True)


def evaluate(region: Region, model: nn.Module, x: Tensor, no_autograd: Any = torch.no_grad) -> None:
    with region(), no_autograd():
        for _ in range(3):
            model(x)


def with_frozen(region: Region, model: nn.Module, x: Tensor, every: int) -> None:
    """Trains on the input, with every nth parameter frozen."""
    for parameter in list(model.parameters())[::every]:
        parameter.requires_grad_(False)
    train(region, model, x.detach().requires_grad_())


USES: dict[str, Use] = {
    "train": train,
    "train, backward inside": functools.partial(train, inside=True),
    "checkpoint": functools.partial(checkpointed, reentrant=False),
    "checkpoint, backward inside": functools.partial(checkpointed, reentrant=False, inside=True),
    "reentrant checkpoint": functools.partial(checkpointed, reentrant=True),
    "reentrant checkpoint, backward inside": functools.partial(checkpointed, reentrant=True, inside=True),
    "no_grad": evaluate,
    "inference_mode": functools.partial(evaluate, no_autograd=torch.inference_mode),
    "frozen": functools.partial(with_frozen, every=1),
    "partly frozen": functools.partial(with_frozen, every=2),
}


class Slices(nn.Module):
    """Slices of every length of one parameter, as in a decoder's positions or a growing vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for length in range(1, 65):
            y = x @ self.weight[:length].t()
        return torch.tanh(y)


class Shared(nn.Module):
    """One weight in all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(16):
            x = torch.tanh(nn.functional.linear(x, self.weight))
        return x


#: Models whose weights are large compared with their activations.
LARGE: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(*(part for _ in range(16) for part in (nn.Linear(64, 64), nn.Tanh()))),
    "slices": Slices,
    "shared": Shared,
}
NAMES = [*LARGE, *MODELS]


def model_and_input(name: str, device: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = (LARGE[name](), torch.randn(4, 64)) if name in LARGE else made(name)
    return model.to(device), x.to(device)
