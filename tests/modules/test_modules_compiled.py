"""Policies of modules of a compiled model, which torch.compile wraps in a module of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp

FP32, BF16, HALF = torch.float32, torch.bfloat16, torch.float16


class Net(nn.Module):
    """A model that returns the dtypes of its parts' results."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
        y = self.body(x)
        return y.dtype, self.head(y).dtype


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def dtypes(model: Any) -> object:
    with tp.my_autocast("cpu"):
        return model(torch.ones(2, 4))


@pytest.mark.parametrize("key", ["head", "_orig_mod.head", "h*d", "**.head"])
def test_names_are_those_of_the_original_model(key: str) -> None:
    model = compiled(Net())
    assert dtypes(model) == (BF16, BF16)
    tp.set_module_policy(model, {key: "fp32"})
    assert dtypes(model) == (BF16, FP32)
    tp.remove_module_policy(model, key)
    assert dtypes(model) == (BF16, BF16)


def test_a_compiled_part() -> None:
    model = Net()
    model.body = compiled(model.body)
    tp.set_module_policy(model, {"body.0": "fp32"})
    assert dtypes(model) == (FP32, BF16)
    assert list(tp.module_policies(model)) == ["body._orig_mod.0"]
