"""Steps that are one product in a region, and the dtype that it has in a run."""

from __future__ import annotations

from typing import Any

import torch

import torch_promote as tp
from torch_promote.numerics.step_runs import StepRuns

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "OFF", "STOCK", "X", "dtype_of", "product", "stock_product"]

OFF, STOCK = tp.Policy.named("off"), tp.Policy.stock()
BFLOAT16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16
X = torch.ones(2, 2)


def product() -> torch.Tensor:
    """In a region of ours."""
    with tp.my_autocast("cpu"):
        return X @ X


def stock_product() -> torch.Tensor:
    """In a region of torch.autocast."""
    with torch.autocast("cpu"):
        return X @ X


def dtype_of(runs: StepRuns, policy: tp.Policy, **more: Any) -> torch.dtype:
    """The dtype of a step's result under a policy."""
    [result] = runs.run(policy, **more)
    [tensor] = result.values()
    return tensor.dtype
