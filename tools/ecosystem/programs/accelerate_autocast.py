"""A loss outside of the model in `accelerator.autocast()`, and a block in float32 inside of it."""

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, set_seed
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
        self.head = nn.Linear(256, 10)

    def forward(self, images):
        return self.head(self.body(images).flatten(1))


set_seed(0)
accelerator = Accelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=[AutocastKwargs(cache_enabled=False)])
model = Classifier()
projection = nn.Linear(10, 4)
optimizer = torch.optim.SGD([*model.parameters(), *projection.parameters()], lr=0.05, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)

losses = []
for _ in range(20):
    images, targets = torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))
    logits = model(images)
    with accelerator.autocast():
        scores = projection(logits)
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            penalty = (projection.weight @ projection.weight.t()).square().mean()
        loss = nn.functional.cross_entropy(scores, targets) + 0.01 * penalty
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())

model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
torch.save({"losses": losses, "model": model.state_dict(), "projection": projection.state_dict()}, "result.pt")
