"""Module policies combined with copies, files, parametrizations, wrappers and compilers of modules."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import torch_promote as tp
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
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
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


HALF, SINGLE = torch.bfloat16, torch.float32


# --- Accelerate replaces forward, and restores it

# As Accelerate 1.15 does it (hooks.py, accelerator.py, utils/other.py, utils/operations.py), so that no test needs it.


def add_hook_to_module(module: Any) -> None:
    """A hook that doubles the inputs, and adds 1 to the output."""
    old_forward = module.forward
    module._old_forward = old_forward

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*(arg * 2 for arg in args), **kwargs) + 1

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old_forward)


def remove_hook_from_module(module: Any) -> None:
    module.forward = module._old_forward
    del module._old_forward


@POLICIES
@pytest.mark.parametrize("policy_first", [True, False])
@pytest.mark.parametrize("removed_first", ["policy", "hook"])
def test_accelerate_hook(policy: Any, policy_first: bool, removed_first: str) -> None:
    model = model_of(policy if policy_first else None)
    add_hook_to_module(model[2])
    if not policy_first:
        set_module_policy(model, {"2": policy})
    x = torch.ones(2, 4)
    with ours():
        hidden = model[1](model[0](x))
        assert_same(model(x), model_of(policy)[2](hidden * 2) + 1)
    if removed_first == "policy":
        remove_module_policy(model)
        assert dtype_of(model) is HALF
        with ours():
            assert_same(model(x), model_of()[2](hidden * 2) + 1)
        remove_hook_from_module(model[2])
    else:
        remove_hook_from_module(model[2])
        if policy_first:
            assert dtype_of(model) is expected_dtype(policy)
        remove_module_policy(model)
    with ours():
        assert_same(model(x), model_of()(x))


def test_captured_forward() -> None:
    model = model_of("fp32")
    captured, x = model[2].forward, torch.ones(2, 4)
    with ours():
        assert captured(x).dtype is model[2].forward(x).dtype is SINGLE
        set_module_policy(model, {"2": OVERRIDES})
        assert captured(x).dtype is torch.float16
        remove_module_policy(model)
        assert captured(x).dtype is HALF
        set_module_policy(model, {"2": "fp32"})
        assert captured(x).dtype is SINGLE
    assert captured.__self__ is model[2]
    assert captured.__name__ == "forward"
    del model
    gc.collect()
    with pytest.raises(tp.errors.RegionError, match=r"the module of this forward no longer exists"):
        captured(x)


# --- modules with a forward of their own


@POLICIES
@pytest.mark.parametrize("kind", ["function", "method", "partial"])
def test_instance_forward(policy: Any, kind: str) -> None:
    model = model_of()
    module = model[2]

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + 1

    own: Callable[..., Any] = {
        "function": lambda x: forward(module, x),
        "method": types.MethodType(forward, module),
        "partial": functools.partial(forward, module),
    }[kind]
    module.forward = own
    with ours():
        without = model(torch.ones(2, 4))
    set_module_policy(model, {"2": policy})
    assert dtype_of(model) is expected_dtype(policy)
    assert dtype_of(copy.deepcopy(model)) is expected_dtype(policy)
    assert inspect.signature(module.forward) == inspect.signature(own)
    remove_module_policy(model)
    assert module.forward is own
    with ours():
        assert_same(model(torch.ones(2, 4)), without)


def test_deleted_forward() -> None:
    """Libraries that delete it believe that the forward of the class is back."""
    model = model_of("fp32")
    del model[2].forward
    with pytest.raises(tp.errors.RegionError, match="attribute 'forward' of a Linear was deleted"):
        dtype_of(model)
    set_module_policy(model, {"2": "fp32"})
    assert dtype_of(model) is SINGLE
    del model[2].forward
    remove_module_policy(model)
    assert dtype_of(model) is HALF


# --- copies that share the dict of a module


class Scales(nn.Module):
    factor = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x * self.factor


def in_dict(module: nn.Module) -> nn.Module:
    result = type(module).__new__(type(module))
    result.__dict__ = module.__dict__.copy()
    return result


@pytest.mark.parametrize("make", [copy.copy, in_dict, nn.Module._replicate_for_data_parallel])
@pytest.mark.parametrize("then", ["called", "copied", "pickled", "called directly"])
@pytest.mark.parametrize("original_dies", [True, False])
def test_shallow_copies_run_as_themselves(make: Any, then: str, original_dies: bool) -> None:
    """Not as the original module, whose forward they share."""
    module = Scales()
    set_module_policy(module, {"": "fp32"})
    copied = make(module)
    copied.factor = 3
    if original_dies:
        del module
        gc.collect()
    if then == "copied":
        copied = copy.deepcopy(copied)
    elif then == "pickled":
        copied = pickle.loads(pickle.dumps(copied))
    x, expected = torch.ones(2, 2, dtype=HALF), torch.full((2, 2), 6.0)
    with ours():
        for _ in range(2):
            assert_same(copied(x), expected)
            if then == "called directly":
                assert_same(copied.forward(x), expected)
        if not original_dies:
            assert_same(module(x), expected / 3)
    assert module_policies(copied) == {"": "fp32"}


def test_lazy_module() -> None:
    """It changes its class at the first call."""
    model = nn.Sequential(nn.LazyLinear(3))
    set_module_policy(model, {"0": "fp32"})
    for _ in range(2):
        assert dtype_of(model) is SINGLE
    assert type(model[0]) is nn.Linear
