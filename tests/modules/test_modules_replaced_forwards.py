"""Module policies with libraries that check `type(module)` or replace `module.forward`."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers import accelerate_hooks
from helpers.comparison import assert_same
from helpers.module_policies import OVERRIDES, POLICIES, dtype_of, expected_dtype, model_of, ours, train
from torch_promote.regions.module_policies import module_policies, remove_module_policy, set_module_policy

HALF, SINGLE = torch.bfloat16, torch.float32


# --- quantization asks for type(module)


@pytest.fixture
def quantization() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
        import torch.ao.quantization

        yield torch.ao.quantization


def test_the_class_stays() -> None:
    model = model_of("fp32")
    assert type(model[2]) is nn.Linear
    remove_module_policy(model)
    assert "forward" not in vars(model[2])


@pytest.mark.skipif(not torch.backends.quantized.supported_engines[1:], reason="PyTorch has no engine for int8")
def test_quantize_dynamic(quantization: Any) -> None:
    """It replaces the module by one of another class, which gets the policy."""
    x = torch.randn(2, 4)
    expected = quantization.quantize_dynamic(model_of(), {nn.Linear})
    quantized = quantization.quantize_dynamic(model_of("fp32"), {nn.Linear})
    assert [type(module) for module in quantized] == [type(module) for module in expected]
    assert type(quantized[2]) is not nn.Linear
    assert module_policies(quantized) == {"2": "fp32"}
    assert_same(quantized(x), expected(x))
    with ours():
        assert_same(quantized[2](x.to(HALF)), expected[2](x.to(HALF).float()))
    remove_module_policy(quantized)
    assert_same(quantized(x), expected(x))


def test_prepare_qat(quantization: Any) -> None:
    """Its observers accept only float32."""
    models = [model_of(), model_of()]
    for model in models:
        model.train().qconfig = quantization.get_default_qat_qconfig()
    set_module_policy(models[0], {nn.Linear: "fp32"})
    prepared, expected = (quantization.prepare_qat(model) for model in models)
    set_module_policy(expected, {nn.Linear: "fp32"})
    assert [type(module) for module in prepared.modules()] == [type(module) for module in expected.modules()]
    assert type(prepared[2]).__module__.endswith("qat.modules.linear")
    assert module_policies(prepared) == {"0": "fp32", "2": "fp32"}
    assert_same(train(prepared, list(prepared.parameters())), train(expected, list(expected.parameters())))


def test_fuse_modules(quantization: Any) -> None:
    """It selects patterns by class, and moves the hooks of the modules to the fused one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = quantization.fuse_modules_qat(model, [["0", "1"]])
    set_module_policy(model, {"0": "fp32"})
    fused = quantization.fuse_modules_qat(model, [["0", "1"]])
    assert type(fused[0]) is type(expected[0])
    assert dtype_of(fused) is SINGLE, "the Linear inside kept its policy"


# --- Accelerate replaces forward, and restores it


class Doubles(accelerate_hooks.ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tuple(arg * 2 for arg in args), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 1


@POLICIES
@pytest.mark.parametrize("policy_first", [True, False])
@pytest.mark.parametrize("removed_first", ["policy", "hook"])
def test_accelerate_hook(policy: Any, policy_first: bool, removed_first: str) -> None:
    model = model_of(policy if policy_first else None)
    accelerate_hooks.add_hook_to_module(model[2], Doubles())
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
        accelerate_hooks.remove_hook_from_module(model[2])
    else:
        accelerate_hooks.remove_hook_from_module(model[2])
        if policy_first:
            assert dtype_of(model) is expected_dtype(policy)
        remove_module_policy(model)
    with ours():
        assert_same(model(x), model_of()(x))
    set_module_policy(model, {"2": policy})
    assert dtype_of(model) is expected_dtype(policy)
    remove_module_policy(model)
    assert dtype_of(model) is HALF


@POLICIES
def test_accelerate_hook_stays_while_the_policy_changes(policy: Any) -> None:
    model = model_of({"linear": "float64"})
    accelerate_hooks.add_hook_to_module(model[2], Doubles())
    for _ in range(3):
        set_module_policy(model, {"2": policy})
        assert dtype_of(model) is expected_dtype(policy)
        remove_module_policy(model)
        assert dtype_of(model) is HALF


@pytest.mark.parametrize("policy_first", [True, False])
@pytest.mark.parametrize("target", ["the model", "a module"])
def test_accelerate_prepare(policy_first: bool, target: str) -> None:
    """It opens an autocast region in a new forward of the model, and undoes that by unwrapping functions."""
    key = "" if target == "the model" else "2"
    model, x = model_of(), torch.ones(2, 4)
    seen: list[bool] = []
    model[2].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    if policy_first:
        set_module_policy(model, {key: "fp32"})
    accelerate_hooks.prepare(model)
    if not policy_first:
        set_module_policy(model, {key: "fp32"})
    for _ in range(2):
        assert model(x).dtype is SINGLE
    # Accelerate's region is inside of the policy's if it came first.
    assert seen == [not (target == "the model" and policy_first)] * 2
    if policy_first:
        accelerate_hooks.unwrap(model)
        with ours():
            model(x)
        assert seen.pop() is (target == "a module")
    remove_module_policy(model)
    assert model(x).dtype is SINGLE
    assert seen.pop() is not policy_first
    if not policy_first:
        accelerate_hooks.unwrap(model)
    with ours():
        assert model(x).dtype is HALF


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


def test_instance_forward_that_is_the_class_one() -> None:
    """Lightning assigns a module's bound forward to the module."""
    model = model_of()
    model[2].forward = model[2].forward
    set_module_policy(model, {"2": "fp32"})
    assert dtype_of(model) is SINGLE
    remove_module_policy(model)
    assert dtype_of(model) is HALF


def test_generator_as_instance_forward() -> None:
    model = model_of()

    def forward(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x

    model[2].forward = forward
    with pytest.raises(tp.PolicyError, match="its forward is a generator or a coroutine"):
        set_module_policy(model, {"2": "fp32"})


class Static(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ x


def test_static_forward() -> None:
    model = nn.Sequential(Static())
    set_module_policy(model, {"0": "fp32"})
    with ours():
        assert model(torch.ones(2, 2)).dtype is SINGLE
        assert copy.deepcopy(model)(torch.ones(2, 2)).dtype is SINGLE
    remove_module_policy(model)
    assert "forward" not in vars(model[0])


def test_class_whose_forward_is_replaced() -> None:
    """The class's forward is looked up at each call, as without a policy."""

    class Own(nn.Linear):
        pass

    module = Own(4, 4)
    set_module_policy(module, {"": "fp32"})
    Own.forward = lambda self, x: (x, torch.is_autocast_enabled("cpu"))  # type: ignore[assignment, method-assign]
    x = torch.ones(1, dtype=HALF)
    with ours():
        result, enabled = module(x)
    assert (result.dtype, enabled) == (SINGLE, False)


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


def test_assigned_forward() -> None:
    """A forward that does not call the one before it has the policy when that is set again."""
    model = model_of("fp32")
    model[2].forward = lambda x: x @ x.t()
    assert dtype_of(model) is HALF
    set_module_policy(model, {"2": "fp32"})
    assert dtype_of(model) is SINGLE
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
@pytest.mark.parametrize("then", ["called", "copied", "pickled", "saved", "called directly"])
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
    elif then == "saved":
        torch.save(copied, file := io.BytesIO())
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    x, expected = torch.ones(2, 2, dtype=HALF), torch.full((2, 2), 6.0)
    with ours():
        for _ in range(2):
            assert_same(copied(x), expected)
            if then == "called directly":
                assert_same(copied.forward(x), expected)
        if not original_dies:
            assert_same(module(x), expected / 3)
    assert module_policies(copied) == {"": "fp32"}


def test_shallow_copy_compiled(fresh_dynamo: None) -> None:
    module = Scales()
    set_module_policy(module, {"": "fp32"})
    copied = copy.copy(module)
    copied.factor = 3
    call = torch.compile(copied, backend="eager", fullgraph=True)
    with ours():
        for _ in range(2):
            assert_same(call(torch.ones(2, 2, dtype=HALF)), torch.full((2, 2), 6.0))


@POLICIES
def test_compiled_with_an_accelerate_hook(policy: Any, fresh_dynamo: None) -> None:
    model = model_of(policy)
    accelerate_hooks.add_hook_to_module(model[2], Doubles())
    call = torch.compile(model, backend="eager", fullgraph=True)
    with ours():
        assert_same(call(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert dtype_of(call) is expected_dtype(policy)


def test_lazy_module() -> None:
    """It changes its class at the first call."""
    model = nn.Sequential(nn.LazyLinear(3))
    set_module_policy(model, {"0": "fp32"})
    for _ in range(2):
        assert dtype_of(model) is SINGLE
    assert type(model[0]) is nn.Linear


def test_fx_refuses_a_root_with_a_policy() -> None:
    """It would trace the forward of the root's class."""
    model = nn.Sequential(nn.ReLU())
    set_module_policy(model, {"": "fp32"})
    with pytest.raises(tp.errors.RegionError, match=r"torch\.fx traces a Sequential with a policy\."):
        torch.fx.symbolic_trace(model)
    remove_module_policy(model)
    torch.fx.symbolic_trace(model)


def test_a_replica_whose_forward_is_called_directly_uses_its_own_weights() -> None:
    module = nn.Linear(2, 2)
    set_module_policy(module, {"": "fp32"})
    replica: Any = module._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(2, 2), torch.zeros(2)
    assert torch.equal(replica.forward(torch.ones(1, 2)), torch.zeros(1, 2))
    assert not torch.equal(module.forward(torch.ones(1, 2)), torch.zeros(1, 2))


def test_a_forward_in_the_place_of_an_attribute_has_no_function() -> None:
    """Code that rebinds methods asks for their function."""
    linear = nn.Linear(2, 2)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    set_module_policy(linear, {"": "fp32"})
    with pytest.raises(AttributeError, match="a forward that replaced an attribute of the module has no function"):
        _ = linear.forward.__func__  # type: ignore[attr-defined]
    assert not hasattr(linear.forward, "__func__")
