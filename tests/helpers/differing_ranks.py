"""The code of each rank for tests/integrations/test_ranks.py: regions that are the same on all ranks, or differ."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_promote as tp
from helpers.process_groups import end_group
from torch_promote import _C
from torch_promote.integrations import ranks as compare_ranks


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


def overrides_of_the_last_rank(rank: int, world_size: int) -> Any:
    region = tp.my_autocast("cpu", overrides={"matmul": "fp32"} if rank == world_size - 1 else None)
    return in_order(rank, world_size, lambda: entered(region))


def overrides_of_the_first_rank(rank: int, world_size: int) -> Any:
    region = tp.my_autocast("cpu", overrides={"matmul": "fp32"} if rank == 0 else None)
    return in_order(rank, world_size, lambda: entered(region))


def at_the_same_time(rank: int, world_size: int) -> Any:
    dist.barrier()
    return entered(tp.my_autocast("cpu", policy="cuda" if rank % 2 else None))


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


def installed_alike(rank: int, world_size: int) -> Any:
    with tp.installed_as(overrides={"matmul": "fp32"}):
        return in_order(rank, world_size, lambda: entered(torch.autocast("cpu")))


def promotion_rule(rank: int, world_size: int) -> Any:
    region = tp.promotion("jax" if rank else "numpy")
    return in_order(rank, world_size, lambda: entered(region))


def decorated(rank: int, world_size: int) -> Any:
    @tp.my_autocast("cpu", policy="off" if rank else None)
    def product() -> str:
        return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    return in_order(rank, world_size, product)


def compiled(rank: int, world_size: int) -> Any:
    """The region is in a compiled function; TorchDynamo reports errors of what it traces with their text."""

    @torch.compile(backend="eager", fullgraph=True)
    def product(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", policy="off" if rank else None):
            return x @ x

    def enter() -> str:
        try:
            return str(product(torch.ones(2, 2)).dtype)
        except Exception as error:
            return f"{error} autocast is {torch.is_autocast_enabled('cpu')}"

    return in_order(rank, world_size, enter)


def lint_of_one_rank(rank: int, world_size: int) -> Any:
    """The lint does not change results."""
    region = tp.promotion("numpy", on_promotion="raise" if rank else None)
    return in_order(rank, world_size, lambda: entered(region))


def what_stock_has(rank: int, world_size: int) -> Any:
    """A rank may have its own dtype, as on devices without bfloat16, and its own cache mode."""
    dtype = torch.float16 if rank else torch.bfloat16
    cache = "persistent" if rank else "none"
    return in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu", dtype=dtype, cache=cache)))


def another_line_first(rank: int, world_size: int) -> Any:
    """Rank 0 evaluates first, under another policy."""

    def enter() -> Any:
        if rank == 0:
            entered(tp.my_autocast("cpu", policy="off"))
        return entered(tp.my_autocast("cpu"))

    return in_order(rank, world_size, enter)


def rank_0_alone(rank: int, world_size: int) -> Any:
    if rank == 0:
        return entered(tp.my_autocast("cpu", policy="off"))
    return "no region"


def called_otherwise(rank: int, world_size: int) -> Any:
    """Ranks got here through different lines; only the lines below the function that started the group count."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    end_group()

    def begin_and_enter() -> Any:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        region = tp.my_autocast("cpu", policy="off" if rank else None)
        return in_order(rank, world_size, lambda: entered(region))

    if rank == 0:
        return begin_and_enter()
    return begin_and_enter()


def store_fails(rank: int, world_size: int) -> Any:
    def fail() -> Any:
        raise RuntimeError("the server of the store has ended")

    c10d = dist.distributed_c10d
    original, c10d._get_default_store = c10d._get_default_store, fail
    try:
        return entered(tp.my_autocast("cpu", policy="off" if rank else None))
    finally:
        c10d._get_default_store = original


def store_is_busy(rank: int, world_size: int) -> Any:
    """A thread waits in the store for what rank 0 sets after its region, and keeps others of its process out of it."""
    patience, compare_ranks._PATIENCE = compare_ranks._PATIENCE, 0.5
    original = dist.distributed_c10d._get_default_store
    address: list[Any] = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = [store.port]
    dist.broadcast_object_list(address)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", address[0], wait_for_workers=False)
    dist.distributed_c10d._get_default_store = lambda: store
    waiting = threading.Thread(target=store.wait, args=(["end"],))
    try:
        if rank != 0:
            waiting.start()
            time.sleep(0.5)
        result = entered(tp.my_autocast("cpu"))
        dist.barrier()
        if rank == 0:
            store.set("end", "")
        else:
            waiting.join(60)
        dist.barrier()
        return result
    finally:
        dist.distributed_c10d._get_default_store = original
        compare_ranks._PATIENCE = patience


def file_is_deleted(rank: int, world_size: int) -> Any:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    path, moved = store.path, f"{store.path}-moved"
    dist.barrier()
    if rank == 0:
        os.rename(path, moved)
    dist.barrier()
    result = entered(tp.my_autocast("cpu"))
    dist.barrier()
    is_there = os.path.exists(path)
    dist.barrier()
    if rank == 0:
        os.rename(moved, path)
    return result, is_there


def group_of_a_model_has_ended(rank: int, world_size: int) -> Any:
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    dist.destroy_process_group(group)
    result = entered(tp.my_autocast("cpu"))
    del model
    return result


def free_afterwards(rank: int, world_size: int) -> Any:
    """The flags of `enter_region`: none after the first region."""
    packed = tp.my_autocast("cpu")._packed

    def surroundings() -> int:
        owner = object()
        found = _C.enter_region(owner, packed)
        _C.exit_region(owner)
        return found

    before = surroundings() == surroundings() == _C.UNCHECKED_RANKS
    first = entered(tp.my_autocast("cpu"))
    return before, first, surroundings()


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


def policy_after_wrapping(rank: int, world_size: int) -> Any:
    model = DistributedDataParallel(net())
    tp.set_module_policy(model, {"module.2": "cuda" if rank else "fp32"})
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


def stages(rank: int, world_size: int) -> Any:
    """Each stage of a pipeline has its own group and its own policies."""
    groups = [dist.new_group([one]) for one in range(world_size)]
    model = net()
    if rank:
        tp.set_module_policy(model, {"2": "fp32"})
    model = DistributedDataParallel(model, process_group=groups[rank])
    return in_order(rank, world_size, lambda: entered(tp.my_autocast("cpu")))
