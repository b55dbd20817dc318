"""Compares every op of a training step with the reference, and bit for bit with stock autocast; shows a mismatch.

Run: python examples/05_crosscheck.py
"""

import torch
from torch import nn

import torch_promote as tp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
x, target = torch.randn(32, 8), torch.randint(4, (32,))


def step() -> None:
    with tp.my_autocast("cpu"):
        loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


with tp.crosscheck(level="bits") as report:
    step()
print(report)
report.raise_for_mismatches()

# The same as an assertion in the middle of a program. To provoke a mismatch, replace a kernel by one that returns
# another dtype.
library = torch.library.Library("aten", "IMPL")
library.impl("sinh", lambda a: a.double().exp(), "CPU")
try:
    with tp.crosscheck(raise_on_mismatch=True):
        torch.sinh(x)
except tp.errors.CrosscheckError as error:
    print("\nCrosscheckError:", error)
