"""Compares every row of the op table, under every legal policy, with the reference's plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers.override_effects import Policy, check_effect
from helpers.rows import PROCESSOR_BOUND, ROWS, calls, has_kernel, tensors_of
from torch_promote.parity.row_samples import FLOAT32, MIXED_LOWER_FIRST
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.op_table import CastPolicy, Row

BF16 = torch.bfloat16
#: Dtypes to run in.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.removeprefix("aten::"))


def policies(row: Row) -> Iterator[Policy]:
    yield from legal_policies(row)
    yield from DTYPES


@each_row
def test_on_the_cpu_in_bits(row: Row) -> None:
    cast, ran = set(), set()
    for kind in (FLOAT32, MIXED_LOWER_FIRST):
        for label, bound in calls(row, kind, BF16, "cpu"):
            for policy in policies(row):
                plan, outcome = check_effect(label, bound, policy)
                cast |= {policy} if plan.casts or plan.dtype_arguments else set()
                ran |= {policy} if outcome.error is None else set()
    assert {BF16, torch.float64, CastPolicy.lower_precision_fp} <= cast
    assert {CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned}.isdisjoint(cast)
    assert CastPolicy.banned not in ran
    if has_kernel(row, "cpu") and row.name not in PROCESSOR_BOUND:
        assert {torch.float32, CastPolicy.fp32} <= ran


@pytest.mark.usefixtures("pretend_cuda")
@each_row
def test_on_fake_cuda_in_dtypes_shapes_and_strides(row: Row) -> None:
    cast = set()
    with tensors_of(fake=True):
        for kind in (FLOAT32, MIXED_LOWER_FIRST):
            for label, bound in calls(row, kind, BF16, "cuda", fake=True):
                for policy in policies(row):
                    plan, _ = check_effect(label, bound, policy, "cuda", fake=True)
                    cast |= {policy} if plan.casts else set()
    assert {BF16, torch.float64, CastPolicy.lower_precision_fp} <= cast
