"""A checkpoint's recomputation on the device's thread runs in regions of PyTorch, which keep casts as under stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cuda_stand_in
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


# --- Programs whose backward runs inside the region, as users write them: gradients and casts are stock's.


def weights_and_input(device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    first, second = (torch.randn(16, 16).to(device).requires_grad_() for _ in range(2))
    return first, second, torch.randn(8, 16).to(device).requires_grad_()


def layers(hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Each weight several times, in the lower precision and in float32."""
    for index in range(3):
        hidden = torch.tanh(hidden @ first).float() + (hidden * first.exp()[:8]) / (9 + index)
        hidden = torch.tanh(hidden @ second @ first).float() * (index + 0.37) + first[:8]
    return hidden


def several_segments(reentrant: bool) -> list[Any]:
    first, second, x = weights_and_input()
    hidden = x
    for weights in ((first, second), (second, first), (first, first)):
        hidden = checkpoint(layers, hidden, *weights, use_reentrant=reentrant)
    hidden.square().mean().backward()
    return [hidden, x.grad, first.grad, second.grad, hidden.detach() @ first]


def uses_outside_too(reentrant: bool) -> list[Any]:
    first, second, x = weights_and_input()
    hidden = checkpoint(layers, (x @ first).float(), first, second, use_reentrant=reentrant)
    (hidden @ first @ second).float().square().mean().backward()
    return [hidden, x.grad, first.grad, second.grad]


def of_a_gradient(reentrant: bool) -> list[Any]:
    if reentrant:  # PyTorch supports no torch.autograd.grad there
        return []
    first, second, x = weights_and_input()
    loss = checkpoint(layers, x, first, second, use_reentrant=False).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    return [gradient, x.grad, first.grad, second.grad]


class UsesItsWeightAgain(torch.autograd.Function):
    """Casts the weight in its backward, on the device's thread, where no region is open."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        for _ in range(3):
            grad = torch.tanh(torch.nn.functional.linear(grad, weight)).float()
        return grad, grad.t() @ x


def a_backward_that_casts(reentrant: bool) -> list[Any]:
    first, second, x = weights_and_input()
    hidden = (x @ first).float()
    for weight in (first, second, first):
        hidden = UsesItsWeightAgain.apply(hidden, weight)
    hidden.square().mean().backward()
    return [x.grad, first.grad, second.grad]


INSIDE: list[Callable[[bool], list[Any]]] = [
    several_segments,
    uses_outside_too,
    of_a_gradient,
    a_backward_that_casts,
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("program", INSIDE, ids=lambda program: program.__name__)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradients_and_casts_are_stocks(program: Callable[[bool], list[Any]], use_reentrant: bool) -> None:
    with cuda_stand_in.counting() as expected, torch.autocast("cuda"):
        right = program(use_reentrant)
    with cuda_stand_in.counting() as found, tp.my_autocast("cuda"):
        results = program(use_reentrant)
    assert_same(results, right)
    assert found.kernels - expected.kernels == {}
    assert found.total <= expected.total
    assert len(found.casts) <= len(expected.casts) + 2 * 2  # two in vain for each weight that a region begins with


def test_the_forwards_casts_are_freed_with_the_first_recomputation() -> None:
    """As under stock, where the end of a region in any thread clears the cache."""
    held: list[int] = []
    large = torch.zeros(512, 512, device="cuda", requires_grad=True)
    x = torch.zeros(1, 512, device="cuda", requires_grad=True)

    def block(hidden: Tensor) -> Tensor:
        return (hidden @ large).float()

    def look(grad: Tensor) -> None:
        held.append(torch.cuda.memory_allocated())

    with tp.my_autocast("cuda"), torch.no_grad():
        before = torch.cuda.memory_allocated()
        x @ large
        cast = torch.cuda.memory_allocated() - before
        with torch.enable_grad():
            output = checkpoint(block, x, use_reentrant=True)
            x.register_hook(look)  # after the recomputation
            held.append(torch.cuda.memory_allocated())
            output.sum().backward()
    assert cast >= 2 * 512 * 512
    gradient = 4 * 512 * 512
    assert held[0] - held[1] + gradient > cast / 2
