"""Compares every CUDA row of the op table with torch.autocast on the device: dtypes, strides, bits, gradients, errors.

tests/parity/test_parity.py does so with fake tensors.
"""

from __future__ import annotations

import pytest

from helpers.rows import ROWS, check_gradients, listed
from torch_promote.parity.model import Entry, Options
from torch_promote.parity.runner import run_entry
from torch_promote.policy.op_table import CastPolicy, Row

LISTED = [row for row in ROWS if listed(row, "cuda")]
OTHERS = [row for row in ROWS if row not in LISTED]
BANNED = [row for row in LISTED if row.cuda is CastPolicy.banned]
RUNNING = [row for row in LISTED if row not in BANNED]


def name(row: Row) -> str:
    return row.name.removeprefix("aten::")


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
    check_gradients(row, "cuda")
