"""Optimizers whose steps are captured in a CUDA graph: a replay writes to weights without a notification."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import cuda_stand_in
import torch_promote as tp

ours = functools.partial(tp.my_autocast, "cuda", dtype=torch.bfloat16, cache="persistent")


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    tp.clear_cache()
    yield
    tp.clear_cache()


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4, device="cuda"))


def use(w: torch.Tensor) -> int:
    """The number of persistent casts after a use."""
    with ours(), torch.no_grad():
        torch.eye(4, device="cuda") @ w
    return tp.cache_info()["persistent_entries"]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("before", [False, True], ids=["first the step", "first a use"])
def test_a_weight_that_is_stepped_during_a_capture_is_never_persistent(before: bool) -> None:
    w, other = weight(), weight()
    w.grad = torch.ones_like(w)
    optimizer = torch.optim.SGD([w], lr=1.0)
    if before:
        assert use(w) == 1
    with cuda_stand_in.capturing():
        optimizer.step()
    assert use(w) == 0
    w.data = torch.ones(4, 4, device="cuda")  # the graph writes to the old data
    assert use(w) == 1
    assert use(other) == 2


@pytest.mark.usefixtures("stand_in")
def test_a_step_outside_of_captures_marks_nothing() -> None:
    w = weight()
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=1.0).step()
    assert use(w) == 1
