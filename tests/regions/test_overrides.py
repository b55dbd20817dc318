"""`overrides={op: policy}`: names of ops and policies, the effect of each policy, and its duration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import leaves_no_trace, message_of
from torch_promote import _C, CastPolicy

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


# --- names of ops and of policies

SOFTMAX = ["softmax", "softmax.int", "aten::softmax", "aten::softmax.int", aten.softmax, aten.softmax.int]
FP16_NAMES = ["fp16", "lower_precision_fp", CastPolicy.lower_precision_fp, CastPolicy("fp16")]


@pytest.mark.parametrize("op", SOFTMAX, ids=str)
@pytest.mark.parametrize("policy", FP16_NAMES, ids=str)
def test_every_name_of_softmax(op: Any, policy: Any) -> None:
    x = torch.tensor([0.1, 0.7, 0.9])
    with tp.my_autocast("cpu", FP16, overrides={op: policy}):
        y = torch.softmax(x, 0)
    assert_same(y, torch.softmax(x.half(), 0))


# --- what each policy does, on the CPU, each with an op for which stock says something else there

X = torch.tensor([[0.3, 1.7], [2.9, 0.2]])


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
