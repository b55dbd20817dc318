"""Module policies combined with copies, files, parametrizations, wrappers and compilers of modules."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import fusion, parametrize

from helpers.comparison import assert_same
from helpers.module_policies import OVERRIDES, POLICIES, dtype_of, expected_dtype, model_of, ours, train
from helpers.subprocesses import run_python
from torch_promote.regions.module_policies import module_policies, remove_module_policy, set_module_policy


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": through_torch_save,
    **{
        f"pickle {protocol}": lambda model, protocol=protocol: pickle.loads(pickle.dumps(model, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@POLICIES
@pytest.mark.parametrize("how", COPIES)
def test_copies_have_the_policy(policy: Any, how: str) -> None:
    model = model_of(policy)
    copied = COPIES[how](model)
    assert module_policies(copied) == {"2": policy}
    assert repr(copied) == repr(model)
    assert_same(train(copied, list(copied.parameters())), train(model, list(model.parameters())))
    remove_module_policy(copied)
    if how != "copy":  # a shallow copy has the same modules in it
        assert type(copied[2]) is nn.Linear
        assert dtype_of(copied) is torch.bfloat16
        assert module_policies(model) == {"2": policy}
        assert dtype_of(model) is expected_dtype(policy)


@POLICIES
def test_copy_of_the_module_itself(policy: Any) -> None:
    module = model_of(policy)[2]
    for how, make in COPIES.items():
        copied = make(module)
        assert dtype_of(copied) is expected_dtype(policy), how
        remove_module_policy(copied)
        assert type(copied) is nn.Linear
        assert dtype_of(copied) is torch.bfloat16
        assert dtype_of(module) is expected_dtype(policy)


class Reduced(nn.Linear):
    """Says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return Reduced, (4, 4)


class Copied(nn.Linear):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo: Any) -> Copied:
        return Copied(4, 4)


@pytest.mark.parametrize(
    ("module", "make"), [(Reduced(4, 4), lambda m: pickle.loads(pickle.dumps(m))), (Copied(4, 4), copy.deepcopy)]
)
def test_copies_of_its_own_making(module: nn.Module, make: Any) -> None:
    set_module_policy(module, {"": "fp32"})
    copied = make(module)
    assert copied is not module
    assert module_policies(copied) == {"": "fp32"}
    assert dtype_of(copied) is torch.float32
    remove_module_policy(module)
    remove_module_policy(copied)
    assert type(copied) is type(module) is module.__class__
    assert type(module) in (Reduced, Copied)


def test_file_read_in_another_process(tmp_path: Any) -> None:
    """The number of a set of overrides is valid only in one process."""
    torch.save(model_of(OVERRIDES), tmp_path / "model.pt")
    script = """
import sys, torch, torch_promote as tp
tp.my_autocast("cpu", overrides={"mm": "fp32"}); tp.my_autocast("cpu", overrides={"exp": "fp32"})
model = torch.load(sys.argv[1], weights_only=False)
with tp.my_autocast("cpu"):
    print(model(torch.ones(2, 4)).dtype)
"""
    done = run_python(script, str(tmp_path / "model.pt"))
    assert done.stdout == "torch.float16\n", done.stderr


def test_module_dies_with_its_last_reference() -> None:
    module = nn.Linear(4, 4)
    set_module_policy(module, {"": "fp32"})
    train(module, [])
    died = weakref.ref(module)
    gc.collect()
    gc.disable()
    try:
        del module
        assert died() is None
    finally:
        gc.enable()


def test_class_dies_with_its_modules() -> None:
    class Own(nn.Linear):
        pass

    module = Own(4, 4)
    set_module_policy(module, {"": "fp32"})
    remove_module_policy(module)
    set_module_policy(module, {"": "fp32"})
    died = weakref.ref(Own)
    del module, Own
    gc.collect()
    assert died() is None


# --- what else extends or wraps a module


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@POLICIES
@pytest.mark.parametrize("of_a_copy", [True, False])
@pytest.mark.parametrize("policy_first", [True, False])
def test_parametrized(policy: Any, policy_first: bool, of_a_copy: bool) -> None:
    model = model_of(policy if policy_first else None)
    weight = model[2].weight.detach().clone()
    parametrize.register_parametrization(model[2], "weight", Double())
    if not policy_first:
        set_module_policy(model, {"2": policy})
    parametrize.register_parametrization(model[2], "bias", Double())
    model = copy.deepcopy(model) if of_a_copy else model
    assert dtype_of(model) is expected_dtype(policy)
    assert torch.equal(model[2].weight, weight * 2)
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(model[2], name, leave_parametrized=True)
        assert module_policies(model) == {"2": policy}
        assert dtype_of(model) is expected_dtype(policy)
    remove_module_policy(model)
    assert type(model[2]) is nn.Linear
    assert dtype_of(model) is torch.bfloat16
    assert torch.equal(model[2].weight, weight * 2)


def test_policy_of_a_copy_of_a_parametrized_module() -> None:
    """PyTorch gives the copy of a parametrized module the same class, made for the one module."""
    model = model_of()
    parametrize.register_parametrization(model[2], "weight", Double())
    copied = copy.deepcopy(model)
    set_module_policy(model, {"2": "fp32"})
    assert (dtype_of(model), dtype_of(copied)) == (torch.float32, torch.bfloat16)
    set_module_policy(copied, {"2": OVERRIDES})
    remove_module_policy(model)
    assert (dtype_of(model), dtype_of(copied)) == (torch.bfloat16, torch.float16)


def test_policy_removed_from_a_parametrized_module() -> None:
    model = model_of("fp32")
    parametrize.register_parametrization(model[2], "weight", Double())
    remove_module_policy(model)
    assert dtype_of(model) is torch.bfloat16
    parametrize.remove_parametrizations(model[2], "weight")
    assert type(model[2]) is nn.Linear


def test_fusion_keeps_the_policy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    expected = fusion.fuse_linear_bn_eval(model[0], model[1])
    set_module_policy(model, {"0": "fp32"})
    fused = fusion.fuse_linear_bn_eval(model[0], model[1])
    assert module_policies(fused) == {"": "fp32"}
    assert dtype_of(fused) is torch.float32
    assert_same(fused(torch.ones(2, 4)), expected(torch.ones(2, 4)))


@POLICIES
def test_replica_of_data_parallel(policy: Any) -> None:
    replica = model_of(policy)[2]._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.ones(4, 4), torch.ones(4)
    assert dtype_of(replica) is expected_dtype(policy)


@POLICIES
def test_functional_call_and_signature(policy: Any) -> None:
    model = model_of(policy)
    parameters = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    with ours():
        assert torch.func.functional_call(model, parameters, torch.ones(2, 4)).dtype is expected_dtype(policy)
    assert inspect.signature(model[2].forward) == inspect.signature(nn.Linear(4, 4).forward)


def test_hooks_see_what_they_saw() -> None:
    """They run outside of the module's region, as around a region written into its forward."""
    model, seen = model_of("fp32"), []
    model[2].register_forward_pre_hook(
        lambda module, args: seen.append((args[0].dtype, torch.is_autocast_enabled("cpu")))
    )
    model[2].register_forward_hook(lambda module, args, out: seen.append((out.dtype, torch.is_autocast_enabled("cpu"))))
    dtype_of(model)
    assert seen == [(torch.bfloat16, True), (torch.float32, True)]


DISTRIBUTED = """
import copy, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import torch_promote as tp
from helpers.process_groups import end_group
from torch_promote import module_policies, remove_module_policy, set_module_policy

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

def shard(model):
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model

def policies(model):
    set_module_policy(model, {"**.0" if isinstance(model, torch.nn.parallel.DistributedDataParallel) else "0": "fp32",
                              "**.2": {"linear": "float16"}})
    return model

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.ones(4, 8), torch.ones(4, 4)
    losses = []
    for _ in range(3):
        with tp.my_autocast("cpu"):
            output = model(x)
        loss = (output.float() - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), output.dtype))
    return losses

ddp = torch.nn.parallel.DistributedDataParallel
expected, without = train(policies(build())), train(build())
print(expected != without)
print(train(shard(policies(build()))) == expected)
print(train(policies(shard(build()))) == expected)
print(train(ddp(policies(build()))) == expected)
print(train(policies(ddp(build()))) == expected)
for model in (shard(policies(build())), policies(shard(build()))):
    remove_module_policy(model)
    print(train(model) == without and not module_policies(model))
end_group()
"""


def test_fsdp2_and_ddp(tmp_path: Any) -> None:
    """Policies set before and after, and taken off again."""
    done = run_python(DISTRIBUTED, str(tmp_path / "rendezvous"), compiler=True, timeout=200)
    assert done.stdout.split() == ["True"] * 7, done.stdout + done.stderr
