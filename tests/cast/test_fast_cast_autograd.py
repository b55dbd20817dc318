"""The autograd node of a cast does what the node of `tensor.to(dtype)` does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

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
