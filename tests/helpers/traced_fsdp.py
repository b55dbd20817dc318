"""A step of FSDP2 under a trace, and what it found, as plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_promote as tp
from helpers.counting_mode import count_both_ways, counts_of
from helpers.plan_from_report import differences
from helpers.traced_programs import Block


def a_step(rank: int, world_size: int) -> dict[str, Any]:
    del rank
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        with tp.my_autocast("cpu"):
            loss = model(torch.randn(2, 3, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    report, mode = count_both_ways(step, model)
    counted = counts_of(report)
    return {
        "more": dict(counted - mode.counts),
        "fewer": dict(mode.counts - counted),
        "differences": list(differences(report.calls)),
        "modules": sorted({call.module for call in report.calls}),
        "casts": (sum(not cast.reused for call in report.calls for cast in call.casts), mode.casts),
        "calls": len(report.calls),
    }
