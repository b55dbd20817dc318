"""The hook after optimizer steps, with optimizers whose parameter groups have unusual contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import torch_promote  # noqa: F401 (installs the hook)


class Stepped(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        return "stepped"


GROUPS: dict[str, Callable[[Any], list[Any]]] = {
    "no group": lambda w: [],
    "no weights": lambda w: [{"params": []}],
    "a group without weights": lambda w: [{"lr": 1}],
    "something else among the weights": lambda w: [{"params": [None, w, "x"]}],
    "an iterator": lambda w: [{"params": iter([w])}],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_step_returns_whatever_the_groups_hold(groups: Callable[[Any], list[Any]]) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Stepped([weight])
    optimizer.param_groups = groups(weight)
    assert optimizer.step() == "stepped"


def test_a_step_on_fake_weights_of_a_device_that_pytorch_lacks() -> None:
    with FakeTensorMode():
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
    assert weight._version == 1
