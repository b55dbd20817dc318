"""Trains a small transformer with Accelerate."""

import argparse

import torch
from accelerate import Accelerator, debug_launcher
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="bf16")
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--forked", action="store_true", help="train in two processes that Accelerate forks")
args = parser.parse_args()


def train():
    set_seed(0)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        cpu=not args.forked,
    )
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 64),
        torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
        torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
        torch.nn.Linear(64, 100),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
    dataset = TensorDataset(torch.randint(0, 100, (256, 16)), torch.randint(0, 100, (256, 16)))
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses = []
    for (tokens, targets), _ in zip(loader, range(args.steps)):
        with accelerator.accumulate(model):
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())

    state = accelerator.get_state_dict(model)
    torch.save({"losses": losses, "weights": state}, f"rank{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    if args.forked:
        debug_launcher(train, num_processes=2)
    else:
        train()
