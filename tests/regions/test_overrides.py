"""`overrides={op: policy}`: names of ops and policies, the effect of each policy, and its duration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import KINDS, Region, leaves_no_trace, message_of, mm_dtype
from torch_promote import _C, CastPolicy
from torch_promote.checking.comparison import same_bits

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


def ones(dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.ones(2, 2, dtype=dtype)


# --- names of ops and of policies

SOFTMAX = ["softmax", "softmax.int", "aten::softmax", "aten::softmax.int", aten.softmax, aten.softmax.int]
MM = ["mm", "aten::mm", "mm.default", "aten::mm.default", aten.mm, aten.mm.default]
FP16_NAMES = ["fp16", "lower_precision_fp", CastPolicy.lower_precision_fp, CastPolicy("fp16")]
FP64_NAMES = ["float64", "torch.float64", "double", torch.float64, torch.double]


@pytest.mark.parametrize("op", SOFTMAX, ids=str)
@pytest.mark.parametrize("policy", FP16_NAMES, ids=str)
def test_every_name_of_softmax(op: Any, policy: Any) -> None:
    x = torch.tensor([0.1, 0.7, 0.9])
    with tp.my_autocast("cpu", FP16, overrides={op: policy}):
        y = torch.softmax(x, 0)
    assert_same(y, torch.softmax(x.half(), 0))


@pytest.mark.parametrize("op", MM, ids=str)
@pytest.mark.parametrize("policy", ["fp32", CastPolicy.fp32, FP32, "float32", *FP64_NAMES], ids=str)
def test_every_name_of_mm(op: Any, policy: Any) -> None:
    wanted = FP64 if policy in FP64_NAMES else FP32
    x = torch.rand(3, 3)
    with tp.my_autocast("cpu", overrides={op: policy}):
        y = torch.mm(x, x)
        assert torch.mm(x.bfloat16(), x).dtype == wanted
    assert_same(y, torch.mm(x.to(wanted), x.to(wanted)))


def test_a_name_without_overload_means_every_row_of_the_op() -> None:
    with tp.my_autocast("cpu", overrides={"pow": "fp16"}):
        assert [(ones() ** 2).dtype, (2 ** ones()).dtype, (ones() ** ones()).dtype] == [BF16] * 3
    with tp.my_autocast("cpu", overrides={"pow.Scalar": "fp16"}):
        assert [(ones() ** 2).dtype, (2 ** ones()).dtype, (ones() ** ones()).dtype] == [FP32, BF16, FP32]


# --- what each policy does, on the CPU, each with an op for which stock says something else there

X = torch.tensor([[0.3, 1.7], [2.9, 0.2]])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("given", [FP32, BF16, FP16], ids=str)
def test_lower_precision_fp(dtype: torch.dtype, given: torch.dtype) -> None:
    x = X.to(given)
    with tp.my_autocast("cpu", dtype, overrides={"exp": "lower_precision_fp"}):
        y = torch.exp(x)
    assert_same(y, torch.exp(x.to(dtype)))


@pytest.mark.parametrize("op", ["mm", "exp"])
@pytest.mark.parametrize("given", [FP32, BF16, FP16], ids=str)
def test_fp32(op: str, given: torch.dtype) -> None:
    arguments = [X.to(given)] * (2 if op == "mm" else 1)
    with tp.my_autocast("cpu", overrides={op: "fp32"}):
        y = getattr(torch, op)(*arguments)
    assert_same(y, getattr(torch, op)(*[x.float() for x in arguments]))


@pytest.mark.parametrize("policy", [FP64, FP16, FP32, BF16, torch.float8_e5m2], ids=str)
def test_a_dtype_to_run_in(policy: torch.dtype) -> None:
    with tp.my_autocast("cpu", overrides={"cat": policy}):
        y = torch.cat([X, X.bfloat16(), X.half()])
    assert_same(y, torch.cat([X.to(policy), X.bfloat16().to(policy), X.half().to(policy)]))


@pytest.mark.parametrize("policy", ["fp16", "fp32", "promote", FP64, BF16], ids=str)
def test_no_policy_casts_doubles_integers_or_complex_numbers(policy: Any) -> None:
    with tp.my_autocast("cpu", overrides={"mm": policy, "cat": policy, "exp": policy}):
        for dtype in (FP64, torch.complex64):
            assert torch.mm(X.to(dtype), X.to(dtype)).dtype == dtype
            assert torch.exp(X.to(dtype)).dtype == dtype
        assert torch.cat([torch.arange(2), torch.arange(3)]).dtype == torch.int64


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((FP32, FP32), FP32),
        ((BF16, BF16), BF16),
        ((FP16, FP16), FP16),
        ((FP32, BF16), FP32),
        ((BF16, FP32), FP32),
        ((FP16, BF16), FP32),
    ],
    ids=str,
)
def test_promote(given: tuple[torch.dtype, torch.dtype], wanted: torch.dtype) -> None:
    a, b = X.to(given[0]), X.to(given[1])
    with tp.my_autocast("cpu", FP16, overrides={"mm": "promote"}):
        y = torch.mm(a, b)
    assert_same(y, torch.mm(a.to(wanted), b.to(wanted)))


def test_fp32_set_opt_dtype() -> None:
    with tp.my_autocast("cpu", overrides={"softmax.int": "fp32_set_opt_dtype"}):
        assert_same(torch.softmax(X.bfloat16(), 0), torch.softmax(X.bfloat16(), 0, dtype=FP32))
        assert torch.softmax(X.bfloat16(), 0, dtype=BF16).dtype == BF16, "a dtype that is given stays"
        assert torch.softmax(X.bfloat16(), 0, dtype=FP64).dtype == FP64
        assert torch.softmax(X.double(), 0).dtype == FP64, "not eligible, so untouched"
    with tp.my_autocast("cpu"):
        assert torch.softmax(X.bfloat16(), 0).dtype == BF16, "what stock does on the CPU"


def test_fp32_append_dtype() -> None:
    with tp.my_autocast("cpu", overrides={"norm.Scalar": "fp32_append_dtype", "norm.ScalarOpt_dim": CastPolicy.keep}):
        assert_same(aten.norm.Scalar(X.bfloat16(), 2), aten.norm.ScalarOpt_dtype(X.bfloat16(), 2, dtype=FP32))
        assert aten.norm.Scalar(X.double(), 2).dtype == FP64
        assert aten.norm.ScalarOpt_dim(X.bfloat16(), 2, [0]).dtype == BF16
    with tp.my_autocast("cpu"):
        assert aten.norm.Scalar(X.bfloat16(), 2).dtype == BF16, "what stock does on the CPU"


def test_fallthrough_leaves_the_ops_inside_to_autocast() -> None:
    with tp.my_autocast("cpu", overrides={"matmul": "fallthrough"}):
        assert (X @ X).dtype == BF16
    with tp.my_autocast("cpu", overrides={"matmul": "fallthrough", "mm": "fp32"}):
        assert (X @ X.bfloat16()).dtype == FP32
    with (
        pytest.warns(tp.UnusedOverrideWarning, match="overrides: matmul"),
        tp.my_autocast("cpu", overrides={"mm": "fp32", "log1p": "keep"}),  # as in no other test
    ):
        assert (X @ X.bfloat16()).dtype == BF16, "the row of matmul comes first"
    with tp.my_autocast("cpu", overrides={"mse_loss": "fallthrough"}):
        assert aten.mse_loss(X.bfloat16(), X.bfloat16()).dtype == BF16


def test_keep_takes_autocast_off_the_ops_inside() -> None:
    with tp.my_autocast("cpu", overrides={"matmul": "keep"}):
        assert (X @ X).dtype == FP32
        assert torch.mm(X, X).dtype == BF16, "the op alone, not what comes after it"
        with pytest.raises(RuntimeError, match="same dtype"):
            X @ X.bfloat16()
        assert torch.mm(X, X).dtype == BF16


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_an_op_excludes_ends_with_it_also_when_it_fails(kind: Callable[..., Region]) -> None:
    with kind("cpu"), leaves_no_trace():
        with pytest.raises(RuntimeError):
            torch.mm(X, X[:1])
        assert mm_dtype() == BF16


BANNED_MM = (
    "aten::mm is banned under autocast on cpu: the current policy bans it. To run it anyway, use a nested "
    "`my_autocast(enabled=False)` and inputs of the dtype you want, or give the op another policy in this region's "
    "overrides."
)


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16], ids=str)
def test_banned(dtype: torch.dtype) -> None:
    with tp.my_autocast("cpu", overrides={"mm": "banned"}), leaves_no_trace():
        with pytest.raises(RuntimeError) as error:
            torch.mm(X.to(dtype), X.to(dtype))
        assert message_of(error) == BANNED_MM
        assert (X @ X).dtype == BF16, "another op, although it computes the same"
        with tp.my_autocast("cpu", enabled=False):
            assert torch.mm(X, X).dtype == FP32
        with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
            assert torch.mm(X, X).dtype == FP32


def test_gradients_flow_through_an_overridden_op() -> None:
    w = X.clone().requires_grad_()
    with tp.my_autocast("cpu", overrides={"exp": "fp16", "mm": "float64"}):
        loss = (torch.exp(w).float().sum() + torch.mm(w, w).sum()).float()
    (ours,) = torch.autograd.grad(loss, w)
    double = w.double()
    loss = (torch.exp(w.bfloat16()).float().sum() + torch.mm(double, double).sum()).float()
    (by_hand,) = torch.autograd.grad(loss, w)
    assert same_bits(ours, by_hand)


# --- how long overrides hold


def dtypes() -> tuple[torch.dtype, torch.dtype]:
    """Of mm and of exp, on float32."""
    return torch.mm(X, X).dtype, torch.exp(X).dtype


def test_nested_regions_add_overrides_and_leaving_restores() -> None:
    with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
        assert dtypes() == (FP32, FP32)
        with tp.my_autocast("cpu", overrides={"exp": "fp16"}):
            assert dtypes() == (FP32, BF16)
            with tp.my_autocast("cpu", FP16, overrides={"mm": "fp16"}):
                assert dtypes() == (FP16, FP16)
            assert dtypes() == (FP32, BF16)
        assert dtypes() == (FP32, FP32)
        with tp.my_autocast("cpu"):
            assert dtypes() == (FP32, FP32)
    with tp.my_autocast("cpu"):
        assert dtypes() == (BF16, FP32)
    assert _C.policy_is_stock()


@pytest.mark.parametrize("enabled", [True, False])
def test_regions_of_stock_inside_see_the_overrides(enabled: bool) -> None:
    with tp.my_autocast("cpu", enabled=enabled, overrides={"mm": "fp32", "exp": "fp16"}):
        with torch.autocast("cpu", enabled=False):
            assert dtypes() == (FP32, FP32)
        with torch.autocast("cpu", FP16):
            assert dtypes() == (FP32, FP16)
        with torch.autocast("cpu", enabled=False), tp.my_autocast("cpu", FP16):
            assert dtypes() == (FP32, FP16)
        with tp.my_autocast("cpu", enabled=False), torch.autocast("cpu", FP16):
            assert dtypes() == (FP32, FP16)


def test_regions_of_stock_around_do_not_matter() -> None:
    with torch.autocast("cpu", FP16):
        with tp.my_autocast("cpu", overrides={"mm": "float64"}):
            assert dtypes() == (FP64, FP32)
        assert dtypes() == (FP16, FP32)


def test_in_a_disabled_region_overrides_do_nothing_by_themselves() -> None:
    with tp.my_autocast("cpu", enabled=False, overrides={"mm": "float64", "exp": "banned"}):
        assert dtypes() == (FP32, FP32)


def test_after_an_exception_they_are_gone() -> None:
    region = tp.my_autocast("cpu", overrides={"exp": "fp16"})
    with tp.my_autocast("cpu", overrides={"mm": "fp32"}), leaves_no_trace():
        with pytest.raises(LookupError), region, region:
            raise LookupError
        assert dtypes() == (FP32, FP32)


def test_no_overrides_and_those_that_say_what_stock_says_are_the_stock_policy() -> None:
    for overrides in (None, {}, {"mm.default": "fp16", "linear.default": "lower_precision_fp"}):
        with tp.my_autocast("cpu", overrides=overrides):
            assert _C.policy_is_stock()
    with tp.my_autocast("cpu", overrides={"mm.default": "fp32"}):
        assert not _C.policy_is_stock()
        with tp.my_autocast("cpu", overrides={"mm.default": "fp16"}):
            assert _C.policy_is_stock()
