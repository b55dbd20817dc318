"""The rows of the op table: which exist here, sample calls of each, and how stock and ours run them."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

import torch_promote as tp
from helpers.side_by_side import Outcome, Watch, assert_alike, run
from helpers.under_install import assert_stock
from torch_promote.observe.ops import facts_of
from torch_promote.parity.samples import FLOAT32, KINDS, LOWER, MIXED_LOWER_FIRST, SAMPLES, Bound, Make, dtypes_of
from torch_promote.policy.op_table import CastPolicy, Row, op_table, schema_of
from torch_promote.reference.dtypes import LOWER_DTYPES

#: The rows that the running PyTorch has.
ROWS = [row for row in op_table() if schema_of(row) is not None]
#: The accelerators, whose policies are tested on fake tensors.
ACCELERATORS = ("cuda", "xpu", "mps")

_NO_CHOICE = KINDS, "PyTorch asks the device's build which kernel to run"

#: (row, device) -> the kinds of input that stock refuses on fake tensors of the device, and why.
REFUSED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("aten::linalg_matrix_norm.str_ord", "cuda"): (
        (LOWER, MIXED_LOWER_FIRST),
        "the nuclear norm does not support half precision, and the policy casts nothing",
    ),
    ("aten::scaled_dot_product_attention", "xpu"): _NO_CHOICE,
    ("aten::scaled_dot_product_attention", "mps"): _NO_CHOICE,
}

#: Rows whose results have no gradient, and why.
NO_GRADIENT: dict[str, str] = {
    "aten::_addmm_activation": "PyTorch defines no derivative",
    "aten::_native_multi_head_attention": "PyTorch defines no derivative, and refuses inputs that require grad",
    "aten::geqrf": "PyTorch defines no derivative",
    "aten::linalg_cond.p_str": "the forward changes a tensor in place that the backward needs",
    "aten::linalg_matrix_rank": "returns integers",
    "aten::linalg_matrix_rank.atol_rtol_float": "returns integers",
    "aten::linalg_matrix_rank.atol_rtol_tensor": "returns integers",
    "aten::linalg_matrix_rank.tol_tensor": "returns integers",
}

#: Rows that some processors refuse in some or all dtypes. There, tests check only that the call reaches the kernel.
PROCESSOR_BOUND = {"aten::mkldnn_rnn_layer"}


def listed(row: Row, device: str) -> bool:
    """Whether the row has a policy on the device, and the running PyTorch registers the op there."""
    return row.policy(device) is not CastPolicy.fallthrough and torch._C._dispatch_has_kernel_for_dispatch_key(
        row.name, f"Autocast{device.upper()}"
    )


def has_kernel(row: Row, device: str) -> bool:
    """Whether PyTorch can run the op on the device at all."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(row.name, device.upper())


def overload(row: Row) -> Any:
    return getattr(getattr(torch.ops.aten, row.op), row.overload or "default")


def calls(row: Row, kind: str, lower: torch.dtype, device: str, *, fake: bool = False) -> Iterator[tuple[str, Bound]]:
    """Yields the row's sample calls with inputs of one kind, each with a label. Real floating inputs require grad."""
    for number, sample in enumerate(SAMPLES[row.name]):
        seed = zlib.crc32(f"{row.name} {number}".encode())
        args, kwargs = sample(Make(dtypes_of(kind, lower), device, fake=fake, grad=not fake, seed=seed))
        yield f"{row.name}, sample {number}, {kind}, {lower} on {device}", (overload(row), args, kwargs)


def tensors_of(fake: bool) -> contextlib.AbstractContextManager[Any]:
    """The context in which to make and use the tensors of a test."""
    return FakeTensorMode() if fake else contextlib.nullcontext()


def stock_and_ours(
    row: Row, bound: Bound, lower: torch.dtype, device: str, *, watched: bool, fake: bool = False, **region: Any
) -> tuple[Outcome, Outcome]:
    """Runs a call under stock and under ours, whose region may get further arguments."""
    assert_stock(lambda: tp.stock_autocast(device, lower))
    both = []
    for made in (tp.stock_autocast(device, lower), tp.my_autocast(device, lower, **region)):
        outcome = run(made, bound, Watch(stand_in=fake) if watched else None)
        if outcome.error is None:
            outcome.result = without_unwritten(row, outcome.result)
        both.append(outcome)
    return both[0], both[1]


def without_unwritten(row: Row, result: Any) -> Any:
    """The results, with zeros for those that the op does not write."""
    unwritten = facts_of(row.name).unwritten
    if not unwritten:
        return result
    return tuple(torch.zeros_like(out) if i in unwritten else out for i, out in enumerate(result))


def compare(row: Row, stock: Outcome, ours: Outcome, label: str, device: str) -> None:
    # Autocast itself refuses a banned op, and our message differs from stock's.
    assert_alike(ours, stock, label, same_text=row.policy(device) is not CastPolicy.banned)


def check_gradients(row: Row, device: str) -> None:
    """A backward that raises in both, or gives only zeros in both, would prove nothing."""
    for label, bound in calls(row, FLOAT32, torch.bfloat16, device):
        stock, ours = stock_and_ours(row, bound, torch.bfloat16, device, watched=False)
        compare(row, stock, ours, label, device)
        if row.name in PROCESSOR_BOUND and stock.error is not None:
            continue
        if row.name in NO_GRADIENT:
            assert stock.gradients is None, f"{label}: there is a gradient now: delete the row from NO_GRADIENT"
            continue
        assert stock.backward_error is None, label
        assert stock.gradients, label
        assert all(grad is not None and grad.device.type == device for grad in stock.gradients), label
        assert any(grad.any() for grad in stock.gradients), label


def executed(row: Row, device: str, *, fake: bool = False) -> bool:
    """Whether at least one sample call of the row runs under stock and ours, in some kind and dtype."""
    refused_here = REFUSED.get((row.name, device), ((), ""))[0] == KINDS
    with tensors_of(fake):
        for kind, lower in itertools.product(KINDS, LOWER_DTYPES):
            for label, bound in calls(row, kind, lower, device, fake=fake):
                stock, ours = stock_and_ours(row, bound, lower, device, watched=True, fake=fake)
                compare(row, stock, ours, label, device)
                if refused_here and stock.error is None:
                    raise AssertionError(f"{label}: it runs: delete it from REFUSED")
                if stock.error is None or refused_here or (row.name in PROCESSOR_BOUND and arrived(row, stock)):
                    return True
    return False


def arrived(row: Row, outcome: Outcome) -> bool:
    """Whether a watched call of a non-composite op reached the op itself."""
    return any(op == str(overload(row)) for op, _, _ in outcome.ops or [])


def policy_is_noticed(row: Row, device: str, *, fake: bool = False) -> bool:
    """Whether the comparison detects that ours lacks the row's policy, which shows that the tests reach its wrapper."""
    lower = LOWER_DTYPES[0]
    with tensors_of(fake):
        for kind in KINDS:
            for label, bound in calls(row, kind, lower, device, fake=fake):
                overrides = {row.name: "keep"}
                stock, ours = stock_and_ours(row, bound, lower, device, watched=True, fake=fake, overrides=overrides)
                try:
                    compare(row, stock, ours, label, device)
                except AssertionError:
                    return True
    return False
