"""Compares every CUDA row of the op table with torch.autocast on the device: dtypes, strides, bits, gradients, errors.

tests/parity/test_parity.py does so with fake tensors.
"""

from __future__ import annotations

import pytest
import torch

from helpers.op_registrations import delta_of
from helpers.rows import NO_GRADIENT, ROWS, calls, compare, listed, stock_and_ours
from torch_promote.parity.model import Entry, Options
from torch_promote.parity.runner import run_entry
from torch_promote.parity.samples import FLOAT32
from torch_promote.policy.op_table import CastPolicy, Row, op_table

LISTED = [row for row in ROWS if listed(row, "cuda")]
OTHERS = [row for row in ROWS if row not in LISTED]
BANNED = [row for row in LISTED if row.cuda is CastPolicy.banned]
RUNNING = [row for row in LISTED if row not in BANNED]


def name(row: Row) -> str:
    return row.name.removeprefix("aten::")


def test_the_rows_are_those_of_the_table() -> None:
    """Otherwise a missing row would go unnoticed."""
    of_cuda = {row.name for row in op_table() if row.cuda is not CastPolicy.fallthrough}
    assert len(of_cuda) == 120
    assert {row.name for row in LISTED} == of_cuda - delta_of("cuda").missing
    assert len(BANNED) == 1


@pytest.mark.parametrize(
    ("row", "lower"),
    [
        pytest.param(row, lower, id=f"{lower}-{name(row)}", marks=pytest.mark.slow if choice or row in OTHERS else ())
        for row in ROWS
        for choice, lower in enumerate(("float16", "bfloat16"))
    ],
)
def test_row(row: Row, lower: str) -> None:
    result = run_entry(Entry(row.name, "row"), Options("cuda", autocast_dtype=lower))
    assert [mismatch.text for mismatch in result.mismatches] == []
    assert row not in RUNNING or row.name in result.rows


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
