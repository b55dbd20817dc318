"""FSDP2 with several training steps in one region.

FSDP gathers its shards into weights without changing their storage or version, so a hook has to notify the cast cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.subprocesses import Program, run_together

TRAIN = """
import contextlib, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
import torch_promote as tp
from helpers.process_groups import end_group

rendezvous, world_size, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world_size))

def train(autocast, one_region, last_dim, reshard):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    placement = (lambda parameter: Shard(parameter.ndim - 1)) if last_dim else None
    for layer in (model[0], model[2], model):
        fully_shard(layer, shard_placement_fn=placement, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    losses = []
    around, inside = (autocast, contextlib.nullcontext) if one_region else (contextlib.nullcontext, autocast)
    with around():
        for _ in range(4):
            with inside():
                loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses

ours = {cache: lambda cache=cache: tp.my_autocast("cpu", cache=cache) for cache in ("weights", "persistent")}
stock = lambda: tp.stock_autocast("cpu")
for last_dim in (False, True):
    for reshard in (True, False):
        right = train(stock, False, last_dim, reshard)
        for autocast in ours.values():
            print(train(autocast, False, last_dim, reshard) == train(autocast, True, last_dim, reshard) == right)
        print(train(stock, True, last_dim, reshard) == right)
end_group()
"""


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_gathered_weights_are_cast_again(tmp_path: Path, world_size: int) -> None:
    arguments = f"{tmp_path}/rendezvous", str(world_size)
    for done in run_together([Program(TRAIN, *arguments, str(rank), compiler=True) for rank in range(world_size)]):
        assert done.stdout.split() == ["True", "True", "False"] * 4, done.stdout + done.stderr
