"""The ranks of a distributed job train alike in every mode, and `check_ranks` raises if their policies differ."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

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

# --- what each rank does: `check_ranks` in regions that are the same on all ranks, or differ

nothing = contextlib.nullcontext
cpu = functools.partial(tp.my_autocast, "cpu")
LINEAR = {"linear": "fp32"}
#: What is in force around the region, and the region: for rank 0 (False), and for the others (True).
CASES: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    "same": lambda other: (nothing(), cpu(overrides={"softmax": "fp16"})),
    "its cache mode": lambda other: (nothing(), cpu(cache="persistent" if other else "none")),
    "policies that are off": lambda other: (nothing(), cpu(enabled=False, overrides=LINEAR if other else None)),
    "overrides": lambda other: (nothing(), cpu(overrides=LINEAR if other else None)),
    "many overrides": lambda other: (nothing(), cpu(policy="off" if other else None)),
    "dtype": lambda other: (nothing(), cpu(torch.float16 if other else torch.bfloat16)),
    "torch.autocast": lambda other: (nothing(), torch.autocast("cpu", enabled=other)),
    "promotion rule": lambda other: (nothing(), tp.promotion("jax" if other else "numpy")),
    "registered policy": lambda other: (tp.register_policy("relu", "fp32") if other else nothing(), cpu()),
    "installed": lambda other: (tp.install(overrides=LINEAR if other else None), torch.autocast("cpu")),
}


def in_case(name: str, rank: int, world_size: int) -> Any:
    around, region = CASES[name](rank > 0)
    with around, region:
        return checked()


def checked(model: nn.Module | None = None, group: Any = None) -> str:
    """Returns the error, which has been pickled, or "" if there was none."""
    try:
        tp.check_ranks(model, group)
    except tp.errors.PolicyMismatchError as error:
        return str(pickle.loads(pickle.dumps(error)))
    return ""


def of_modules(policy: Any, of_rank_0: Any, rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tp.set_module_policy(model, {"2": policy if rank else of_rank_0} if of_rank_0 or rank else {})
    with cpu():
        assert checked() == ""
        return checked(DistributedDataParallel(model))


def of_tables(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    policy = tp.Policy.stock().override_modules({"0": LINEAR if rank else "off"})
    with cpu(policy=policy, model=model):
        return checked()


def in_its_group(rank: int, world_size: int) -> str:
    """Each rank is a stage of a pipeline, and the only one of its group."""
    groups = [dist.new_group([one]) for one in range(world_size)]
    with cpu(policy="off" if rank else None):
        return checked(group=groups[rank])


# --- what each rank does: one training under regions of several kinds

MODES = ("weights", "persistent", "all", "none")
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
            results[name, "overrides", f"ours, {mode}"] = run(functools.partial(ours, overrides=LINEAR))
            results[name, "modules", f"ours, {mode}"] = run(ours, before=HEAD)
            results[name, "modules", f"ours, set when wrapped, {mode}"] = run(ours, after=HEAD)
            for policy, overrides in (("stock", None), ("overrides", LINEAR)):
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


#: What `check_ranks` says of rank 0, and of the others; None if it raises nothing.
EXPECTED: dict[str, tuple[str, str] | None] = {
    "same": None,
    "its cache mode": None,
    "policies that are off": None,
    "modules alike": None,
    "in its group": None,
    "overrides": ("aten::linear on cpu: not set", "aten::linear on cpu: fp32"),
    "many overrides": ("aten::_addmm_activation on cpu: not set", "aten::_addmm_activation on cpu: fallthrough"),
    "dtype": ("autocast on cpu: bfloat16", "autocast on cpu: float16"),
    "torch.autocast": ("autocast on cpu: not set", "autocast on cpu: bfloat16"),
    "promotion rule": ("the promotion rule: numpy", "the promotion rule: jax"),
    "registered policy": ("aten::relu on cpu: not set", "aten::relu on cpu: fp32"),
    "installed": ("aten::linear on cpu: not set", "aten::linear on cpu: fp32"),
    "module": ("module 'module.2': not set", "module 'module.2': fp32"),
    "module's ops": ("linear in module 'module.2': bfloat16", "linear in module 'module.2': fp32"),
    "module's policy": (
        "aten::linear on cpu in module 'module.2': not set",
        "aten::linear on cpu in module 'module.2': fp32",
    ),
    "tables": (
        'aten::linear in [modules."0"]: not set, policy in [modules."0"]: off',
        'aten::linear in [modules."0"]: fp32, policy in [modules."0"]: not set',
    ),
}
FUNCTIONS: dict[str, Any] = {
    **{name: functools.partial(in_case, name) for name in CASES},
    "modules alike": functools.partial(of_modules, tp.Policy.named("cuda"), "cuda"),
    "module": functools.partial(of_modules, "fp32", None),
    "module's ops": functools.partial(of_modules, LINEAR, {"linear": "bfloat16"}),
    "module's policy": functools.partial(of_modules, tp.Policy.stock().override(LINEAR), tp.Policy.stock()),
    "tables": of_tables,
    "in its group": in_its_group,
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


# --- check_ranks


@pytest.mark.parametrize("name", EXPECTED)
def test_check_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    """All ranks raise, and say which ranks differ in what."""
    texts, expected = [results[name] for results in ranks], EXPECTED[name]
    if expected is None:
        assert texts == [""] * len(ranks)
        return
    others = "rank 1" if len(ranks) == 2 else "ranks 1, 2, 3"
    for text in texts:
        assert text.startswith(f"ranks of this job have different policies:\n  rank 0: {expected[0]}")
        assert f"\n  {others}: {expected[1]}" in text
        assert text.endswith("compare ranks of one group: check_ranks(group=...).")
        assert (", and " in text) == (name == "many overrides")


def test_check_ranks_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="and no process group is initialized"):
        tp.check_ranks()
