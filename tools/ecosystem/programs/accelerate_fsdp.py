"""Trains a small transformer with Accelerate's FSDP2 plugin."""

import argparse
from contextlib import nullcontext

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

parser = argparse.ArgumentParser()
parser.add_argument("--autocast", action="store_true", help="float32 parameters, and a region around the step")
args = parser.parse_args()

set_seed(0)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    mixed_precision_policy=MixedPrecisionPolicy() if args.autocast else None,
    state_dict_type="FULL_STATE_DICT",
)
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
# On the CPU Accelerate ignores the plugin and trains with DistributedDataParallel. Its code for FSDP2 works there.
plugin.set_mixed_precision("bf16")
accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = plugin
model = nn.Sequential(
    nn.Embedding(100, 64),
    nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
    nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
    nn.Linear(64, 100),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)

torch.manual_seed(accelerator.process_index)
losses = []
for _ in range(20):
    tokens, targets = torch.randint(0, 100, (8, 16)), torch.randint(0, 100, (8, 16))
    with accelerator.autocast() if args.autocast else nullcontext():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())

weights = {name: weight.to_local().detach() for name, weight in model.named_parameters()}
torch.save({"losses": losses, "weights": weights}, f"rank{accelerator.process_index}.pt")
accelerator.end_training()
