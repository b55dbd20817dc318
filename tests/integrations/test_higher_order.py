"""Higher-order operators under our regions and in crosschecks: they fall through on our keys."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import flex_attention

import torch_promote as tp
from helpers.comparison import assert_same

X, W = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(1, 2, 16).view(4, 4)


def cond() -> Any:
    return torch.cond(torch.tensor(True), lambda a: a @ W, lambda a: (a @ W).sin(), (X,))


def loop() -> Any:
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, (a @ W).float()), (torch.tensor(0), X))


def mapped() -> Any:
    return map_over(lambda row: row + 1, X)


def scanned() -> Any:
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(4), X)


def attention() -> Any:
    query = torch.linspace(-1, 1, 256).view(1, 1, 16, 16)
    return flex_attention(query, query, query)


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """These are compiled, each into a graph that knows of the region."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


operators = pytest.mark.parametrize("run", [cond, loop, mapped, scanned, attention])


@operators
def test_the_result_is_stocks(run: Callable[[], Any]) -> None:
    with tp.stock_autocast("cpu"):
        stock = run()
    torch._dynamo.reset()
    with tp.my_autocast("cpu"):
        ours = run()
    assert_same(ours, stock)


@pytest.mark.parametrize("level", ["dtype", "bits"])
@operators
def test_a_crosscheck_changes_nothing(run: Callable[[], Any], level: Any) -> None:
    with tp.my_autocast("cpu"):
        plain = run()
    torch._dynamo.reset()
    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        checked = run()
    assert report.mismatches == []
    assert_same(checked, plain)
    torch._dynamo.reset()
    with tp.crosscheck(level=level) as report:
        run()
    assert report.mismatches == []


class Operator(HigherOrderOperator):
    """One with a kernel for all tensors, and nothing for autograd."""

    def __init__(self, name: str, kernel: Callable[..., Any]) -> None:
        super().__init__(f"torch_promote_test_{name}")
        self.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(kernel)
        self.fallthrough(torch._C.DispatchKey.AutogradCPU)

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


@pytest.fixture(autouse=True)
def no_operator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test defines is forgotten."""
    monkeypatch.setattr(torch._ops, "_higher_order_ops", dict(torch._ops._higher_order_ops))


def test_an_operator_that_is_defined_later() -> None:
    with tp.crosscheck():
        pass  # from now on the tap has its key
    twice = Operator("twice", lambda function, x: function(function(x)))
    with tp.stock_autocast("cpu"):
        stock = twice(lambda a: a @ W, X)
    with tp.my_autocast("cpu"):
        assert_same(twice(lambda a: a @ W, X), stock)
    with tp.crosscheck() as report, tp.my_autocast("cpu"):
        assert_same(twice(lambda a: a @ W, X), stock)
    assert report.with_policy["aten.matmul.default"] == 2
