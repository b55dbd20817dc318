"""The autograd node of a cast does what the node of `tensor.to(dtype)` does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.casts import Region, ours, stock
from helpers.comparison import assert_same
from helpers.fast_cast import BF16, FP16, FP32, cast
from torch_promote.checking.comparison import compare

#: Takes a cast, `tensor.to(dtype)` or ours.
Program = Callable[[Callable[[torch.Tensor, torch.dtype], torch.Tensor]], Any]

PROGRAMS: dict[str, Program] = {}


def leaf(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*(shape or (4, 5)), dtype=dtype).requires_grad_()


@pytest.mark.parametrize("run", PROGRAMS.values(), ids=PROGRAMS)
def test_gives_what_to_gives(run: Program) -> None:
    results = []
    for to in (torch.Tensor.to, cast):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(run(to))
    assert_same(results[1], results[0])


def test_the_node_is_the_casts() -> None:
    """Otherwise the programs above would compare `to` with itself."""
    y = cast(leaf(), BF16)
    assert y.grad_fn is not None
    assert y.grad_fn.name() == "CastBackward"
    assert compare([torch.ones(1)], [torch.zeros(1)], "result")


def test_an_error_names_the_line_of_the_forward_in_anomaly_mode() -> None:
    def failing(region: Region) -> str:
        x = leaf()
        with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly(check_nan=True):
            warnings.simplefilter("always")
            with region():
                y = torch.mm(x * 1, x.detach().t())  # the line of the forward
            assert y.grad_fn is not None
            node = y.grad_fn.next_functions[0][0]
            node.register_prehook(lambda grads: tuple(torch.full_like(g, float("nan")) for g in grads))
            with pytest.raises(RuntimeError, match=f"Function '{node.name()}' returned nan values"):
                y.sum().backward()
        return "".join(str(warning.message) for warning in caught)

    for region in (stock, ours):
        assert "the line of the forward" in failing(region)


def test_the_graph_is_let_go() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    x = leaf()
    y = cast(x * 1, BF16)
    storage = StorageWeakRef(y.untyped_storage())
    loss = y.square().sum()
    del y
    assert not storage.expired()
    loss.backward()
    assert storage.expired()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sums_of_gradients_have_stocks_order(dtype: torch.dtype) -> None:
    """The engine orders them by the sequence numbers of the nodes, which the bits of a sum of many show."""

    def gradients(region: Region) -> Any:
        torch.manual_seed(0)
        x, ws = leaf(8, 8), [leaf(8, 8) for _ in range(5)]
        with region(dtype):
            hidden = x * 1
            outputs = [hidden.sin(), torch.mm(hidden, hidden), hidden.exp(), *(torch.mm(hidden, w) for w in ws)]
            outputs += [hidden.cos(), torch.mm(hidden, ws[0])]
            loss = sum(torch.mm(output, hidden).float().square().sum() for output in outputs)
        loss.backward()  # type: ignore[union-attr]
        return x.grad, [w.grad for w in ws]

    assert_same(gradients(ours), gradients(stock))


# --- views whose base gets a gradient or a tangent after the view was made: autograd's state is the base's

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
