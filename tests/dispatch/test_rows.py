"""Every row of the op table has samples that tell its policy from others, and runs below autocast what stock runs.

tests/parity/test_parity.py compares the results of all samples; tests/cuda/ does so on a device.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import torch_promote as tp
from helpers.rows import (
    ACCELERATORS,
    PROCESSOR_BOUND,
    REFUSED,
    ROWS,
    calls,
    check_gradients,
    executed,
    has_kernel,
    listed,
    policy_is_noticed,
    stock_and_ours,
    tensors_of,
    without_unwritten,
)
from helpers.side_by_side import Watch, assert_alike, run
from torch_promote.parity.samples import KINDS, LOWER, MIXED, MIXED_LOWER_FIRST, SAMPLES
from torch_promote.policy.op_table import CastPolicy, Row, op_table
from torch_promote.reference.dtypes import LOWER_DTYPES

LISTED = {device: [row for row in ROWS if listed(row, device)] for device in ("cpu", *ACCELERATORS)}
BANNED = [(row, device) for device in ACCELERATORS for row in LISTED[device] if row.policy(device) is CastPolicy.banned]

each_lower_dtype = pytest.mark.parametrize("lower", LOWER_DTYPES, ids=str)
on_fake_tensors = pytest.mark.usefixtures("pretend_cuda")


def name_of(row: Row) -> str:
    return row.name.removeprefix("aten::")


@on_fake_tensors
def test_no_row_goes_untested() -> None:
    assert set(SAMPLES) == {row.name for row in op_table()}
    here = [row for row in ROWS if row in LISTED["cpu"] or has_kernel(row, "cpu")]
    assert [row.name for row in here if not executed(row, "cpu")] == []
    there = [(row, device) for device in ACCELERATORS for row in LISTED[device]]
    unseen = [(row.name, device) for row, device in there if not executed(row, device, fake=True)]
    assert unseen == [(row.name, device) for row, device in BANNED]
    assert [row.name for row in ROWS if row not in [*here, *(row for row, _ in there)]] == []


@pytest.mark.parametrize("row", [row for row in ROWS if has_kernel(row, "cpu")], ids=name_of)
def test_gradients_are_there_to_compare(row: Row) -> None:
    check_gradients(row, "cpu")


@on_fake_tensors
@pytest.mark.parametrize(("row", "device"), BANNED, ids=str)
@each_lower_dtype
def test_a_banned_row_is_refused_whatever_it_is_given(row: Row, device: str, lower: torch.dtype) -> None:
    with tensors_of(fake=True):
        for kind in KINDS:
            for label, bound in calls(row, kind, lower, device, fake=True):
                for outcome in stock_and_ours(row, bound, lower, device, watched=True, fake=True):
                    assert type(outcome.error) is RuntimeError, label
                    assert outcome.ops == [], label


#: Kinds of floating arguments. All are cast to float32, so each kind has one of the lower dtypes.
FLOATING_IN_TURN = ((LOWER, torch.bfloat16), (MIXED, torch.float16), (MIXED_LOWER_FIRST, torch.bfloat16))


def by_hand(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an op with its floating arguments cast to float32, as the policy "fp32" does."""
    return op(*tree_map_only(torch.Tensor, raised, args), **tree_map_only(torch.Tensor, raised, kwargs))


def raised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


@pytest.mark.parametrize("row", [row for row in ROWS if has_kernel(row, "cpu")], ids=name_of)
def test_every_row_runs_in_float32_under_the_policy_fp32(row: Row) -> None:
    for kind, lower in FLOATING_IN_TURN:
        for label, (op, args, kwargs) in calls(row, kind, lower, "cpu"):
            expected = run(contextlib.nullcontext(), (functools.partial(by_hand, op), args, kwargs))
            assert expected.error is None or row.name in PROCESSOR_BOUND
            with tp.crosscheck() as report:
                got = run(tp.my_autocast("cpu", policy="fp32"), (op, args, kwargs))
            assert report.ok, str(report)
            for outcome in (expected, got):
                outcome.result = without_unwritten(row, outcome.result)
            assert_alike(got, expected, label)


@on_fake_tensors
@pytest.mark.parametrize("row", [row for row in LISTED["cuda"] if (row, "cuda") not in BANNED], ids=name_of)
def test_the_policy_fp32_gives_what_stock_gives_with_float32_on_cuda(row: Row) -> None:
    """Stock supports dtype=float32 on CUDA only. For `fp32_set_opt_dtype` it runs other ops, with the same results."""
    with tensors_of(fake=True):
        for kind, lower in FLOATING_IN_TURN:
            for label, bound in calls(row, kind, lower, "cuda", fake=True):
                stock = run(tp.stock_autocast("cuda", torch.float32), bound, Watch(stand_in=True))
                ours = run(tp.my_autocast("cuda", policy="fp32"), bound, Watch(stand_in=True))
                if kind not in REFUSED.get((row.name, "cuda"), ((), ""))[0]:
                    assert_alike(replace(ours, ops=stock.ops), stock, label)


@pytest.mark.parametrize("row", LISTED["cpu"], ids=name_of)
def test_a_row_without_its_policy_is_noticed(row: Row) -> None:
    assert policy_is_noticed(row, "cpu")


@on_fake_tensors
@pytest.mark.parametrize(
    ("row", "device"),
    [pytest.param(row, device, id=f"{device}-{name_of(row)}") for device in ACCELERATORS for row in LISTED[device]],
)
def test_a_row_without_its_policy_is_noticed_on_fake_tensors(row: Row, device: str) -> None:
    assert policy_is_noticed(row, device, fake=True)
