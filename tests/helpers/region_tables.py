"""Policies with module tables, their regions, and the state that a region may leave on a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torch_promote as tp

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
