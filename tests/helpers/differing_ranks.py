"""The code of each rank for tests/integrations/test_ranks.py: regions that are the same on all ranks, or differ."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_promote as tp


def in_order(rank: int, world_size: int, enter: Callable[[], Any]) -> Any:
    """Makes the ranks call `enter` one after the other, and returns its error as text."""
    result = None
    for turn in range(world_size):
        if rank == turn:
            try:
                result = enter()
            except tp.TorchPromoteError as error:
                result = str(error)
        dist.barrier()
    return result


def entered(region: Any) -> str:
    """Enters a region, and returns the result of a product in it."""
    with region:
        return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)


def same(rank: int, world_size: int) -> Any:
    region = tp.my_autocast("cpu", overrides={"softmax": "fp16"})
    return in_order(rank, world_size, lambda: [entered(region), entered(region)])


def overrides_of_the_first_rank(rank: int, world_size: int) -> Any:
    region = tp.my_autocast("cpu", overrides={"matmul": "fp32"} if rank == 0 else None)
    return in_order(rank, world_size, lambda: entered(region))


def only_the_first_region_is_compared(rank: int, world_size: int) -> Any:
    def enter() -> Any:
        outcomes = [entered(tp.my_autocast("cpu"))]
        outcomes += [entered(tp.my_autocast("cpu", policy="off" if rank else "stock")) for _ in range(2)]
        return outcomes

    return in_order(rank, world_size, enter)


def raised_once(rank: int, world_size: int) -> Any:
    region = tp.my_autocast("cpu", policy="off" if rank else None)

    def enter() -> Any:
        outcomes = []
        for _ in range(2):
            try:
                outcomes.append(entered(region))
            except tp.errors.PolicyMismatchError as error:
                outcomes.append(type(error).__name__)
                outcomes.append(str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype))  # the region is not open
        return outcomes

    return in_order(rank, world_size, enter)


def default_policy(rank: int, world_size: int) -> Any:
    before = tp.set_default_policy("off" if rank else None)
    try:
        return in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu")))
    finally:
        tp.set_default_policy(before)


def registered_policy(rank: int, world_size: int) -> Any:
    with tp.register_policy("relu", "fp32") if rank else contextlib.nullcontext():
        return in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu")))


def installed(rank: int, world_size: int) -> Any:
    with tp.installed_as(overrides={"matmul": "fp32"} if rank else None):
        return in_order(rank, world_size, lambda: entered(torch.autocast("cpu")))


def promotion_rule(rank: int, world_size: int) -> Any:
    region = tp.promotion("jax" if rank else "numpy")
    return in_order(rank, world_size, lambda: entered(region))


def what_stock_has(rank: int, world_size: int) -> Any:
    """A rank may have its own dtype, as on devices without bfloat16, and its own cache mode."""
    dtype = torch.float16 if rank else torch.bfloat16
    cache = "persistent" if rank else "none"
    return in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu", dtype=dtype, cache=cache)))


def rank_0_alone(rank: int, world_size: int) -> Any:
    if rank == 0:
        return entered(tp.my_autocast("cpu", policy="off"))
    return "no region"


def store_fails(rank: int, world_size: int) -> Any:
    def fail() -> Any:
        raise RuntimeError("the server of the store has ended")

    c10d = dist.distributed_c10d
    original, c10d._get_default_store = c10d._get_default_store, fail
    try:
        return entered(tp.my_autocast("cpu", policy="off" if rank else None))
    finally:
        c10d._get_default_store = original


def switched_off(rank: int, world_size: int) -> Any:
    before = tp.set_check_ranks(False)
    try:
        return in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu", policy="off" if rank else None)))
    finally:
        tp.set_check_ranks(before)


def in_a_fork(rank: int, world_size: int) -> Any:
    """A child, such as a worker that loads data, has its parent's connection to the store."""

    def enter() -> Any:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os._exit(0 if entered(tp.my_autocast("cpu", policy="off")) == "torch.float32" else 1)
            os._exit(2)
        return os.waitpid(child, 0)[1], entered(tp.my_autocast("cpu"))

    return in_order(rank, world_size, enter)


# --- policies of modules


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def data_parallel(rank: int, world_size: int) -> Any:
    model = net()
    if rank:
        tp.set_module_policy(model, {"2": "fp32"})
    model = DistributedDataParallel(model)
    return in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu")))


def sharded(rank: int, world_size: int) -> Any:
    model = net()
    if rank:
        tp.set_module_policy(model, {"2": {"linear": "fp32"}})
    fully_shard(model[0])
    model = fully_shard(model)
    return in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu")))


def models_alike(rank: int, world_size: int) -> Any:
    """Rank 0 has a model that it does not share, which is not compared."""
    shared, own = net(), net()
    tp.set_module_policy(shared, {"2": tp.Policy.named("cuda") if rank else "cuda"})
    if rank == 0:
        tp.set_module_policy(own, {"2": "off"})
    first, second = DistributedDataParallel(shared), fully_shard(net())
    result = in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu")))
    del first, second
    return result


def wrapped_after_the_first_region(rank: int, world_size: int) -> Any:
    def enter() -> str:
        return entered(tp.my_autocast("cpu"))

    in_order(rank, world_size, enter)
    model = net()
    if rank:
        tp.set_module_policy(model, {"2": "fp32"})
    model = DistributedDataParallel(model)
    return in_order(rank, world_size, enter)
