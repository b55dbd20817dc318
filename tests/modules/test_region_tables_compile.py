"""Module tables of a policy under torch.compile."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.testing

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.module_policies import dtype_of, model_of, train
from helpers.region_tables import FP16, FP32, X, region


@pytest.mark.parametrize("policy", [FP32, FP16], ids=["fp32", "overrides"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model(policy: tp.Policy, in_place: bool, fresh_dynamo: None) -> None:
    model, plain = model_of(), model_of()
    call: Any = model
    if in_place:
        model.compile(backend="aot_eager")
    else:
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    result = train(call, list(model.parameters()), functools.partial(region, policy, model))
    assert_same(result, train(plain, list(plain.parameters()), functools.partial(region, policy, plain)))
    assert dtype_of(call) is torch.bfloat16


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
