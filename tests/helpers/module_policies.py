"""A model with module policies, and a training step of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote.regions.module_policies import set_module_policy

OVERRIDES = {"linear": "float16"}
POLICIES = pytest.mark.parametrize("policy", ["fp32", OVERRIDES], ids=["fp32", "overrides"])


ours = functools.partial(tp.my_autocast, "cpu")


def model_of(policy: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    if policy is not None:
        set_module_policy(model, {"2": policy})
    return model


def dtype_of(model: Callable[..., torch.Tensor], around: Callable[[], Any] = ours) -> torch.dtype:
    with around():
        return model(torch.ones(2, 4)).dtype


def expected_dtype(policy: Any) -> torch.dtype:
    return torch.float32 if policy == "fp32" else torch.float16


def train(model: Callable[..., torch.Tensor], parameters: list[Any], around: Callable[[], Any] = ours) -> list[Any]:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for parameter in parameters:
        parameter.grad = None
    with around():
        output = model(x)
        output.float().square().sum().backward()  # a compiled function has the backward of the region of its call
    return [output, x.grad, *(parameter.grad for parameter in parameters)]


LOW, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
X = torch.ones(2, 4)


def policy_of(tables: Any) -> tp.Policy:
    return tp.Policy.stock().override_modules(tables)


# For helpers.module_policies.model_of.
FP32 = policy_of({"2": "fp32"})
FP16 = policy_of({"2": {"linear": "float16"}})


def region(policy: Any, model: nn.Module | None, **more: Any) -> Any:
    return tp.my_autocast("cpu", policy=policy, model=model, **more)


def state_of(model: nn.Module) -> dict[str, Any]:
    """The attributes and forward pre-hooks of every module."""
    return {
        name: [dict(vars(module)), dict(module._forward_pre_hooks), dict(module._forward_pre_hooks_with_kwargs)]
        for name, module in model.named_modules()
    }
