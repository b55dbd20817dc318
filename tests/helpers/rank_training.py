"""The code of each rank for tests/integrations/test_ranks.py: one training under regions of several kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torch_promote as tp

MODES = ("weights", "persistent", "all", "none")
OVERRIDES = {"linear": "fp32"}
#: The policy of the head, which is what `HeadInFloat32` does by hand.
HEAD = {"head": "fp32"}

Kind = Callable[[], AbstractContextManager[object]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class HeadInFloat32(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


def data_parallel(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def sharded(net: Net) -> nn.Module:
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


WRAPPERS = {"ddp": data_parallel, "fsdp2": sharded}


def train(wrap: Callable[[Net], nn.Module], region: Kind, rank: int, make: type[Net] = Net, **policies: Any) -> Any:
    """Returns the losses and the whole weights after some steps."""
    torch.manual_seed(0)
    net = make()
    tp.set_module_policy(net, policies.get("before", {}))
    model = wrap(net)
    tp.set_module_policy(net, policies.get("after", {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    losses = []
    for _ in range(3):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        with region():
            loss = nn.functional.cross_entropy(model(x), y)
            if wrap is data_parallel:
                loss = loss + nn.functional.cross_entropy(model(x * 2), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [whole(weight) for weight in model.parameters()]


def whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


def training(rank: int, world_size: int) -> dict[tuple[str, ...], Any]:
    """Every training by its wrapper, what its policy is, and whose regions and which cache mode it has."""
    results: dict[tuple[str, ...], Any] = {}
    stock = functools.partial(torch.autocast, "cpu")
    for name, wrap in WRAPPERS.items():
        run = functools.partial(train, wrap, rank=rank)
        for cached in (True, False):
            by_hand = functools.partial(stock, cache_enabled=cached)
            results[name, "stock", f"by hand, {cached}"] = run(by_hand)
            results[name, "overrides", f"by hand, {cached}"] = run(functools.partial(by_hand, enabled=False))
            results[name, "modules", f"by hand, {cached}"] = run(by_hand, make=HeadInFloat32)
        results[name, "modules", "policies in stock's regions"] = run(stock, before=HEAD)
        for mode in MODES:
            ours = functools.partial(tp.my_autocast, "cpu", cache=mode)
            results[name, "stock", f"ours, {mode}"] = run(ours)
            results[name, "overrides", f"ours, {mode}"] = run(functools.partial(ours, overrides=OVERRIDES))
            results[name, "modules", f"ours, {mode}"] = run(ours, before=HEAD)
            results[name, "modules", f"ours, set when wrapped, {mode}"] = run(ours, after=HEAD)
            for policy, overrides in (("stock", None), ("overrides", OVERRIDES)):
                with tp.installed_as(overrides=overrides, cache=mode):
                    results[name, policy, f"installed, {mode}"] = run(stock)
    return results
