"""Compares every CUDA row of the op table, under every legal policy, with the same call and casts by hand."""

from __future__ import annotations

import pytest
import torch

from helpers.override_effects import check_row_effects
from helpers.rows import ROWS, listed
from torch_promote.parity.samples import FLOAT32, KINDS, MIXED_LOWER_FIRST
from torch_promote.policy.op_table import CastPolicy, Row
from torch_promote.reference.dtypes import LOWER_DTYPES

#: Rows whose kernel refuses float32.
HALF_PRECISION_ONLY = {"aten::_scaled_dot_product_flash_attention"}

LISTED = [pytest.param(row, id=row.name.removeprefix("aten::")) for row in ROWS if listed(row, "cuda")]
each_row = pytest.mark.parametrize("row", LISTED)


@pytest.mark.parametrize(
    "row",
    # The policies act alike on every device, and tests/dispatch/test_override_effects.py has all rows on the CPU.
    [pytest.param(*one.values, id=one.id, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, one in enumerate(LISTED)],
)
def test_every_policy(row: Row) -> None:
    cast, ran = check_row_effects(row, [FLOAT32], "cuda")
    assert {torch.bfloat16, torch.float64, CastPolicy.lower_precision_fp} <= cast
    assert row.name in HALF_PRECISION_ONLY or {torch.float32, CastPolicy.fp32} <= ran


@pytest.mark.slow
@each_row
@pytest.mark.parametrize("lower", LOWER_DTYPES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != FLOAT32])
def test_every_policy_of_other_inputs(row: Row, kind: str, lower: torch.dtype) -> None:
    cast, _ = check_row_effects(row, [kind], "cuda", lower)
    assert kind != MIXED_LOWER_FIRST or torch.float64 in cast
