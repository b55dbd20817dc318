"""Trains in float16: the losses look right, and an op overflows. README.md shows what to do about it."""

from collections import OrderedDict

import torch
from torch import nn


class RMSNorm(nn.Module):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 256), RMSNorm(), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)).relu())


def make():
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block(), Block())
    model = nn.Sequential(OrderedDict(embedding=nn.Embedding(100, 64), blocks=blocks, head=nn.Linear(64, 100)))
    blocks[1].up.weight.data.mul_(200)  # its results exceed 256, and their squares float16's largest number, 65504
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number):
        inputs, labels = torch.randint(100, (2, 8, 16), generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


if __name__ == "__main__":
    model, step = make()
    for number in range(3):
        print(f"step {number}: loss {step(number):.4f}")
