"""A program whose losses look right in float16, although an op overflows: what `find-nan` and `tune` are for.

torch-promote find-nan examples/overflow.py
torch-promote tune examples/overflow.py:make --tolerance 1e-3 -o mine.toml
torch-promote run --policy mine.toml examples/overflow.py

It does not know torch_promote. `make` returns the model and the step, for `torch-promote compare` and `tune`.
"""

from collections.abc import Callable

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, 4 * width), RMSNorm(4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


class Model(nn.Module):
    def __init__(self, symbols: int = 100, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(symbols, width), nn.Linear(width, symbols)
        self.blocks = nn.Sequential(Block(width), Block(width), Block(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def make() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(200)  # results above 256 in float16: their squares exceed 65504, and are inf
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randint(100, (40, 8, 17))

    def step(number: int) -> torch.Tensor:
        inputs, labels = data[number, :, :-1], data[number, :, 1:]
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


if __name__ == "__main__":
    _, step = make()
    for number in range(3):
        print(f"step {number}: loss {step(number):.4f}")
