"""Compares every row of the op table, under every legal policy, with the reference's plan."""

from __future__ import annotations

import pytest
import torch

from helpers.override_effects import check_row_effects
from helpers.rows import PROCESSOR_BOUND, ROWS, has_kernel, tensors_of
from torch_promote.parity.samples import FLOAT32, MIXED_LOWER_FIRST
from torch_promote.policy.op_table import CastPolicy, Row

KINDS = (FLOAT32, MIXED_LOWER_FIRST)
#: Policies that cast something in every row.
CASTING = {torch.bfloat16, torch.float64, CastPolicy.lower_precision_fp}

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.removeprefix("aten::"))


@each_row
def test_on_the_cpu_in_bits(row: Row) -> None:
    cast, ran = check_row_effects(row, KINDS, "cpu")
    assert cast >= CASTING
    if has_kernel(row, "cpu") and row.name not in PROCESSOR_BOUND:
        assert {torch.float32, CastPolicy.fp32} <= ran


#: The policies act alike on all devices. The everyday run has all rows on the CPU, and here those that it lacks.
ON_FAKE_CUDA = [
    pytest.param(
        row,
        id=row.name.removeprefix("aten::"),
        marks=pytest.mark.slow if has_kernel(row, "cpu") and number % 6 else (),
    )
    for number, row in enumerate(ROWS)
]


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("row", ON_FAKE_CUDA)
def test_on_fake_cuda_in_dtypes_shapes_and_strides(row: Row) -> None:
    with tensors_of(fake=True):
        cast, _ = check_row_effects(row, KINDS, "cuda", fake=True)
    assert cast >= CASTING
