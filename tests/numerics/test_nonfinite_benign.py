"""`find_nonfinite`: which infinite values and NaNs are faults, and which are benign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from helpers.nonfinite_blocks import HALF, INF, NAN, big, find, nothing_is_left, origin_of
from torch_promote.numerics.find_nonfinite import find_nonfinite

__all__ = ["nothing_is_left"]  # a fixture


def test_a_composite_op_may_use_infinite_values() -> None:
    x = torch.randn(1, 2, 4, 8)
    hidden = torch.ones(4, 4).triu(1) == 0
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert origin_of(lambda: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=hidden)) is None
        assert origin_of(lambda: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: big(0.0).masked_fill(torch.eye(4) > 0, -INF),
        lambda: big(0.0).masked_fill_(torch.eye(4) > 0, -INF),
        lambda: torch.where(torch.eye(4) > 0, -INF, 0.0),
        lambda: torch.full((2,), -INF).exp(),
        lambda: torch.tensor(-INF) + 1,
        lambda: torch.full_like(torch.ones(2), INF).neg(),
        lambda: big(1.0).fill_(-INF).triu(1).add(1),
        lambda: nn.functional.pad(big(1.0), (1, 1), value=-INF).softmax(-1),
        lambda: big(1.0).clamp(max=INF),
        lambda: torch.full((2, 2), torch.finfo(torch.float32).min).triu(1).half().softmax(-1),
        lambda: (big(-100.0, HALF) + big(torch.finfo(HALF).min, HALF).triu(1)).softmax(-1),
        lambda: nn.Transformer.generate_square_subsequent_mask(3).softmax(-1),
        lambda: torch.full((3,), -INF).logsumexp(0),
        lambda: big(1.0).scatter(1, torch.zeros(4, 1, dtype=torch.int64), -INF),
        lambda: big(1.0).index_fill(0, torch.tensor([1]), -INF).amax(1),
    ],
)
def test_masks_are_no_alarm(make: Callable[[], Tensor]) -> None:
    report = find(make)
    assert not report.found, str(report)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.full((2,), -INF).softmax(-1),
        lambda: torch.full((2,), -INF) * 0,
        lambda: torch.full((2,), NAN),
        lambda: torch.tensor(INF) - INF,
        lambda: big(1.0).masked_fill(torch.eye(4) > 0, NAN),
        lambda: torch.zeros(2) / 0,
    ],
)
def test_a_nan_always_is_an_alarm(make: Callable[[], Tensor]) -> None:
    report = find(make)
    assert report.origin is not None, str(report)
    assert report.origin.kind == "mathematics", str(report)


def test_infinite_values_that_end_in_integers_are_no_alarm() -> None:
    def bucket(position: Tensor) -> Tensor:
        large = (torch.log(position.float() / 8) / 2.77 * 8).to(torch.int64)
        return torch.where(position < 8, position, large.clamp(max=15))

    positions = torch.arange(20)
    report = find(lambda: (bucket(positions), bucket(positions)))
    assert not report.found, str(report)
    assert [(one.kind, one.op, one.count) for one in report.benign] == [("integers", "aten::log", 2)]
    several = find(lambda: [log.long() for log in [torch.zeros(2).log(), torch.zeros(2).log2()]])
    assert not several.found, str(several)
    # Only some of the values end there.
    assert origin_of(lambda: [log := torch.log(torch.zeros(2)), log.long()][0].sum()) is not None
    assert origin_of(lambda: (bucket(positions), torch.zeros(2).log())) is not None
    assert origin_of(lambda: (bucket(positions), torch.zeros(2).div(0))) == (
        "aten::div",
        "aten::div.Tensor",
        "mathematics",
    )
    assert origin_of(lambda: torch.log(torch.zeros(2)).relu()) is not None


def test_infinite_values_in_a_sparse_tensor_are_an_alarm() -> None:
    """They cannot be followed there."""
    sparse = torch.tensor([-1.0, 1.0]).to_sparse()
    assert origin_of(lambda: sparse.log1p()) == ("aten::log1p", "aten::log1p", "mathematics")
    assert origin_of(lambda: torch.log(torch.zeros(2)).to_sparse()) == ("aten::log", "aten::log", "mathematics")


def test_an_infinite_value_of_the_data_beside_a_nan_is_passed_on() -> None:
    data = torch.tensor([NAN, 1.0])
    assert origin_of(lambda: torch.fmax(data, torch.tensor([INF, 2.0]))) is None


LOWEST = torch.full((4, 4), torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.matmul(LOWEST, torch.ones(4, 4)),
        lambda: nn.functional.linear(torch.ones(4, 4), torch.ones(4, 4), LOWEST[0]),
        lambda: nn.functional.conv1d(torch.ones(1, 4, 4), torch.ones(4, 4, 1), LOWEST[0]),
    ],
)
def test_the_lowest_number_that_autocast_casts_for_a_composite_op(call: Callable[[], Any]) -> None:
    """It stands for -inf in masks, and the ops inside get -inf. Other numbers of that size are a fault."""
    with find_nonfinite() as report, tp.my_autocast("cpu", torch.float16):
        call()
    assert (report.origin, {one.kind for one in report.benign}) == (None, {"mask"})
    with find_nonfinite() as report, tp.my_autocast("cpu", torch.float16):
        torch.matmul(LOWEST / 4, torch.ones(4, 4))
    assert report.origin is not None
    assert report.origin.kind == "overflow in a cast"
