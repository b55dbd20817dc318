"""Compares every row of the op table with torch.autocast on CPU tensors: dtypes, strides, bits, gradients, errors."""

from __future__ import annotations

import pytest
import torch

from helpers.rows import (
    LOWER_DTYPES,
    NO_GRADIENT,
    PROCESSOR_BOUND,
    ROWS,
    calls,
    check_row,
    compare,
    executed,
    has_kernel,
    listed,
    policy_is_noticed,
    stock_and_ours,
)
from torch_promote.parity.row_samples import FLOAT32, KINDS, SAMPLES
from torch_promote.policy.op_table import Row, op_table

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.removeprefix("aten::"))
each_lower_dtype = pytest.mark.parametrize("lower", LOWER_DTYPES, ids=str)


def test_every_row_has_samples() -> None:
    assert set(SAMPLES) == {row.name for row in op_table()}
    assert all(SAMPLES.values())


@each_row
@each_lower_dtype
def test_row(row: Row, lower: torch.dtype) -> None:
    for kind in KINDS:
        check_row(row, kind, lower, "cpu")


def test_no_row_goes_untested() -> None:
    here = [row for row in ROWS if listed(row, "cpu") or has_kernel(row, "cpu")]
    assert [row.name for row in here if not executed(row, "cpu")] == []
    # test_rows_cuda.py has a test of this name for these.
    assert [row.name for row in ROWS if row not in here and not listed(row, "cuda")] == []


@pytest.mark.parametrize("row", [row for row in ROWS if has_kernel(row, "cpu")], ids=lambda row: row.name)
def test_gradients_are_there_to_compare(row: Row) -> None:
    """A backward that raises in both, or gives only zeros in both, would prove nothing."""
    for label, bound in calls(row, FLOAT32, torch.bfloat16, "cpu"):
        stock, ours = stock_and_ours(row, bound, torch.bfloat16, "cpu", watched=False)
        compare(row, stock, ours, label, "cpu")
        if row.name in PROCESSOR_BOUND and stock.error is not None:
            continue
        if row.name in NO_GRADIENT:
            assert stock.gradients is None, f"{label}: there is a gradient now: delete the row from NO_GRADIENT"
            continue
        assert stock.backward_error is None, label
        assert stock.gradients, label
        assert all(grad is not None for grad in stock.gradients), label
        assert any(grad.any() for grad in stock.gradients), label


@pytest.mark.parametrize("row", [row for row in ROWS if listed(row, "cpu")], ids=lambda row: row.name)
def test_a_row_without_its_policy_is_noticed(row: Row) -> None:
    assert policy_is_noticed(row, "cpu")
