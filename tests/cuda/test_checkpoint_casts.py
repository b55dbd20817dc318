"""A checkpoint's recomputation on the device's thread runs in regions of PyTorch, which keep casts as under stock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.comparison import assert_same

USES = 5


def train(region: Callable[[], Any], use_reentrant: bool, inside: bool, seen: list[tuple[int, int]]) -> list[Any]:
    """A weight used several times in a checkpointed function; the backward runs inside of the region or after it."""
    torch.manual_seed(0)
    x = torch.randn(8, 16).cuda().requires_grad_()
    weight = torch.randn(16, 16).cuda().requires_grad_()

    def block(hidden: Tensor) -> Tensor:
        nodes = set()
        for index in range(USES):
            product = hidden @ weight
            if torch.is_grad_enabled():
                nodes.add(product.grad_fn.next_functions[1][0])  # type: ignore[union-attr]
            hidden = torch.tanh(product).float() * (index + 0.37)
        seen.append((len(nodes), tp.cache_info()["entries"]))
        return hidden

    with region():
        output = checkpoint(block, x, use_reentrant=use_reentrant)
        loss = output.float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [output.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("inside", [False, True], ids=["backward after the region", "backward in the region"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("cache", ["weights", "all"])
def test_one_node_for_each_weight(use_reentrant: bool, inside: bool, cache: str) -> None:
    ours: list[tuple[int, int]] = []
    stock: list[tuple[int, int]] = []
    results = train(lambda: tp.my_autocast("cuda", cache=cache), use_reentrant, inside, ours)
    assert_same(results, train(lambda: tp.stock_autocast("cuda"), use_reentrant, inside, stock))
    assert [nodes for nodes, _ in ours] == [nodes for nodes, _ in stock]
    assert ours[-1][0] == 1
    assert tp.cache_info()["entries"] == 0


@pytest.mark.parametrize("inside", [False, True], ids=["backward after the region", "backward in the region"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_with_overrides_too(use_reentrant: bool, inside: bool) -> None:
    seen: list[tuple[int, int]] = []
    region = functools.partial(tp.my_autocast, "cuda", overrides={"exp": torch.bfloat16})  # not used here
    results = train(region, use_reentrant, inside, seen)
    assert_same(results, train(lambda: tp.stock_autocast("cuda"), use_reentrant, inside, []))
    assert seen[-1] == (1, 2)  # the casts of the weight and of x, which is a leaf too


def test_the_casts_end_with_pytorchs_region_on_the_devices_thread() -> None:
    held: list[int] = []
    weight = torch.randn(16, 16).cuda().requires_grad_()

    def block(hidden: Tensor) -> Tensor:
        return (hidden @ weight).float() @ weight

    x = torch.randn(8, 16).cuda().requires_grad_()
    x.register_hook(lambda grad: held.append(tp.cache_info()["entries"]))  # on the device's thread, after the block
    with tp.my_autocast("cuda"):
        checkpoint(block, x, use_reentrant=True).float().sum().backward()
    assert held == [0]
