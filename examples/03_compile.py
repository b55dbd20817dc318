"""Regions and torch.compile: regions around and inside a compiled function.

Run: python examples/03_compile.py
"""

import torch
from torch import nn

import torch_promote as tp

torch.manual_seed(0)
first, second = nn.Linear(8, 8), nn.Linear(8, 8)
x = torch.randn(4, 8)


@torch.compile(backend="aot_eager", fullgraph=True)
def called_in_regions(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(first(x))


@torch.compile(backend="aot_eager", fullgraph=True)
def with_a_region_inside(x: torch.Tensor) -> torch.Tensor:
    with tp.my_autocast("cpu"):
        hidden = first(x)
        with tp.my_autocast("cpu", enabled=False):
            hidden = torch.relu(hidden.float())
        return nn.functional.mse_loss(second(hidden), x)


print("outside of any region  ", called_in_regions(x).dtype)
with tp.my_autocast("cpu"):
    print("bfloat16               ", called_in_regions(x).dtype)
with tp.my_autocast("cpu", dtype=torch.float16):
    print("float16                ", called_in_regions(x).dtype)
with tp.my_autocast("cpu", overrides={"linear": "fp32"}):
    print("linear kept in float32 ", called_in_regions(x).dtype)

optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5)
for step in range(3):
    loss = with_a_region_inside(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.6f}")
