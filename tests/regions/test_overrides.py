"""`overrides={op: policy}`: names of ops and policies, the effect of each policy, and its duration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import leaves_no_trace, message_of
from torch_promote import _C, CastPolicy
from torch_promote.extension import RegionSpec
from torch_promote.regions.region import Region

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


@pytest.fixture
def fake_cuda() -> Callable[..., torch.Tensor]:
    def make(dtype: torch.dtype = FP32, shape: tuple[int, ...] = (2, 2)) -> torch.Tensor:
        with torch._subclasses.FakeTensorMode():
            return torch.empty(shape, device="cuda", dtype=dtype)

    return make


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("devices", ["cpu", "cuda", ["cpu", "cuda"]], ids=str)
def test_an_override_holds_on_each_device_type_that_is_on(devices: Any, fake_cuda: Callable[..., torch.Tensor]) -> None:
    on_cuda = fake_cuda()
    with tp.my_autocast(devices, FP16, overrides={"mm": "fp32", "exp": "fp16"}):
        cpu_on, cuda_on = "cpu" in devices, "cuda" in devices
        x = torch.ones(2, 2)
        assert torch.mm(x, x).dtype == FP32
        assert torch.exp(x).dtype == (FP16 if cpu_on else FP32)
        assert torch.mm(on_cuda, on_cuda).dtype == FP32
        assert torch.exp(on_cuda).dtype == (FP16 if cuda_on else FP32)


MIXED_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "pow(cuda, cpu)": torch.pow,
    "pow(cpu, cuda)": lambda cuda, cpu: torch.pow(cpu, cuda),
    "addcmul": lambda cuda, cpu: torch.addcmul(cuda, cuda, cpu),
    "addcdiv": lambda cuda, cpu: torch.addcdiv(cuda, cpu, cuda),
    "atan2": torch.atan2,
    "mul": torch.mul,
    "mse_loss": lambda cuda, cpu: aten.mse_loss(cuda, cpu),
    "where": lambda cuda, cpu: torch.where(cuda > cpu, cuda, cpu),
    "stack": lambda cuda, cpu: torch.stack([cuda, cpu]),
    "mm": lambda cuda, cpu: torch.mm(cuda, cpu),
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        result = call()
    except Exception as error:
        return type(error)
    return result.dtype, result.device.type, tuple(result.shape)


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("call", MIXED_CALLS.values(), ids=MIXED_CALLS)
@pytest.mark.parametrize("cuda_dtype", [FP32, FP16, FP64], ids=str)
@pytest.mark.parametrize("cpu_dtype", [FP32, FP16, FP64, torch.int64], ids=str)
def test_calls_with_tensors_of_both_devices_are_as_under_both_of_stocks_regions(
    call: Callable[..., Any], cuda_dtype: torch.dtype, cpu_dtype: torch.dtype
) -> None:
    with torch._subclasses.FakeTensorMode():
        cuda = torch.empty(2, 2, device="cuda", dtype=cuda_dtype)
        cpu = torch.empty((), dtype=cpu_dtype)
        with tp.stock_autocast("cpu", FP16), tp.stock_autocast("cuda", FP16):
            stock = outcome(partial(call, cuda, cpu))
        with tp.my_autocast(["cpu", "cuda"], FP16):
            assert outcome(partial(call, cuda, cpu)) == stock
        with tp.my_autocast("cpu", FP16), tp.my_autocast("cuda", FP16):
            assert outcome(partial(call, cuda, cpu)) == stock


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("policy", ["fp16", "fp32", FP64, "keep"], ids=str)
def test_an_override_of_a_call_with_tensors_of_both_devices(policy: Any) -> None:
    wanted = {"fp16": FP16, "keep": FP16, "fp32": FP32, FP64: FP64}[policy]
    with torch._subclasses.FakeTensorMode():
        cuda, cpu = torch.empty(2, 2, device="cuda", dtype=FP16), torch.empty(())
        with tp.my_autocast(["cpu", "cuda"], FP16, overrides={"pow": policy}):
            assert torch.pow(cuda, cpu).dtype == wanted
            assert torch.pow(cpu, cuda).dtype == wanted


BANNED_LOSS = (
    "aten::binary_cross_entropy is banned under autocast on cuda: its results are unsafe there. A sigmoid in half "
    "precision saturates before the loss takes its logarithm. Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) "
    "on the sigmoid's input instead. To run it anyway, use a nested `my_autocast(enabled=False)` and inputs of the "
    "dtype you want, or give the op another policy in this region's overrides."
)


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_the_ban_that_stock_has_on_cuda(dtype: torch.dtype, fake_cuda: Callable[..., torch.Tensor]) -> None:
    x = fake_cuda(dtype)
    with tp.stock_autocast("cuda"), pytest.raises(RuntimeError):
        aten.binary_cross_entropy(x, x)
    with tp.my_autocast("cuda"), pytest.raises(RuntimeError) as error:
        aten.binary_cross_entropy(x, x)
    assert message_of(error) == BANNED_LOSS
    with tp.my_autocast("cuda", overrides={"binary_cross_entropy": "fp32"}):
        assert aten.binary_cross_entropy(x, x).dtype == dtype


def three_dtypes() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """What mm, exp (a row of CUDA alone) and neg (no row) give for float16 under the CPU's autocast of bfloat16."""
    x = torch.ones(2, 2, dtype=FP16)
    return torch.mm(x, x).dtype, torch.exp(x).dtype, torch.neg(x).dtype


STOCK = (BF16, FP16, FP16)


def test_a_policy_takes_the_place_of_the_one_around() -> None:
    with tp.my_autocast("cpu", overrides={"mm": "float64", "neg": "float64"}):
        assert three_dtypes() == (FP64, FP16, FP64)
        with tp.my_autocast("cpu", policy="cuda"):
            assert three_dtypes() == (BF16, FP32, FP16)
            with tp.my_autocast("cpu", overrides={"neg": "fp32"}):
                assert three_dtypes() == (BF16, FP32, FP32)
                with tp.my_autocast("cpu", policy="stock"):
                    assert three_dtypes() == STOCK
                    assert _C.policy_is_stock()
                assert three_dtypes() == (BF16, FP32, FP32)
            assert three_dtypes() == (BF16, FP32, FP16)
        assert three_dtypes() == (FP64, FP16, FP64)
    with tp.my_autocast("cpu"):
        assert three_dtypes() == STOCK


def test_overrides_come_on_top_of_the_policy() -> None:
    with tp.my_autocast("cpu", policy="cuda", overrides={"exp": "float64"}):
        assert three_dtypes() == (BF16, FP64, FP16)


def test_a_compiled_function_under_each_policy_of_another_op() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.neg(x)

    x = torch.ones(2, dtype=FP16, requires_grad=True)
    expected = {None: FP16, "fp32": FP32, "float64": FP64, "fp16": BF16, "keep": FP16, "fallthrough": FP16}
    for _ in range(2):
        for policy, dtype in expected.items():
            with tp.my_autocast("cpu", overrides=None if policy is None else {"neg": policy}):
                result = compiled(x)
            assert result.dtype is dtype
            result.sum().backward()
            assert x.grad is not None
            assert x.grad.dtype is FP16
        with torch.autocast("cpu"):
            assert compiled(x).dtype is FP16


def test_a_region_inside_a_compiled_function() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", policy="cuda", overrides={"neg": "float64"}):
            return torch.neg(torch.exp(x))

    assert compiled(torch.ones(2, dtype=FP16)).dtype is FP64


def test_an_op_that_is_defined_anew_keeps_its_kernel() -> None:
    def define() -> torch.library.Library:
        library = torch.library.Library("torch_promote_test_again", "DEF")
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.clone(), "CompositeExplicitAutograd")
        return library

    x = torch.ones(2)
    for _ in range(2):
        library = define()
        with tp.my_autocast("cpu", overrides={"torch_promote_test_again::op": "float64"}):
            assert torch.ops.torch_promote_test_again.op(x).dtype is FP64
        library._destroy()


def test_more_policies_than_fingerprints_tell_apart() -> None:
    """Some of them have the same 25-bit hash; the second one then gets another."""
    rows = range(len(_C.OP_ENTRY_NAMES))
    changes = (
        [(row, 0, 5), (other, 0, 5), (third, 1, 8)] for row in rows for other in rows[::7] for third in rows[::20]
    )
    seen: dict[tuple[torch.dtype, ...], str] = {}
    held: list[_C.HeldChange] = []
    slots = ("privateuseone", "ipu", "maia", "hpu", "mtia")
    for _, change in zip(range(30000), changes, strict=False):
        held.append(_C.register_change(change, False))
        with Region(RegionSpec(policy_change=held[-1].number).pack()):
            digits = tuple(torch.get_autocast_dtype(slot) for slot in slots)
            policy = str(_C.current_policy())
        assert seen.setdefault(digits, policy) == policy
