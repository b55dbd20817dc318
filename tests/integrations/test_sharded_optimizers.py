"""Optimizers of sharded weights, several steps in one region: DTensor weights, and ZeroRedundancyOptimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.subprocesses import Program, run_together

TRAIN = """
import contextlib, copy, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
import torch_promote as tp
from helpers.process_groups import end_group

rendezvous, cache, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

def dtensors(foreach):
    def shard(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    model = distribute_module(network(), mesh, shard)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, foreach=foreach)

def zero():
    model = torch.nn.parallel.DistributedDataParallel(network())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)

def train(make, autocast, one_region):
    model, optimizer = make()
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    if make is not zero:
        x, y = (distribute_tensor(t, mesh, [Replicate()]) for t in (x, y))
    losses = []
    around, inside = (autocast, contextlib.nullcontext) if one_region else (contextlib.nullcontext, autocast)
    with around():
        for _ in range(4):
            with inside():
                loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.full_tensor() if make is not zero else loss))
    return losses

ours, stock = lambda: tp.my_autocast("cpu", cache=cache), lambda: tp.stock_autocast("cpu")
for make in (lambda: dtensors(True), lambda: dtensors(False), zero):
    right = train(make, stock, False)
    print(train(make, ours, False) == right, train(make, ours, True) == right)
end_group()
"""


@pytest.mark.parametrize("cache", [pytest.param("weights", marks=pytest.mark.slow), "persistent"])
def test_weights_are_cast_again_after_each_step(tmp_path: Path, cache: str) -> None:
    arguments = f"{tmp_path}/rendezvous", cache
    for done in run_together([Program(TRAIN, *arguments, str(rank), compiler=True) for rank in range(2)]):
        assert done.stdout.split() == ["True"] * 6, done.stdout + done.stderr
