"""Training in several processes, with DistributedDataParallel or FSDP2 (`fully_shard`), over gloo.

Run: torchrun --nproc-per-node 2 examples/04_distributed.py --strategy ddp
     torchrun --nproc-per-node 2 examples/04_distributed.py --strategy fsdp2
"""

import argparse
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_promote as tp


def make_model(strategy: str) -> nn.Module:
    torch.manual_seed(0)  # the same weights in each process
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    if strategy == "ddp":
        return DistributedDataParallel(model)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def train(strategy: str, steps: int) -> None:
    model = make_model(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())  # other data in each process
    inputs, labels = torch.randn(128, 16), torch.randint(0, 4, (128,))
    for step in range(steps):
        with tp.my_autocast("cpu"):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {mean.item() / dist.get_world_size():.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(arguments.strategy, arguments.steps)
    # Reference cycles of the deleted model still hold the process group, whose threads have to end before Python does.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
