"""DDP and FSDP2 over NCCL with one process on one GPU: several training steps against stock."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_promote as tp

Region = Callable[[], AbstractContextManager[object]]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / str(os.getpid())
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    gc.collect()  # cycles of a model hold the process group, whose threads have to end before Python does
    dist.barrier(device_ids=[0])
    dist.destroy_process_group()


def ddp(net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net, device_ids=[0])


def fsdp(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for child in net.children():
        fully_shard(child)
    return fully_shard(net)


def trained(wrap: Callable[[nn.Module], nn.Module], region: Region, *, one_region: bool, fused: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    wrapped = wrap(net)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, fused=fused)
    losses = []

    def step() -> None:
        loss = wrapped(torch.randn(16, 64, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for _ in range(4):
        with region():
            step()
            if one_region:
                torch.clear_autocast_cache()  # stock's own remedy for several steps in one region
                step()
    weights = [getattr(weight, "to_local", lambda weight=weight: weight)() for weight in wrapped.parameters()]
    return [*losses, *(weight.detach().clone() for weight in weights)]


@pytest.mark.parametrize("one_region", [False, True], ids=["region_per_step", "two_steps_per_region"])
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("mode", ["weights", "persistent", "all", "none"])
@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_training_has_the_bits_of_stock(
    wrap: Callable[[nn.Module], nn.Module], mode: str, fused: bool, one_region: bool
) -> None:
    stock = partial(tp.stock_autocast, "cuda", torch.bfloat16, cache_enabled=mode != "none")
    ours = partial(tp.my_autocast, "cuda", torch.bfloat16, cache=mode)
    expected = trained(wrap, stock, one_region=one_region, fused=fused)
    got = trained(wrap, ours, one_region=one_region, fused=fused)
    assert len(expected) >= 4 + 8
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
