"""Trains a small transformer with Fabric."""

import argparse

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


def shard(model, device_mesh):
    fully_shard(model[1], mesh=device_mesh["data_parallel"])
    return fully_shard(model, mesh=device_mesh["data_parallel"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    strategy = args.strategy
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=strategy, precision="bf16-mixed")
    fabric.launch()

    seed_everything(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 64),
        torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0 if args.compile else 0.1, batch_first=True),
        torch.nn.Linear(64, 100),
    )
    if args.compile:
        model = torch.compile(model)
    dataset = TensorDataset(torch.randint(0, 100, (1024, 16)), torch.randint(0, 100, (1024, 16)))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8, shuffle=True))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))

    losses = []
    for step, (tokens, targets) in zip(range(args.steps * args.accumulate), loader):
        is_accumulating = (step + 1) % args.accumulate != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            with fabric.autocast():
                loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            fabric.backward(loss / args.accumulate)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())

    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    torch.save({"losses": losses, "weights": weights}, f"rank{fabric.global_rank}.pt")


if __name__ == "__main__":
    main()
