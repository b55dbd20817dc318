"""A step of training in float16: the loss looks right, and an op overflows. README.md shows what to do about it."""

from collections import OrderedDict

import torch
from torch import nn


class RMSNorm(nn.Module):
    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True).sqrt()


def make():
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(up=nn.Linear(64, 256), norm=RMSNorm(), head=nn.Linear(256, 10)))

    def step():
        pixels, labels = 255 * torch.rand(32, 64), torch.randint(10, (32,))
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(pixels), labels)
        loss.backward()
        return loss

    return model, step


if __name__ == "__main__":
    model, step = make()
    print(f"loss {step():.4f}")
