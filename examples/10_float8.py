"""Trains a model of yours in float8 where it bears it: tune finds the layers.

Run: python examples/10_float8.py
"""

import torch
from torch import nn

import torch_promote as tp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
with torch.no_grad():
    model[2].weight[:, 3] = 1e5  # an outlier in each row: with the scale that it needs, float8 rounds the others to 0
    model[0].weight[3], model[0].bias[3] = 0, -1  # its input is 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(16)]


def outputs(number: int) -> torch.Tensor:  # what tune compares, with your own region
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(data[number][0])


speed = {"level": "module", "direction": "speed", "formats": ("lower", "float8")}
tuning = tp.tune(outputs, model=model, tolerance=0.1, batches=4, **speed)  # other batches verify the result
print(f"in float8: {', '.join(tuning.found)}, {tuning.gain['float8_share']:.0%} of the FLOPs; met: {tuning.met}")
for site in tuning.comparison.sites:
    print(f"{site.op} in {site.module}: local error {site.local:.1e} {site.misfit}")
policy = tuning.policy  # tuning.save("mine.toml") keeps it for other programs: policy="mine.toml"
for inputs, labels in data[:3]:
    with tp.my_autocast("cpu", torch.bfloat16, policy=policy, model=model):  # on a GPU: "cuda", and torch.compile
        loss = nn.functional.cross_entropy(model(inputs).float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"last loss {loss:.4f}")
