"""A block whose ops have several policies, and a training step that checkpoints it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp

OVERRIDES = {"linear": torch.float16, "softmax": "fp32"}
OTHERS = {"linear": "fp32", "gelu": "fp32"}
KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])

Run = Callable[..., Any]
Region = Callable[[], Any]


def ours(overrides: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return tp.my_autocast("cpu", overrides=overrides, **arguments)


class Block(nn.Module):
    """Ops of several policies, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        #: The dtypes of each call.
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        scores = torch.softmax(torch.dropout(hidden, 0.2, True), -1)
        self.seen.append((hidden.dtype, scores.dtype))
        return self.second(scores)


def train(
    run: Run,
    around: Region | None = None,
    around_backward: Region = contextlib.nullcontext,
    model: nn.Module | None = None,
) -> list[torch.Tensor | None]:
    """Returns the output and all gradients of `run(model, x)`, called in one region and its backward in another.

    Where no region is given, the call is in one with OVERRIDES and the backward in none.
    """
    torch.manual_seed(0)
    model = Block() if model is None else model
    x = torch.randn(4, 8, requires_grad=True)
    with ours(OVERRIDES) if around is None else around():
        output = run(model, x)
    with around_backward():
        output.float().square().sum().backward()
    return [output, x.grad, *(parameter.grad for parameter in model.parameters())]


def plainly(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x)
