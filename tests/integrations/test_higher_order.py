"""Higher-order operators under our regions: they fall through on our key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
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


pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("run", [cond, loop, mapped, scanned, attention])
def test_the_result_is_stocks(run: Callable[[], Any]) -> None:
    with tp.stock_autocast("cpu"):
        stock = run()
    torch._dynamo.reset()
    with tp.my_autocast("cpu"):
        ours = run()
    assert_same(ours, stock)
