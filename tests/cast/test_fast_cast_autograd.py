"""The autograd node of a cast does what the node of `tensor.to(dtype)` does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_promote as tp
from helpers.casts import Region, ours, stock
from helpers.comparison import assert_same
from helpers.fast_cast import BF16, FP16, FP32, PAIRS, cast
from torch_promote.checking.comparison import compare

#: Takes a cast, `tensor.to(dtype)` or ours.
Program = Callable[[Callable[[torch.Tensor, torch.dtype], torch.Tensor]], Any]

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def leaf(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*(shape or (4, 5)), dtype=dtype).requires_grad_()


@program
def every_pair(to: Any) -> Any:
    results = []
    for source, target in PAIRS:
        x = leaf(dtype=source)
        y = to(x, target)
        (y * y).sum().backward()
        results += [y, x.grad]
    return results


@program
def strides_of_the_gradient(to: Any) -> Any:
    results = []
    for x in (leaf(2, 3, 4, 4).to(memory_format=torch.channels_last), leaf(3, 4).t(), leaf(6, 6)[:, 2:4], leaf(1, 3)):
        x = x.detach().requires_grad_()
        y = to(x, BF16)
        for gradient in (torch.ones_like(y), torch.randn(y.shape).to(BF16), torch.ones((), dtype=BF16).expand_as(y)):
            results += torch.autograd.grad(y, x, gradient, retain_graph=True)
    return results


@program
def second_derivative(to: Any) -> Any:
    x = leaf()
    y = to(x, BF16).float().pow(3).sum() + to(x, FP16).pow(3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    return first, second, third


@program
def hooks(to: Any) -> Any:
    x, seen = leaf(), []
    y = to(x, BF16)
    x.register_hook(lambda g: seen.append(g.clone()))
    y.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    y.retain_grad()
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda inputs, outputs: seen.extend([*inputs, *outputs]))
    y.grad_fn.register_prehook(lambda outputs: seen.extend(outputs))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    y.square().sum().backward()
    return seen, x.grad, y.grad


@program
def a_view_written_in_place_before(to: Any) -> Any:
    """Its node is recreated on access."""
    x = leaf()
    hidden = x * 1
    view = hidden[1:]
    hidden.mul_(3)
    to(view, BF16).square().sum().backward()
    return x.grad


@program
def grad_modes(to: Any) -> Any:
    x, results = leaf(), []
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            results.append(to(x, BF16))
    state = [(y.requires_grad, y.is_leaf, y.is_inference()) for y in results]
    with torch.inference_mode():
        of_inference = to(torch.randn(3), BF16)
        state.append((of_inference.requires_grad, of_inference.is_leaf, of_inference.is_inference()))
    return [y.clone() for y in results], [torch.tensor(flags) for flags in state]


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
