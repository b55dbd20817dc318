"""A training loop with `my_autocast` in place of `torch.autocast`. The losses are bit-identical.

Run: python examples/01_training_loop.py
"""

from contextlib import AbstractContextManager

import torch
from torch import nn

import torch_promote as tp


def train(region: AbstractContextManager, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = torch.randn(256, 16), torch.randint(0, 4, (256,))
    losses = []
    for _ in range(steps):
        with region:
            loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


stock = train(tp.stock_autocast("cpu"))
ours = train(tp.my_autocast("cpu"))
for step in range(0, len(ours), 5):
    print(f"step {step:2d}  torch.autocast {stock[step]:.6f}  my_autocast {ours[step]:.6f}")
print("the same losses, bit for bit:", ours == stock)
