"""A trace of a step of FSDP2, in one process over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_promote as tp
from helpers.counting_mode import count_both_ways, counts_of
from helpers.gloo_ranks import in_ranks
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


@pytest.mark.slow
def test_a_step_of_fsdp2(tmp_path: Path) -> None:
    (results,) = in_ranks({"step": a_step}, 1, tmp_path)
    found = results["step"]
    assert isinstance(found, dict), found
    assert (found["more"], found["fewer"], found["differences"]) == ({}, {}, [])
    assert {"0.mix", "0.norm", "1.down"} <= set(found["modules"])
    assert found["casts"][0] == found["casts"][1] > 0
    assert found["calls"] > 200
