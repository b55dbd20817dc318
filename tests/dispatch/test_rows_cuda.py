"""Compares every row of the op table with torch.autocast on fake CUDA tensors. tests/cuda/ does so with values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers.rows import (
    LOWER_DTYPES,
    ROWS,
    calls,
    check_row,
    listed,
    policy_is_noticed,
    stock_and_ours,
    tensors_of,
)
from torch_promote.parity.row_samples import KINDS
from torch_promote.policy.op_table import CastPolicy, Row

each_lower_dtype = pytest.mark.parametrize("lower", LOWER_DTYPES, ids=str)

LISTED = [row for row in ROWS if listed(row, "cuda")]
BANNED = [row for row in LISTED if row.cuda is CastPolicy.banned]

pytestmark = pytest.mark.usefixtures("pretend_cuda")


def rows_and_dtypes() -> Iterator[Any]:
    """Every row with every lower dtype; the everyday run alternates. tests/cuda/test_op_rows.py runs both."""
    for number, row in enumerate(ROWS):
        for choice, lower in enumerate(LOWER_DTYPES):
            marks = [pytest.mark.slow] if (number + choice) % 2 else []
            yield pytest.param(row, lower, marks=marks, id=f"{lower}-{row.name.removeprefix('aten::')}")


@pytest.mark.parametrize(("row", "lower"), list(rows_and_dtypes()))
def test_row(row: Row, lower: torch.dtype) -> None:
    with tensors_of(fake=True):
        for kind in KINDS:
            check_row(row, kind, lower, "cuda", fake=True)


@pytest.mark.parametrize("row", BANNED, ids=lambda row: row.name)
@each_lower_dtype
def test_a_banned_row_is_refused_whatever_it_is_given(row: Row, lower: torch.dtype) -> None:
    with tensors_of(fake=True):
        for kind in KINDS:
            for label, bound in calls(row, kind, lower, "cuda", fake=True):
                for outcome in stock_and_ours(row, bound, lower, "cuda", watched=True, fake=True):
                    assert type(outcome.error) is RuntimeError, label
                    assert outcome.ops == [], label


@pytest.mark.parametrize("row", LISTED, ids=lambda row: row.name)
def test_a_row_without_its_policy_is_noticed(row: Row) -> None:
    assert policy_is_noticed(row, "cuda", fake=True)
