"""The code of each of two processes for test_processes.py: the same training under stock's regions and under ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from helpers.program_comparison import Region, ours, silenced, stock

#: "silenced" shows whether our wrappers make the casts.
REGIONS: dict[str, Region] = {"stock": stock, "ours": ours, "silenced": silenced}


class Network(nn.Module):
    """Two blocks and a head. The blocks can be checkpointed, and FSDP2 shards each of them."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x)


def data_parallel(model: Network) -> nn.Module:
    return DistributedDataParallel(model)


def data_parallel_with_small_buckets(model: Network) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1e-4, gradient_as_bucket_view=True, static_graph=True)


def data_parallel_with_compressed_gradients(model: Network) -> nn.Module:
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, fp16_compress_hook)
    return parallel


def sharded(model: Network) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


STRATEGIES: dict[str, tuple[Callable[[Network], nn.Module], bool]] = {
    "ddp": (data_parallel, False),
    "ddp, small buckets": (data_parallel_with_small_buckets, False),
    "ddp, compressed gradients": (data_parallel_with_compressed_gradients, False),
    "ddp, checkpointed": (data_parallel, True),
    "fsdp2": (sharded, False),
    "fsdp2, checkpointed": (sharded, True),
}


def train(region: Region, strategy: str) -> Any:
    torch.manual_seed(0)
    wrap, checkpointed = STRATEGIES[strategy]
    model = wrap(Network(checkpointed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    seen = []
    for step in range(4):
        x, label = torch.randn(5, 8), torch.randint(0, 3, (5,))
        with region(dtype=torch.float16 if step == 2 else torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), label)
        loss.backward()
        seen.append((loss.detach(), [local(parameter.grad) for parameter in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return seen, [local(parameter) for parameter in model.parameters()]


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of this process's part of a tensor."""
    if tensor is None:
        return None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def training(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    """Returns the results of each strategy under each kind of region."""
    # A checkpoint's recomputation must equal its forward, with and without overrides.
    return {
        (strategy, name): train(region, strategy)
        for strategy, (_, checkpointed) in STRATEGIES.items()
        for name, region in REGIONS.items()
        if name != "silenced" or not checkpointed
    }
