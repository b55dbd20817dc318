"""Compares every CUDA row of the op table with torch.autocast on the device: dtypes, strides, bits, gradients, errors.

tests/dispatch/test_rows.py does so with fake tensors.
"""

from __future__ import annotations

import pytest
import torch

from helpers.op_registrations import delta_of
from helpers.rows import (
    LOWER_DTYPES,
    NO_GRADIENT,
    ROWS,
    calls,
    check_row,
    compare,
    executed,
    known_refusals,
    listed,
    refused,
    stock_and_ours,
)
from torch_promote.parity.samples import FLOAT32, KINDS
from torch_promote.policy.op_table import CastPolicy, Row, op_table

LISTED = [row for row in ROWS if listed(row, "cuda")]
OTHERS = [row for row in ROWS if row not in LISTED]
BANNED = [row for row in LISTED if row.cuda is CastPolicy.banned]
RUNNING = [row for row in LISTED if row not in BANNED]


def name(row: Row) -> str:
    return row.name.removeprefix("aten::")


each_lower_dtype = pytest.mark.parametrize("lower", LOWER_DTYPES, ids=str)


def test_the_rows_are_those_of_the_table() -> None:
    """Otherwise a missing row would go unnoticed."""
    of_cuda = {row.name for row in op_table() if row.cuda is not CastPolicy.fallthrough}
    assert len(of_cuda) == 120
    assert {row.name for row in LISTED} == of_cuda - delta_of("cuda").missing
    assert len(BANNED) == 1


@pytest.mark.parametrize(
    ("row", "lower"),
    [
        # As in tests/dispatch/test_rows.py, where the everyday run has the other dtype.
        pytest.param(row, lower, id=f"{lower}-{name(row)}", marks=pytest.mark.slow if (number + choice) % 2 else ())
        for number, row in enumerate(LISTED)
        for choice, lower in enumerate(LOWER_DTYPES)
    ],
)
def test_row(row: Row, lower: torch.dtype) -> None:
    for kind in KINDS:
        check_row(row, kind, lower, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("row", OTHERS, ids=name)
@each_lower_dtype
def test_row_without_a_policy(row: Row, lower: torch.dtype) -> None:
    for kind in KINDS:
        check_row(row, kind, lower, "cuda")


@pytest.mark.parametrize("row", RUNNING, ids=name)
def test_row_runs(row: Row) -> None:
    """The row does more than raise in both."""
    assert executed(row, "cuda")


@pytest.mark.parametrize("row", RUNNING, ids=name)
def test_gradients_are_there_to_compare(row: Row) -> None:
    for label, bound in calls(row, FLOAT32, torch.bfloat16, "cuda"):
        stock, ours = stock_and_ours(row, bound, torch.bfloat16, "cuda", watched=False)
        compare(row, stock, ours, label, "cuda")
        if row.name in NO_GRADIENT:
            assert stock.gradients is None, label
            continue
        assert stock.backward_error is None, label
        assert stock.gradients, label
        assert all(grad is not None and grad.is_cuda for grad in stock.gradients), label
        assert any(grad.any() for grad in stock.gradients), label


@pytest.mark.parametrize(("row", "kinds"), known_refusals("cuda"))
def test_what_is_known_to_be_refused_is(row: Row, kinds: tuple[str, ...]) -> None:
    assert [kind for kind in kinds if not refused(row, kind, "cuda")] == [], "refused no more: delete it from REFUSED"
