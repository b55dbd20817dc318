"""FSDP2 with several training steps in one region.

FSDP gathers its shards into weights whose storage and version stay as they were, so the cast cache has to be told.
"""

from __future__ import annotations

import subprocess
import sys

TRAIN = """
import contextlib, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import torch_promote as tp

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)

def train(autocast, one_region):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
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

ours, stock = lambda: tp.my_autocast("cpu"), lambda: torch.autocast("cpu")
right = train(stock, one_region=False)
for autocast, one_region in ((ours, False), (ours, True), (stock, True)):
    print(train(autocast, one_region) == right)
dist.destroy_process_group()
"""


def test_gathered_weights_are_cast_again(tmp_path: object) -> None:
    command = [sys.executable, "-c", TRAIN, f"{tmp_path}/rendezvous"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, rank], **pipes) for rank in "01"]  # type: ignore[call-overload]
    try:
        for process in ranks:
            out, err = process.communicate(timeout=120)
            assert out.split() == ["True", "True", "False"], out + err
    finally:
        for process in ranks:
            process.kill()
