"""The ranks of a distributed job train alike in every mode, and raise if their policies differ."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.gloo_ranks import in_ranks
from helpers.subprocesses import Program, environment, run_python, run_together

# --- what each rank does: regions that are the same on all ranks, or differ


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


@contextlib.contextmanager
def put(setting: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = setting(value)
    try:
        yield
    finally:
        setting(before)


def no_store() -> Any:
    raise RuntimeError("the server of the store has ended")


nothing = contextlib.nullcontext
cpu = functools.partial(tp.my_autocast, "cpu")
MATMUL = {"matmul": "fp32"}
#: What is in force around the first region, and the region: for rank 0 (False), and for the others (True).
CASES: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    "same": lambda other: (nothing(), cpu(overrides={"softmax": "fp16"})),
    "overrides_of_the_first_rank": lambda other: (nothing(), cpu(overrides=None if other else MATMUL)),
    "promotion_rule": lambda other: (nothing(), tp.promotion("jax" if other else "numpy")),
    # A rank may have its own dtype, as on devices without bfloat16, and its own cache mode.
    "its_dtype": lambda other: (nothing(), cpu(torch.float16 if other else torch.bfloat16)),
    "its_cache_mode": lambda other: (nothing(), cpu(cache="persistent" if other else "none")),
    "default_policy": lambda other: (put(tp.set_default_policy, "off" if other else None), cpu()),
    "registered_policy": lambda other: (tp.register_policy("relu", "fp32") if other else nothing(), cpu()),
    "installed": lambda other: (
        tp.install(overrides={"matmul": "fp32"} if other else None),
        torch.autocast("cpu"),
    ),
    "switched_off": lambda other: (put(tp.set_check_ranks, False), cpu(policy="off" if other else None)),
    "store_fails": lambda other: (
        mock.patch.object(dist.distributed_c10d, "_get_default_store", no_store),
        cpu(policy="off" if other else None),
    ),
}


def in_case(name: str, rank: int, world_size: int) -> Any:
    around, region = CASES[name](rank > 0)
    with around:
        return in_order(rank, world_size, lambda: entered(region))


def only_the_first_region_is_compared(rank: int, world_size: int) -> Any:
    def enter() -> Any:
        return [entered(cpu()), entered(cpu(policy="off" if rank else "stock"))]

    return in_order(rank, world_size, enter)


def raised_once(rank: int, world_size: int) -> Any:
    region = cpu(policy="off" if rank else None)

    def enter() -> Any:
        outcomes = []
        for _ in range(2):
            try:
                outcomes.append(entered(region))
            except tp.errors.PolicyMismatchError as error:
                outcomes += [type(error).__name__, entered(nothing())]  # the region is not open
        return outcomes

    return in_order(rank, world_size, enter)


def rank_0_alone(rank: int, world_size: int) -> Any:
    return "no region" if rank else entered(cpu(policy="off"))


def in_a_fork(rank: int, world_size: int) -> Any:
    """A child, such as a worker that loads data, has its parent's connection to the store."""

    def enter() -> Any:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os._exit(0 if entered(cpu(policy="off")) == "torch.float32" else 1)
            os._exit(2)
        return os.waitpid(child, 0)[1], entered(cpu())

    return in_order(rank, world_size, enter)


# --- policies of modules


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def in_parts(model: nn.Module) -> nn.Module:
    fully_shard(model[0])  # type: ignore[index]
    return fully_shard(model)


def wrapped(wrap: Any, policy: Any, after_a_region: bool, rank: int, world_size: int) -> Any:
    """All ranks but the first have a policy of a module."""
    if after_a_region:
        in_order(rank, world_size, lambda: entered(cpu()))
    model = net()
    if rank:
        tp.set_module_policy(model, {"2": policy})
    model = wrap(model)
    return in_order(rank, world_size, lambda: entered(cpu()))


def models_alike(rank: int, world_size: int) -> Any:
    """Rank 0 has a model that it does not share, which is not compared."""
    shared, own = net(), net()
    tp.set_module_policy(shared, {"2": tp.Policy.named("cuda") if rank else "cuda"})
    if rank == 0:
        tp.set_module_policy(own, {"2": "off"})
    first, second = DistributedDataParallel(shared), fully_shard(net())
    result = in_order(rank, world_size, lambda: entered(cpu()))
    del first, second
    return result


# --- what each rank does: one training under regions of several kinds

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


def in_ddp(model: Net) -> nn.Module:
    return DistributedDataParallel(model)


def in_fsdp(model: Net, **options: Any) -> nn.Module:
    for part in (*model.blocks, model):
        fully_shard(part, **options)
    return model


WRAPPERS = {"ddp": in_ddp, "fsdp2": in_fsdp}


def trained_by(
    wrap: Callable[[Net], nn.Module], region: Kind, rank: int, make: type[Net] = Net, **policies: Any
) -> Any:
    """Returns the losses and the whole weights after some steps."""
    torch.manual_seed(0)
    small = make()
    tp.set_module_policy(small, policies.get("before", {}))
    model = wrap(small)
    tp.set_module_policy(small, policies.get("after", {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    losses = []
    for _ in range(2):  # the second step has the weights that the first has written
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        with region():
            loss = nn.functional.cross_entropy(model(x), y)
            if wrap is in_ddp:
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
        run = functools.partial(trained_by, wrap, rank=rank)
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
                with tp.install(overrides=overrides, cache=mode):
                    results[name, policy, f"installed, {mode}"] = run(stock)
    return results


# --- what each rank does: several training steps in one region, whose weights are cast again after each step
#
# FSDP gathers its shards into weights without changing their storage or version, so a hook has to notify the cache.

Made = tuple[nn.Module, torch.optim.Optimizer]
sgd = functools.partial(torch.optim.SGD, lr=0.5)


def in_dtensors(foreach: bool) -> Made:
    def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))

    model = distribute_module(Net(), init_device_mesh("cpu", (dist.get_world_size(),)), shard)
    return model, sgd(model.parameters(), foreach=foreach)


def with_zero() -> Made:
    model = in_ddp(Net())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)


def in_shards(last_dim: bool, reshard: bool) -> Made:
    placement = (lambda weight: Shard(weight.ndim - 1)) if last_dim else None
    model = in_fsdp(Net(), shard_placement_fn=placement, reshard_after_forward=reshard)
    return model, sgd(model.parameters())


DTENSORS = [functools.partial(in_dtensors, foreach) for foreach in (True, False)]
SHARDED = [functools.partial(in_shards, last_dim, reshard) for last_dim in (False, True) for reshard in (True, False)]


def losses(make: Callable[[], Made], region: Kind, in_one: bool) -> list[float]:
    torch.manual_seed(0)
    model, optimizer = make()
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    if make in DTENSORS:
        mesh = next(model.parameters()).device_mesh
        x, y = (distribute_tensor(value, mesh, [Replicate()]) for value in (x, y))
    found = []
    with region() if in_one else nothing():
        for _ in range(3):
            with nothing() if in_one else region():
                loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(whole(loss)))
    return found


def steps_in_one_region(cache: str, rank: int, world_size: int) -> dict[str, list[bool]]:
    """Whether the losses are those of a region of stock's for each step: ours for each step, in one, stock's in one."""
    region, stock = functools.partial(cpu, cache=cache), functools.partial(tp.stock_autocast, "cpu")
    found = {}
    for make in (*DTENSORS, with_zero, *SHARDED):
        right = losses(make, stock, False)
        ours = [losses(make, region, False) == right, losses(make, region, True) == right]
        found[str(make)] = [*ours, *([losses(make, stock, True) == right] if make in SHARDED else [])]
    return found


BFLOAT16, FLOAT32 = "torch.bfloat16", "torch.float32"

#: What each rank gets: with two ranks, or with four, where it differs.
ALIKE: dict[str, Any] = {
    "same": lambda rank: BFLOAT16,
    "only_the_first_region_is_compared": lambda rank: [BFLOAT16, FLOAT32 if rank else BFLOAT16],
    "its_dtype": lambda rank: "torch.float16" if rank else BFLOAT16,
    "its_cache_mode": lambda rank: BFLOAT16,
    "rank_0_alone": lambda rank: "no region" if rank else FLOAT32,
    "switched_off": lambda rank: FLOAT32 if rank else BFLOAT16,
    "store_fails": lambda rank: FLOAT32 if rank else BFLOAT16,
    "in_a_fork": lambda rank: (0, BFLOAT16),
    "models_alike": lambda rank: BFLOAT16,
}
#: Rank 0 is first in the region; the others have another policy, which its error says, and raise.
DIFFERENT = {
    "default_policy": "my_autocast('cpu'): aten::_addmm_activation on cpu fallthrough, ",
    "registered_policy": "my_autocast('cpu'): "
    "aten::relu on cpu fp32, aten::relu on cuda fp32, aten::relu on mps fp32, aten::relu on xpu fp32\n",
    "installed": "<torch_promote.install(overrides={'matmul': 'fp32'})>: aten::matmul on cpu fp32, ",
    "promotion_rule": "promotion('jax'): the promotion rule jax\n",
    "data_parallel": "module.2 fp32\n",
    "sharded": "2 {linear: fp32}\n",
    "wrapped_after_the_first_region": "module.2 fp32\n",
}
FUNCTIONS: dict[str, Any] = {
    **{name: functools.partial(in_case, name) for name in CASES},
    **{f.__name__: f for f in (only_the_first_region_is_compared, raised_once, rank_0_alone, in_a_fork, models_alike)},
    "data_parallel": functools.partial(wrapped, DistributedDataParallel, "fp32", False),
    "sharded": functools.partial(wrapped, in_parts, {"linear": "fp32"}, False),
    "wrapped_after_the_first_region": functools.partial(wrapped, DistributedDataParallel, "fp32", True),
    "training": training,
    **{f"steps in one region, {cache}": functools.partial(steps_in_one_region, cache) for cache in MODES[:2]},
}


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="two ranks"), pytest.param(4, id="four ranks", marks=pytest.mark.slow)]
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of all functions in each rank, computed once, because starting processes takes most of the time."""
    return in_ranks(FUNCTIONS, request.param, tmp_path_factory.mktemp("ranks"))


# --- training


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("policy", ["stock", "overrides", "modules"])
def test_training_in_every_mode(ranks: list[dict[str, Any]], wrapper: str, policy: str) -> None:
    """With stock's policy it has the bits of stock, and with others those of the same written by hand under stock."""
    for results in ranks:
        trained = results["training"]
        compared = [key for key in trained if key[:2] == (wrapper, policy) and not key[2].startswith("by hand")]
        assert len(compared) >= 2 * len(MODES)
        for key in compared:
            by_hand = f"by hand, {not key[2].endswith(', none')}"
            assert_same(trained[key], trained[wrapper, policy, by_hand], what=str(key))
            if policy != "stock":
                with pytest.raises(AssertionError):
                    assert_same(trained[key], trained[wrapper, "stock", by_hand])


def test_ranks_trained_together(ranks: list[dict[str, Any]]) -> None:
    for key, (losses, weights) in ranks[0]["training"].items():
        for others_losses, others_weights in (results["training"][key] for results in ranks[1:]):
            assert_same(weights, others_weights, what=str(key))
            assert not torch.equal(losses[0], others_losses[0]), "each rank has data of its own"


@pytest.mark.parametrize("cache", MODES[:2])
def test_weights_are_cast_again_after_each_step(ranks: list[dict[str, Any]], cache: str) -> None:
    """In one region around all steps, stock computes with old weights under FSDP."""
    for results in ranks:
        alike = list(results[f"steps in one region, {cache}"].values())
        assert alike == [[True, True]] * 3 + [[True, True, False]] * 4


# --- policies that differ


@pytest.mark.parametrize("name", ALIKE)
def test_no_error(ranks: list[dict[str, Any]], name: str) -> None:
    assert [results[name] for results in ranks] == [ALIKE[name](rank) for rank in range(len(ranks))]


@pytest.mark.parametrize("name", DIFFERENT)
def test_error_of_the_ranks_that_differ_from_the_first(ranks: list[dict[str, Any]], name: str) -> None:
    first, *others = (results[name] for results in ranks)
    assert first == (FLOAT32 if name == "promotion_rule" else BFLOAT16)
    for rank, text in enumerate(others, 1):
        assert "\n  rank 0" in text
        shown = r"  rank 1|  ranks 1, 2|  ranks 1, 2, 3" if rank > 1 else r"  rank 1"
        assert re.search(rf"^(?:{shown})(?:, |: ){re.escape(DIFFERENT[name])}", text, re.MULTILINE), text
        assert "set_check_ranks(False)" in text
        assert "TORCH_PROMOTE_CHECK_RANKS=0" in text


def test_error_if_the_first_rank_differs(ranks: list[dict[str, Any]]) -> None:
    """All others raise, and name those that have not come within two seconds."""
    first, *others = (results["overrides_of_the_first_rank"] for results in ranks)
    assert first == FLOAT32
    last = len(ranks) - 1
    for rank, text in enumerate(others, 1):
        assert "\n  rank 0, my_autocast('cpu', overrides={'matmul': 'fp32'}): aten::matmul on cpu fp32," in text
        missing = {0: "", 1: f"\n  not there yet: rank {last}\n", 2: f"\n  not there yet: ranks 2, {last}\n"}
        assert missing[last - rank] in text
        assert ("not there yet" in text) == (rank < last)


def test_the_error_comes_once_and_closes_the_region(ranks: list[dict[str, Any]]) -> None:
    first, *others = (results["raised_once"] for results in ranks)
    assert first == [BFLOAT16, BFLOAT16]
    assert others == [["PolicyMismatchError", FLOAT32, FLOAT32]] * len(others)


# --- whole jobs

JOB = """
import sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
if "late" not in sys.argv:
    import torch_promote as tp
dist.init_process_group("gloo")
import torch_promote as tp  # it may be imported when the group exists
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 4))
overrides = {"linear": "fp32"} if rank else None
region = tp.my_autocast("cpu", overrides=overrides)
time.sleep(rank)
with region:
    loss = model(torch.ones(2, 4)).square().mean()
loss.backward()
from helpers.gloo_ranks import end_group
end_group()
"""


@pytest.mark.parametrize(
    ("arguments", "variables", "fails"),
    [
        ((), {}, True),
        pytest.param(("late",), {}, True, marks=pytest.mark.slow),
        pytest.param((), {"TORCH_PROMOTE_CHECK_RANKS": "0"}, False, marks=pytest.mark.slow),
    ],
)
def test_a_job_whose_ranks_differ_ends(arguments: Any, variables: Any, fails: bool) -> None:
    """Rank 1 raises; in rank 0, the collective of its backward fails, since gloo has lost the other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", **variables}
    ended = run_together([Program(JOB, *arguments, env=environment(RANK=rank, **job), compiler=True) for rank in "01"])
    errors = [done.stderr for done in ended]
    assert [done.returncode != 0 for done in ended] == [fails, fails], errors
    assert ("PolicyMismatchError: ranks of this job differ" in errors[1]) == fails, errors[1]
    assert (
        "rank 1, my_autocast('cpu', overrides={'linear': 'fp32'}): aten::linear on cpu fp32" in errors[1] or not fails
    )


def test_the_variable_has_two_values() -> None:
    done = run_python("import torch_promote", env=environment(TORCH_PROMOTE_CHECK_RANKS="never"))
    assert "OptionError: TORCH_PROMOTE_CHECK_RANKS is 'never'. Legal: 0" in done.stderr
