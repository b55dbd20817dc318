"""The autocast plan under every legal policy of a row, on the CPU and on fake CUDA tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import torch_promote as tp
from helpers.autocast_plans import check_call, overriding, watched
from helpers.override_effects import full_name
from helpers.rows import ROWS, calls, listed, tensors_of
from helpers.side_by_side import Bound
from torch_promote.parity.row_samples import FLOAT32, MIXED_LOWER_FIRST
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.op_table import CastPolicy, Row
from torch_promote.reference.autocast import AutocastPlan, AutocastState, autocast_plan

LOWER = torch.bfloat16
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def policies(row: Row) -> Iterator[CastPolicy | torch.dtype]:
    yield from legal_policies(row)
    yield from DTYPES


def check(row: Row, device: str, *, fake: bool) -> None:
    for kind in (FLOAT32, MIXED_LOWER_FIRST):
        for label, bound in calls(row, kind, LOWER, device, fake=fake):
            for policy in policies(row):
                what, overrides = f"{label}, {policy}", {row.name: policy}
                if policy is CastPolicy.fallthrough:
                    check_fallthrough(what, bound, device, fake=fake)
                    continue
                plan = check_call(what, bound, device, LOWER, tp.my_autocast, fake=fake, overrides=overrides)
                assert (plan.policy, plan.device) == (policy, device), what


def check_fallthrough(what: str, bound: Bound, device: str, *, fake: bool) -> None:
    """The op is not cast, but the ops that a composite calls are."""
    op, args, kwargs = bound
    overrides = {full_name(op): CastPolicy.fallthrough}
    plan = autocast_plan(op, args, kwargs, AutocastState.region(device, LOWER, overrides=overrides))
    assert plan == AutocastPlan(None, None, (), full_name(op)), what
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(full_name(op), "CompositeImplicitAutograd")
    kernel = functools.partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd) if composite else op
    called = functools.partial(kernel, *args, **kwargs)
    real = watched(lambda: op(*args, **kwargs), overriding(tp.my_autocast, device, LOWER, overrides), fake=fake)
    around = overriding(tp.my_autocast, device, LOWER, overrides if composite else {}, enabled=composite)
    alone = watched(called, around, fake=fake)
    assert real == alone, what


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_cpu_row(row: Row) -> None:
    check(row, "cpu", fake=False)


# tests/dispatch/test_override_effects.py makes these calls every day, but once each: no cast is served.
@pytest.mark.slow
@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_cuda_row(row: Row) -> None:
    with tensors_of(fake=True):
        check(row, "cuda", fake=True)


def test_an_override_counts_where_the_table_has_no_policy() -> None:
    (row,) = (row for row in ROWS if row.name == "aten::exp")
    assert not listed(row, "cpu")
    x = torch.ones(2, dtype=LOWER)
    overrides = {row.name: CastPolicy.fp32}
    plan = check_call("exp", (torch.ops.aten.exp.default, (x,), {}), "cpu", LOWER, tp.my_autocast, overrides=overrides)
    assert [str(cast) for cast in plan.casts] == ["self: bfloat16 -> float32"]
