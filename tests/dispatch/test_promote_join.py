"""The promote policy where stock's raises or depends on the arguments' order; ours does neither."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.rows import ROWS, listed, overload, tensors_of
from helpers.side_by_side import Bound, Outcome, Watch, assert_alike, run
from torch_promote.parity.row_samples import SAMPLES, Make
from torch_promote.policy.op_table import CastPolicy, Row

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
FLOAT8 = torch.float8_e4m3fn

#: The rows with the policy, on each device type that has it. Those of CUDA run on fake tensors.
PROMOTE = [
    (row, device)
    for row, device in itertools.product(ROWS, ("cpu", "cuda"))
    if listed(row, device) and row.policy(device) is CastPolicy.promote
]
each_row = pytest.mark.parametrize(("row", "device"), PROMOTE, ids=[f"{row.op}-{device}" for row, device in PROMOTE])

pytestmark = pytest.mark.usefixtures("pretend_cuda")


def bind(row: Row, device: str, *dtypes: torch.dtype) -> Bound:
    """The row's first sample call, with these dtypes in alternation."""
    args, kwargs = SAMPLES[row.name][0](Make(dtypes, device, fake=device == "cuda"))
    return overload(row), args, kwargs


def ours(device: str, lower: torch.dtype, bound: Bound) -> Outcome:
    return run(tp.my_autocast(device, lower), bound, Watch(stand_in=device == "cuda"))


def stock(device: str, lower: torch.dtype, bound: Bound) -> Outcome:
    return run(tp.stock_autocast(device, lower), bound, Watch(stand_in=device == "cuda"))


def cast(bound: Bound, dtype: torch.dtype) -> Bound:
    """The same call with every floating tensor in one dtype."""

    def to(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    func, args, kwargs = bound
    return func, *tree_map_only(torch.Tensor, to, (args, kwargs))


def casts(outcome: Outcome) -> list[tuple[str, ...]]:
    return [given for name, _, given in outcome.ops or [] if name == "aten._to_copy.default"]


def assert_runs_in(dtype: torch.dtype, row: Row, device: str, lower: torch.dtype, bound: Bound) -> None:
    """Fails unless ours equals the op on inputs of that dtype with autocast off."""
    outcome = ours(device, lower, bound)
    assert outcome.error is None
    plain = run(tp.stock_autocast(device, enabled=False), cast(bound, dtype), Watch(stand_in=device == "cuda"))
    assert plain.error is None
    assert_same(outcome.result, plain.result, row.name)
    assert [op for op in outcome.ops or [] if op[0] != "aten._to_copy.default"] == [
        op for op in plain.ops or [] if op[0] != "aten._to_copy.default"
    ]


def assert_stock_raises(outcome: Outcome) -> None:
    assert type(outcome.error) is RuntimeError
    assert "Unexpected floating ScalarType in at::autocast::prioritize" in str(outcome.error)


@each_row
@pytest.mark.parametrize(("lower", "other"), [(BF16, HALF), (HALF, BF16)])
def test_alike_stay_as_they_are(row: Row, device: str, lower: torch.dtype, other: torch.dtype) -> None:
    with tensors_of(fake=device == "cuda"):
        bound = bind(row, device, other)
        assert_runs_in(other, row, device, lower, bound)
        assert casts(ours(device, lower, bound)) == casts(
            run(tp.stock_autocast(device, enabled=False), bound, Watch(stand_in=True))
        )
        assert_stock_raises(stock(device, lower, bound))


@each_row
@pytest.mark.parametrize("lower", [BF16, HALF], ids=str)
@pytest.mark.parametrize(
    "dtypes", [(BF16, HALF), (HALF, BF16), (HALF, BF16, FLOAT), (BF16, FLOAT, HALF), (FLOAT, HALF, BF16)], ids=str
)
def test_a_mixture_is_float32_in_any_order(row: Row, device: str, lower: torch.dtype, dtypes: tuple[Any, ...]) -> None:
    with tensors_of(fake=device == "cuda"):
        assert_runs_in(FLOAT, row, device, lower, bind(row, device, *dtypes))


@each_row
@pytest.mark.parametrize("lower", [BF16, HALF], ids=str)
@pytest.mark.parametrize("with_", [BF16, HALF, FLOAT, torch.float8_e5m2], ids=str)
def test_float8_with_anything_else_is_float32(row: Row, device: str, lower: torch.dtype, with_: torch.dtype) -> None:
    with tensors_of(fake=device == "cuda"):
        for dtypes in ((FLOAT8, with_), (with_, FLOAT8)):
            assert_runs_in(FLOAT, row, device, lower, bind(row, device, *dtypes))
        if with_ is not FLOAT:
            assert_stock_raises(stock(device, lower, bind(row, device, FLOAT8, with_)))


@pytest.mark.parametrize("lower", [BF16, HALF], ids=str)
def test_optional_tensors_do_not_count_but_are_cast(lower: torch.dtype) -> None:
    other = HALF if lower is BF16 else BF16
    row = next(row for row in ROWS if row.op == "bilinear")
    with tensors_of(fake=True):
        # Three tensors and an optional bias.
        bound = bind(row, "cuda", lower, lower, lower, FLOAT)
        assert_alike(ours("cuda", lower, bound), stock("cuda", lower, bound), "bilinear")
        assert ours("cuda", lower, bound).result.dtype is lower
        assert_runs_in(other, row, "cuda", lower, bind(row, "cuda", other, other, other, FLOAT))
