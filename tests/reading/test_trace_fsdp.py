"""A trace of a step of FSDP2, in one process over gloo."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_promote as tp
from helpers.counting_mode import count_both_ways, counts_of
from helpers.gloo_ranks import in_ranks
from helpers.plan_from_report import differences
from helpers.traced_programs import Block
from torch_promote.observe.ops import unnoticed


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


def recordings(rank: int, world_size: int) -> dict[str, str]:
    """What `diff` says of a training, and of the same one with a change, or resumed from a checkpoint."""
    mesh = init_device_mesh("cpu", (world_size,))

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    def train(model: Any, optimizer: Any, change: str = "") -> None:
        for step in range(2):
            with unnoticed():  # what an allocator hands out again has other contents in each run
                _ = [torch.full((number,), random.random()) for number in (1024, 1056, 32) for _ in range(8)]
            if change == "weight" and step == 1:
                model[1].weight.to_local().detach().numpy()[:] *= 1.5
            model(torch.ones(4, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def recorded(change: str) -> tp.TraceReport:
        model, optimizer = make()
        train(model, optimizer)
        states = copy.deepcopy(get_state_dict(model, optimizer))
        with tp.trace(values=True) as report:
            if change == "resumed":
                model, optimizer = make()
                set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
            train(model, optimizer, change)
        return report

    before = recorded("")
    return {change: str(before.diff(recorded(change))) for change in ("", "resumed", "weight")}


@pytest.mark.slow
def test_recordings_of_fsdp2_are_compared(tmp_path: Path) -> None:
    (results,) = in_ranks({"recordings": recordings}, 1, tmp_path)
    found = results["recordings"]
    assert isinstance(found, dict), found
    for change in ("", "resumed"):
        assert "Equal: the results of" in found[change], found[change]
    said = " ".join(found["weight"].split())
    assert "Different from step 1 on: The parameter 1.weight has other contents" in said, found["weight"]
