"""Trains in two processes that Accelerate forks from this one."""

import torch
from accelerate import Accelerator, debug_launcher
from accelerate.utils import set_seed
from torch import nn


def train():
    set_seed(0)
    accelerator = Accelerator(mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(torch.randn(16, 32)), torch.randint(0, 8, (16,)))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    weights = accelerator.unwrap_model(model).state_dict()
    torch.save({"losses": losses, "weights": weights}, f"rank{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    debug_launcher(train, num_processes=2)
