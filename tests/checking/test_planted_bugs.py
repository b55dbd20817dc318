"""A crosscheck finds planted bugs in forward and backward, and reports op, arguments and line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import torch_promote as tp
from torch_promote.checking import crosscheck as checker
from torch_promote.checking import expectation
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference import promotion as promotion_table
from torch_promote.reference.autocast import AutocastState
from torch_promote.reference.ops.infer import Entry

#: Modules whose names their functions have too.
PLAN, INFER = (importlib.import_module(f"torch_promote.reference.{name}") for name in ("autocast", "ops.infer"))
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
MonkeyPatch = pytest.MonkeyPatch


def a_flipped_policy(patch: MonkeyPatch) -> None:
    """Ours runs mm in float32 (see `matrices`), but the plan does not contain the override."""
    patch.setattr(
        checker, "state_in_force", lambda: AutocastState.region("cpu") if torch.is_autocast_enabled("cpu") else None
    )


def a_wrong_cell(patch: MonkeyPatch) -> None:
    patch.setitem(promotion_table._TABLE, (F32, BF16), F64)
    patch.setitem(promotion_table._TABLE, (BF16, F32), F64)


def a_wrong_stride(patch: MonkeyPatch) -> None:
    right = expectation.infer

    def wrong(op: Any, args: Any, kwargs: Any) -> Any:
        found = right(op, args, kwargs)
        return dataclasses.replace(found, strides=(1, 2)) if op is torch.ops.aten.mul.Tensor else found

    patch.setattr(expectation, "infer", wrong)


def a_wrong_cast(patch: MonkeyPatch) -> None:
    right = expectation.autocast_plan

    def wrong(*args: Any) -> Any:
        plan = right(*args)
        first, *rest = plan.casts or [None]
        return plan if first is None else dataclasses.replace(plan, casts=(dataclasses.replace(first, to=F64), *rest))

    patch.setattr(expectation, "autocast_plan", wrong)


def a_missing_row(patch: MonkeyPatch) -> None:
    right = PLAN._policy_of_row
    # The table answers for the release that it describes, whichever runs.
    patch.setattr(expectation, "TABLE_VERSION", ".".join(torch.__version__.split(".")[:2]))
    none = CastPolicy.fallthrough
    patch.setattr(PLAN, "_policy_of_row", lambda name, device: none if name == "aten::mm" else right(name, device))


def matrices(backward: bool, **region: Any) -> None:
    """One mm under autocast: in the forward, or in the backward of a forward without it."""
    x, w = torch.ones(2, 3), torch.ones(3, 2, requires_grad=True)
    if not backward:
        with tp.my_autocast("cpu", **region):
            torch.mm(x, w)  # here, in the forward
        return
    y = torch.mm(x, w)
    gradient = torch.ones(2, 2)
    with tp.my_autocast("cpu", **region):
        torch.autograd.grad(y, w, gradient)  # here, in the backward


def mixed_products(backward: bool) -> None:
    x, y = torch.ones(2, 3, dtype=BF16), torch.ones(2, 3, requires_grad=True)
    if not backward:
        torch.mul(x, y.detach())  # here, in the forward
        return
    with tp.crosscheck():  # of its own: the forward's mismatch is not asked for
        z = x * y
    torch.autograd.grad(z, y, torch.ones(2, 3))  # here, in the backward


FLIPPED = {"overrides": {"mm": "fp32"}}
MM = ("aten.mm.default", "float32[2, 3], float32[3, 2]", "float32[3, 2] strides (1, 3), float32[2, 2]")
MUL = ("aten.mul.Tensor", "bfloat16[2, 3], float32[2, 3]", "float32[2, 3], bfloat16[2, 3]")

NO_ROW = ("row", "a row with a policy in the op table", "a kernel of PyTorch's autocast, and no policy")
#: The bug, the code to run, the op with its arguments in forward and backward, and the expected mismatch.
PLANTED = [
    (a_flipped_policy, lambda backward: matrices(backward, **FLIPPED), MM, ("dtype", "bfloat16", "float32")),
    (a_wrong_cell, mixed_products, MUL, ("dtype", "float64", "float32")),
    (a_wrong_stride, mixed_products, MUL, ("strides", "(1, 2)", "(3, 1)")),
    (a_wrong_cast, matrices, MM, ("casts", "self in float64", "self in bfloat16")),
    (a_missing_row, matrices, MM, NO_ROW),
]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("plant", "code", "call", "finding"), PLANTED, ids=[row[0].__name__ for row in PLANTED])
def test_a_planted_bug_is_found_and_named(
    monkeypatch: MonkeyPatch,
    plant: Callable[[MonkeyPatch], None],
    code: Callable[[bool], None],
    call: tuple[str, str, str],
    finding: tuple[str, str, str],
    backward: bool,
) -> None:
    with tp.crosscheck() as healthy:
        code(backward)
    assert healthy.mismatches == []

    plant(monkeypatch)
    with tp.crosscheck() as report:
        code(backward)
    found = next(m for m in report.mismatches if m.where.endswith("in the backward" if backward else "in the forward"))
    assert (found.op, found.arguments) == (call[0], call[1 + backward])
    assert (found.kind, found.expected, found.got) == finding
    file, _, rest = found.where.partition(":")
    assert file == __file__
    assert rest.split(" in ", 1)[1].startswith(f"{'matrices' if call is MM else 'mixed_products'}: ")
    assert not report.ok

    with pytest.raises(tp.errors.CrosscheckError) as raised, tp.crosscheck(raise_on_mismatch=True):
        code(backward)
    assert str(raised.value) == str(found)
    lines = [frame.line for frame in traceback.extract_tb(raised.value.__traceback__) if frame.filename == __file__]
    assert found.where.endswith(str(lines[-1]))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("raises", [False, True], ids=["collecting", "raising"])
def test_a_wrong_bit_is_found(monkeypatch: MonkeyPatch, backward: bool, raises: bool) -> None:
    with tp.crosscheck(level="bits") as healthy:
        matrices(backward)
    assert healthy.mismatches == []
    assert healthy.with_stock["aten.mm.default"] == 1

    right = checker.Checker.after_stock

    def wrong(self: Any, call: Any, results: list[Any], error: str | None) -> None:
        if call.op is torch.ops.aten.mm.default:  # other ops may have got a kernel of ours in another test
            results[0].detach().view(torch.int16)[0, 1] ^= 1
        right(self, call, results, error)

    monkeypatch.setattr(checker.Checker, "after_stock", wrong)
    expected = (
        pytest.raises(tp.errors.CrosscheckError, match=r"of [46] elements") if raises else contextlib.nullcontext()
    )
    checked = tp.crosscheck(level="bits", raise_on_mismatch=raises)
    with expected, checked as report:
        matrices(backward)
    (found,) = report.mismatches
    assert (found.op, found.kind) == ("aten.mm.default", "bits")
    assert found.expected.startswith("result[0]: bits ")
    assert "elements, the first at [0, 1]: " in found.got
    assert f"{__file__}:" in found.where


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # the planted kernel overrides another
def test_a_cast_where_the_plan_has_no_policy_is_found_in_the_bits() -> None:
    """The result is a bool, so the cast does not show in a dtype."""

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return torch.gt(a.to(BF16), b.to(BF16))

    x, y = torch.tensor([1.001, 2.0]), torch.tensor([1.0, 1.0])
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    try:
        library.impl("gt.Tensor", wrong)
        with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
            torch.gt(x, y)
    finally:
        library._destroy()
    (found,) = report.mismatches
    assert (found.op, found.kind) == ("aten.gt.Tensor", "bits")
    assert report.with_stock == {"aten.gt.Tensor": 1}
    assert report.with_policy.total() == 0


def test_a_rule_that_is_missing_is_counted(monkeypatch: MonkeyPatch) -> None:
    table: Mapping[str, Entry] = {k: v for k, v in INFER.rule_table().items() if k != "aten::sin"}
    monkeypatch.setattr(INFER, "rule_table", lambda: table)
    with tp.crosscheck() as report:
        torch.ones(2).sin().cos()
    assert report.no_rule == {"aten.sin.default": 1}
    assert report.checked["aten.cos.default"] == 1
    assert 0 < report.coverage < 1


def test_a_reference_that_breaks_does_not_break_the_call(monkeypatch: MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(expectation, "infer", broken)
    with tp.crosscheck() as report:
        assert torch.ones(2).sin().sum() > 0
    assert {(m.kind, m.got) for m in report.mismatches} == {("reference", "KeyError: 'a bug'")}
    assert "aten.sin.default" in [m.op for m in report.mismatches]


def test_stock_that_raises_alone_is_counted() -> None:
    half, single = torch.ones(2).half(), torch.ones(2).bfloat16()
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"):
        assert torch.cat([half, single]).dtype is F32
    assert report.stock_raised == {"aten.cat.default": 1}
    assert report.mismatches == []


def test_ours_that_raises_alone_is_a_mismatch(monkeypatch: MonkeyPatch) -> None:
    right = checker.Checker.after_stock

    def succeeds(self: Any, call: Any, results: list[Any], error: str | None) -> None:
        assert error is not None
        right(self, call, [torch.ones(2, 2)], None)

    monkeypatch.setattr(checker.Checker, "after_stock", succeeds)
    with tp.crosscheck(level="bits") as report, tp.my_autocast("cpu"), pytest.raises(RuntimeError, match="multiplied"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert [(m.op, m.kind, m.got) for m in report.mismatches] == [("aten.mm.default", "error", "an error")]
