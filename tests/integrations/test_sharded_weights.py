"""Sharded weights with several training steps in one region: FSDP2, DTensor weights, and ZeroRedundancyOptimizer.

FSDP gathers its shards into weights without changing their storage or version, so a hook has to notify the cast cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.subprocesses import Program, run_together

TRAIN = """
import contextlib, functools, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
import torch_promote as tp
from helpers.gloo_ranks import end_group

rendezvous, cache, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

def sgd(model, **options):
    return model, torch.optim.SGD(model.parameters(), lr=0.5, **options)

def dtensors(foreach):
    def shard(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    return sgd(distribute_module(network(), mesh, shard), foreach=foreach)

def zero():
    model = torch.nn.parallel.DistributedDataParallel(network())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)

def fsdp(last_dim, reshard):
    model = network()
    placement = (lambda parameter: Shard(parameter.ndim - 1)) if last_dim else None
    for layer in (model[0], model[2], model):
        fully_shard(layer, shard_placement_fn=placement, reshard_after_forward=reshard)
    return sgd(model)

def train(make, autocast, one_region):
    model, optimizer = make()
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    if make in DTENSORS:
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
            losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    return losses

ours, stock = lambda: tp.my_autocast("cpu", cache=cache), lambda: tp.stock_autocast("cpu")
DTENSORS = [functools.partial(dtensors, foreach) for foreach in (True, False)]
FSDP = [functools.partial(fsdp, last_dim, reshard) for last_dim in (False, True) for reshard in (True, False)]
for make in (*DTENSORS, zero, *FSDP):
    right = train(make, stock, False)
    print(train(make, ours, False) == right, train(make, ours, True) == right)
    if make in FSDP:  # stock computes with old weights
        print(train(make, stock, True) != right)
end_group()
"""


@pytest.mark.parametrize("cache", ["weights", "persistent"])
def test_weights_are_cast_again_after_each_step(tmp_path: Path, cache: str) -> None:
    arguments = f"{tmp_path}/rendezvous", cache
    for done in run_together([Program(TRAIN, *arguments, str(rank), compiler=True) for rank in range(2)]):
        assert done.stdout.split() == ["True"] * 18, done.stdout + done.stderr
