"""Policies of modules under PyTorch's compilers: torch.compile, torch.export, torch.jit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.module_policies import (
    FP16,
    FP32,
    OVERRIDES,
    POLICIES,
    X,
    dtype_of,
    expected_dtype,
    model_of,
    ours,
    region,
    train,
)
from torch_promote.regions.module_policies import module_policies, remove_module_policy, set_module_policy

compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)


@POLICIES
@pytest.mark.parametrize("around", [ours, functools.partial(tp.stock_autocast, "cpu")], ids=["ours", "stock"])
@pytest.mark.parametrize("what", ["model", "module", "in place", "function with the region"])
def test_compiled(policy: Any, what: str, around: Any, fresh_dynamo: None) -> None:
    model, expected = model_of(policy), model_of(policy)
    call: Any = model
    outside = around
    if what == "model":
        call = compiled(model)
    elif what == "module":
        call = nn.Sequential(model[0], model[1], compiled(model[2]))
    elif what == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
    else:

        @compiled
        def call(x: torch.Tensor) -> torch.Tensor:
            with around():
                return model(x)

    if what == "function with the region":
        result = train(call, list(model.parameters()), lambda: ours(enabled=False))[0]
        assert_same(result, train(expected, list(expected.parameters()), outside)[0])
    else:
        result = train(call, list(model.parameters()), outside)
        assert_same(result, train(expected, list(expected.parameters()), outside))
        assert result[0].dtype is expected_dtype(policy)


def test_compiled_again_when_the_policy_changes(fresh_dynamo: None) -> None:
    model = model_of()
    call = compiled(model)
    dtypes = [dtype_of(call)]
    for policy in ("fp32", OVERRIDES, {"linear": "float64"}, "fp32", None):
        if policy is None:
            remove_module_policy(model)
        else:
            set_module_policy(model, {"2": policy})
        dtypes.append(dtype_of(call))
    assert dtypes == [
        torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32, torch.bfloat16,
    ]  # fmt: skip


@POLICIES
def test_compiled_with_a_graph_break(policy: Any, fresh_dynamo: None) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.first(x)
            torch._dynamo.graph_break()
            return self.second(first)

    def model() -> nn.Module:
        torch.manual_seed(0)
        result = nn.Sequential(nn.Linear(4, 4), Breaks())
        set_module_policy(result, {"1": policy})
        return result

    broken, plain = model(), model()
    result = train(torch.compile(broken, backend="aot_eager"), list(broken.parameters()))
    assert_same(result, train(plain, list(plain.parameters())))


class Whole(nn.Module):
    """A model with the region in it, as export wants it."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.inner = model_of(policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return self.inner(x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "off"])
@pytest.mark.usefixtures("nothing_installed")  # which an exported program's regions become
def test_exported(policy: Any, strict: bool, fresh_dynamo: None) -> None:
    model = Whole(policy)
    if policy == "off":
        model.inner[2].to(torch.bfloat16)
    x = torch.randn(2, 4)
    exported = torch.export.export(model, (x,), strict=strict).module()
    assert_same(exported(x), model(x))


def test_overrides_cannot_be_exported(fresh_dynamo: None) -> None:
    with ours(), pytest.raises(tp.errors.RegionError, match="cannot be exported"):
        torch.export.export(model_of(OVERRIDES), (torch.ones(2, 4),))


@POLICIES
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_traced_by_torch_jit(policy: Any) -> None:
    model, x = model_of(policy), torch.randn(2, 4)
    with ours(cache_enabled=False):  # the traced code contains the casts, and has to be called outside of regions
        traced = torch.jit.trace(model, x, check_trace=False)
        expected = model(x)
    assert_same(traced(x), expected)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_not_scripted() -> None:
    model = nn.Sequential(Twice())
    set_module_policy(model, {"0": "fp32"})
    with pytest.raises(Exception, match=r"torch\.jit\.script cannot compile the forward of a module with a policy"):
        torch.jit.script(model)


def test_traced_by_fx() -> None:
    """Modules that a graph calls keep their policies; a policy is not traced into the graph."""
    model = model_of("fp32")
    traced = torch.fx.symbolic_trace(model)
    assert module_policies(traced) == {"2": "fp32"}
    assert dtype_of(traced) is torch.float32
    model = nn.Sequential(Twice())
    set_module_policy(model, {"0": "fp32"})
    with pytest.raises(tp.errors.RegionError, match=r"torch\.fx traces a Twice with a policy\."):
        torch.fx.symbolic_trace(model)
    remove_module_policy(model)
    torch.fx.symbolic_trace(model)


@pytest.mark.parametrize("key", ["2", "_orig_mod.2", "[2-9]", "**.2"])
def test_names_are_those_of_the_original_model(key: str) -> None:
    model = torch.compile(model_of(), backend="eager")
    assert dtype_of(model) is torch.bfloat16
    tp.set_module_policy(model, {key: "fp32"})
    assert dtype_of(model) is torch.float32
    tp.remove_module_policy(model, key)
    assert dtype_of(model) is torch.bfloat16


# --- Module tables of a policy under torch.compile


def test_compiled_once_for_each_policy(fresh_dynamo: None) -> None:
    model = model_of()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        for policy, dtype in ((FP32, torch.float32), (FP16, torch.float16)):
            with region(policy, model):  # made anew each time
                assert call(X).dtype is dtype
        assert dtype_of(call) is torch.bfloat16
    assert counter.frame_count == 3


def test_a_region_that_a_compiled_function_enters(fresh_dynamo: None) -> None:
    model = model_of()
    around = region(FP32, model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with around:
            inside = model(x)
        with tp.my_autocast("cpu"):
            return inside, model(x)

    assert [result.dtype for result in step(X)] == [torch.float32, torch.bfloat16]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def applied(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", policy=FP16):
            result: torch.Tensor = model(x)
            return result

    with FP16.apply_to(model):
        assert applied(X).dtype is torch.float16


def test_a_region_that_a_compiled_function_makes(fresh_dynamo: None) -> None:
    model = model_of()

    def step(x: torch.Tensor) -> torch.Tensor:
        with region(FP32, model):
            result: torch.Tensor = model(x)
            return result

    assert torch.compile(step, backend="aot_eager")(X).dtype is torch.float32
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"changes modules: make the region outside"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(X)
