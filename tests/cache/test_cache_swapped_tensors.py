"""Swapped tensors: the cache holds no reference that makes swap_tensors fail where stock allows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import half, ours, stock

X = torch.linspace(-1, 1, 64).view(4, 16)


@pytest.fixture(autouse=True)
def modules_swap() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)
    tp.clear_cache()


def swap(linear: nn.Linear) -> None:
    torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.randn(16, 16)))


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "swap_tensors": swap,
    "half": lambda linear: linear.half(),
    "load_state_dict": lambda linear: linear.load_state_dict(nn.Linear(16, 16).state_dict()),
}


def outcome(region: Any, change: Callable[[nn.Linear], object], trainable: bool, grad: bool, inside: bool) -> str:
    linear = nn.Linear(16, 16).requires_grad_(trainable)
    try:
        with torch.set_grad_enabled(grad):
            with region():
                linear(X)
                if inside:
                    change(linear)
            if not inside:
                change(linear)
            with region():
                got = linear(X)
    except RuntimeError as error:
        return str(error)
    right = torch.nn.functional.linear(half(X), half(linear.weight), half(linear.bias))
    return "right" if torch.equal(got, right) else "wrong"


@pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_swaps_work_where_stock_allows_them(change: Callable[[nn.Linear], object], cache: str) -> None:
    for trainable, grad, inside in itertools.product((True, False), repeat=3):
        theirs = outcome(stock, change, trainable, grad, inside)
        mine = outcome(lambda: ours(cache=cache), change, trainable, grad, inside)
        if theirs == "right":
            assert mine == "right", (trainable, grad, inside)
    assert outcome(lambda: ours(cache=cache), change, trainable=False, grad=False, inside=True) == "right"
