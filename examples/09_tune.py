"""Finds the op that overflows in a float16 model, and saves the smallest set of overrides that fixes it as a file.

Run: python examples/09_tune.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_promote as tp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 100 * self.inner(x).relu()
        return self.out(x / x.square().sum(-1, keepdim=True).sqrt())  # float16 is infinite above 65504


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(16, 32), torch.randint(4, (16,))) for _ in range(4)]


def step(number: int) -> torch.Tensor:  # a training step on batch `number`, with its own region
    inputs, labels = data[number]
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


comparison = tp.compare(step, model=model)  # compare and tune restore all state
for site in comparison.sites[:3]:
    print(f"{site.op} in {site.module or 'the model'}: local {site.local:.1e}, {site.nonfinite} overflow")

tuning = tp.tune(step, model=model, tolerance=1e-3, batches=2)  # data[2:] verifies the result
print("overrides", dict(tuning.overrides), "after", tuning.runs, "runs:", tuning.certificate.kind)

with tempfile.TemporaryDirectory() as folder:
    tuning.save(Path(folder) / "mine.toml")  # or "mine.html" for a report
    policy = tp.Policy.load(Path(folder) / "mine.toml")
with torch.no_grad():
    reference = nn.functional.cross_entropy(model(data[3][0]), data[3][1])
    with tp.my_autocast("cpu", torch.float16, policy=policy):
        loss = nn.functional.cross_entropy(model(data[3][0]), data[3][1])
print(f"with the file: {loss:.4f}, in float32: {reference:.4f}")
