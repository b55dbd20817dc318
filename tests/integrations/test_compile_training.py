"""Compiled training steps: the losses, gradients and parameters of stock's compiled steps, and of eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from helpers.comparison import assert_same
from helpers.program_comparison import Region, assert_like_stock, grads, stock, values

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Decoder(nn.Module):
    """One block of causal attention, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.qkv, self.project = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        query, key, value = (
            part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return self.head(x + self.mlp(self.norms[1](x)))


Step = Callable[[Region, nn.Module, torch.Tensor], torch.Tensor]


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def region_inside(compile_: Callable[..., Any], region: Region) -> Step:
    """The step is compiled with the region in it."""

    @compile_
    def step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with region():
            return next_token_loss(model, tokens)

    return lambda _, model, tokens: step(model, tokens)


def region_around(compile_: Callable[..., Any], region: Region) -> Step:
    """The compiled step is called in the region."""
    compiled = compile_(next_token_loss)

    def step(region: Region, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with region():
            return compiled(model, tokens)

    return step


def region_around_compiled_model(compile_: Callable[..., Any], region: Region) -> Step:
    """The model alone is compiled, the loss is not."""
    compiled: dict[nn.Module, Any] = {}

    def step(region: Region, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with region():
            return next_token_loss(compiled.setdefault(model, compile_(model)), tokens)

    return step


def train(region: Region, make_step: Callable[..., Step], compile_: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, seen = make_step(compile_, region), []
    for _ in range(3):
        loss = step(region, model, torch.randint(0, 11, (2, 7)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append((loss, grads(model)))
    return seen, values(model.parameters())


def compiler(backend: str) -> Callable[..., Any]:
    return lambda function: torch.compile(function, backend=backend, fullgraph=True)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize("make_step", [region_inside, region_around, region_around_compiled_model])
def test_compiled_training(make_step: Callable[..., Step]) -> None:
    compiled = assert_like_stock(
        lambda region: train(region, make_step, compiler("aot_eager")), casts=make_step is region_around
    )
    expected = train(stock, make_step, eager)
    assert_same(train(stock, make_step, compiler("aot_eager")), expected, what="stock compiled against eager")
    assert_same(compiled, expected, what="compiled against eager")
