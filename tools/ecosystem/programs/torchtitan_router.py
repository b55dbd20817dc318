"""Trains torchtitan's router of experts, which opens a float32 region, inside of a bfloat16 region."""

from functools import partial

import torch
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        init = {"weight": partial(nn.init.trunc_normal_, std=0.1)}
        gate = Linear.Config(in_features=64, out_features=4, param_init=init)
        self.router = TokenChoiceTopKRouter.Config(num_experts=4, gate=gate, top_k=2, score_func="softmax").build()
        self.router.init_states(buffer_device=torch.device("cpu"))
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, hidden):
        scores, experts, _ = self.router(hidden)
        every = torch.stack([expert(hidden) for expert in self.experts], dim=-2)
        chosen = every.gather(-2, experts.unsqueeze(-1).expand(*experts.shape, 64))
        return self.head((scores.unsqueeze(-1) * chosen).sum(-2))


torch.manual_seed(0)
model = Experts()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(20):
    hidden, targets = torch.randn(4, 8, 64), torch.randint(0, 8, (4, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(hidden).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
torch.save({"losses": losses, "weights": model.state_dict()}, "result.pt")
