"""Casts of views whose base gets a gradient or a tangent after the view was made: autograd's state is the base's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_promote as tp
from helpers.comparison import assert_same

Write = Callable[[Tensor, Tensor], Any]
View = Callable[[Tensor], Tensor]

WRITES: dict[str, Write] = {
    "add_": lambda base, source: base.add_(source),
    "copy_": lambda base, source: base.copy_(source),
    "a part": lambda base, source: base[2:].copy_(source[2:]),
}
VIEWS: dict[str, View] = {
    "slice": lambda base: base[:4],
    "transpose": lambda base: base.t(),
    "narrow": lambda base: base.narrow(0, 3, 5),
    "view of a view": lambda base: base.view(64)[8:40].view(4, 8),
}
REGIONS: dict[str, Callable[[], Any]] = {
    "weights": lambda: tp.my_autocast("cpu"),
    "persistent": lambda: tp.my_autocast("cpu", cache="persistent"),
    "all": lambda: tp.my_autocast("cpu", cache="all"),
    "none": lambda: tp.my_autocast("cpu", cache="none"),
}


def leaves() -> tuple[Tensor, torch.nn.Parameter]:
    torch.manual_seed(1)
    return torch.randn(8, 8, requires_grad=True), torch.nn.Parameter(torch.randn(8, 8))


def trained(region: Any, view: View, write: Write, dtype: torch.dtype, uses: int) -> list[Tensor | None]:
    """The products with a view that was made before its base got a gradient, and all gradients."""
    source, weight = leaves()
    with region:
        base = torch.zeros(8, 8, dtype=dtype)
        part = view(base)
        write(base, source)
        products = [torch.nn.functional.mse_loss(part @ weight, torch.ones(())) for _ in range(uses)]
        torch.stack(products).sum().backward()
    return [*products, source.grad, weight.grad]


@pytest.mark.usefixtures("nothing_persists")
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("mode", REGIONS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_was_made_before_its_base_required_a_gradient(view: str, write: str, mode: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = VIEWS[view], WRITES[write], dtype, 2
        stock = trained(tp.stock_autocast("cpu"), *given)
        assert all(result is not None for result in stock)
        assert_same(trained(REGIONS[mode](), *given), stock)


@pytest.mark.usefixtures("nothing_persists")
@pytest.mark.parametrize("mode", REGIONS)
def test_a_view_that_was_made_before_its_base_had_a_tangent(mode: str) -> None:
    def tangent(region: Any) -> Tensor:
        source, weight = leaves()
        with forward_ad.dual_level(), region:
            base = torch.ones(8, 8)
            part = base[:2]
            base.mul_(forward_ad.make_dual(source.detach(), torch.ones(8, 8)))
            return forward_ad.unpack_dual(part @ weight.detach()).tangent

    stock = tangent(tp.stock_autocast("cpu"))
    assert stock is not None
    assert_same(tangent(REGIONS[mode]()), stock)
