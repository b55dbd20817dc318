"""Trains a small transformer with DeepSpeed's `torch_autocast`."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": args.stage},
    "zero_allow_untested_optimizer": True,
    "torch_autocast": {"enabled": args.autocast, "dtype": "bfloat16"},
    "bf16": {"enabled": args.bf16},
    "steps_per_print": 1000,
}
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(32, 64),
    nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
    nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
    nn.Linear(64, 8),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

rank = torch.distributed.get_rank()
torch.manual_seed(rank)
losses = []
for _ in range(20):
    inputs, targets = torch.randn(4, 16, 32), torch.randint(0, 8, (4, 16))
    logits = engine(inputs.to(torch.bfloat16 if args.bf16 else torch.float32))
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    engine.backward(loss)
    engine.step()
    losses.append(loss.detach())

with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=args.stage == 3):
    weights = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
torch.save({"losses": losses, "weights": weights}, f"rank{rank}.pt")
