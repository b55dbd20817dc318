"""The promote policy where stock's raises or depends on the arguments' order; ours does neither."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.utils._pytree import tree_map_only

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.rows import ROWS, listed, overload, tensors_of
from helpers.side_by_side import Bound, Outcome, Watch, assert_alike, run
from torch_promote.parity.samples import SAMPLES, Make
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


def cases() -> Iterator[tuple[torch.dtype, tuple[torch.dtype, ...], torch.dtype, bool]]:
    """The lower dtype, those of the arguments, the one that the op runs in, and whether stock raises for any op."""
    for lower, other in ((BF16, HALF), (HALF, BF16)):
        yield lower, (other,), other, True
        for mixture in (BF16, HALF), (HALF, BF16), (HALF, BF16, FLOAT), (BF16, FLOAT, HALF), (FLOAT, HALF, BF16):
            yield lower, mixture, FLOAT, False
        for dtype in (BF16, HALF, torch.float8_e5m2):
            yield lower, (FLOAT8, dtype), FLOAT, True
            yield lower, (dtype, FLOAT8), FLOAT, False
        yield lower, (FLOAT8, FLOAT), FLOAT, False
        yield lower, (FLOAT, FLOAT8), FLOAT, False


@each_row
@pytest.mark.parametrize(("lower", "dtypes", "wanted", "raises"), list(cases()), ids=str)
def test_arguments_of_these_dtypes(
    row: Row, device: str, lower: torch.dtype, dtypes: tuple[torch.dtype, ...], wanted: torch.dtype, raises: bool
) -> None:
    """One dtype stays; a mixture is float32, in any order."""
    with tensors_of(fake=device == "cuda"):
        bound = bind(row, device, *dtypes)
        assert_runs_in(wanted, row, device, lower, bound)
        if raises:
            assert_stock_raises(stock(device, lower, bound))
        if len(dtypes) == 1:
            plain = run(tp.stock_autocast(device, enabled=False), bound, Watch(stand_in=True))
            assert casts(ours(device, lower, bound)) == casts(plain)


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
