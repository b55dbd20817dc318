"""Compares every CUDA row of the op table, under every legal policy, with the same call and casts by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers.override_effects import Policy, check_effect
from helpers.rows import LOWER_DTYPES, ROWS, calls, listed
from torch_promote.parity.row_samples import FLOAT32, KINDS, MIXED_LOWER_FIRST
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.op_table import CastPolicy, Row

#: Dtypes to run in.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LISTED = [row for row in ROWS if listed(row, "cuda")]

each_row = pytest.mark.parametrize("row", LISTED, ids=lambda row: row.name.removeprefix("aten::"))


def policies(row: Row) -> Iterator[Policy]:
    yield from legal_policies(row)
    yield from DTYPES


def check(row: Row, kind: str, lower: torch.dtype) -> tuple[set[Policy], set[Policy]]:
    """Returns the policies under which something was cast, and those under which the op ran."""
    cast, ran = set(), set()
    for label, bound in calls(row, kind, lower, "cuda"):
        for policy in policies(row):
            plan, outcome = check_effect(label, bound, policy, "cuda", lower)
            cast |= {policy} if plan.casts or plan.dtype_arguments else set()
            ran |= {policy} if outcome.error is None else set()
    return cast, ran


@each_row
def test_every_policy(row: Row) -> None:
    cast, ran = check(row, FLOAT32, torch.bfloat16)
    assert {torch.bfloat16, torch.float64, CastPolicy.lower_precision_fp} <= cast
    assert {CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned}.isdisjoint(cast)
    assert CastPolicy.banned not in ran
    assert row.name in HALF_PRECISION_ONLY or {torch.float32, CastPolicy.fp32} <= ran


#: Rows whose kernel refuses float32.
HALF_PRECISION_ONLY = {"aten::_scaled_dot_product_flash_attention"}


@pytest.mark.slow
@each_row
@pytest.mark.parametrize("lower", LOWER_DTYPES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != FLOAT32])
def test_every_policy_of_other_inputs(row: Row, kind: str, lower: torch.dtype) -> None:
    cast, _ = check(row, kind, lower)
    assert kind != MIXED_LOWER_FIRST or torch.float64 in cast
