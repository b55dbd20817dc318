"""`overrides={op: policy}`: names of ops and policies, the effect of each policy, and its duration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import leaves_no_trace
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


B, H, D, C = X.bfloat16(), X.half(), X.double(), X.to(torch.complex64)
FP8 = torch.float8_e5m2

#: The overrides of a float16 region, a call in it, and the same with the casts written by hand.
EFFECTS: list[tuple[dict[str, Any], Callable[[], Any], Callable[[], Any]]] = [
    (
        {"mm": "fp32"},
        lambda: (X.mm(X), B.mm(B), H.mm(B)),
        lambda: (X.mm(X), B.float().mm(B.float()), H.float().mm(B.float())),
    ),
    ({"exp": "fp32"}, lambda: (X.exp(), B.exp(), H.exp()), lambda: (X.exp(), B.float().exp(), H.float().exp())),
    *(
        ({"cat": dtype}, lambda: torch.cat([X, B, H]), lambda dtype=dtype: torch.cat([x.to(dtype) for x in (X, B, H)]))
        for dtype in (FP64, FP16, FP32, BF16, FP8)
    ),
    ({"mm": "promote"}, lambda: (X.mm(X), B.mm(B), H.mm(H)), lambda: (X.mm(X), B.mm(B), H.mm(H))),
    ({"mm": "promote"}, lambda: (X.mm(B), H.mm(B)), lambda: (X.mm(B.float()), H.float().mm(B.float()))),
    # Doubles, integers and complex numbers are not cast.
    *(
        (
            {"mm": policy, "cat": policy, "exp": policy},
            lambda: (D.mm(D), C.mm(C), D.exp(), C.exp(), torch.cat([torch.arange(2)] * 2)),
            lambda: (D.mm(D), C.mm(C), D.exp(), C.exp(), torch.cat([torch.arange(2)] * 2)),
        )
        for policy in ("fp16", "fp32", "promote", FP64, BF16)
    ),
    (
        {"softmax.int": "fp32_set_opt_dtype"},  # a dtype that is given stays
        lambda: (B.softmax(0), B.softmax(0, dtype=BF16), B.softmax(0, dtype=FP64), D.softmax(0)),
        lambda: (B.softmax(0, dtype=FP32), B.softmax(0), B.softmax(0, dtype=FP64), D.softmax(0)),
    ),
    (
        {"norm.Scalar": "fp32_append_dtype", "norm.ScalarOpt_dim": CastPolicy.keep},
        lambda: (aten.norm.Scalar(B, 2), aten.norm.Scalar(D, 2), aten.norm.ScalarOpt_dim(B, 2, [0])),
        lambda: (
            aten.norm.ScalarOpt_dtype(B, 2, dtype=FP32),
            aten.norm.Scalar(D, 2),
            aten.norm.ScalarOpt_dim(B, 2, [0]),
        ),
    ),
    ({}, lambda: (B.softmax(0), aten.norm.Scalar(B, 2)), lambda: (B.softmax(0), aten.norm.Scalar(B, 2))),
]


@pytest.mark.parametrize(("overrides", "call", "by_hand"), EFFECTS, ids=str)
def test_what_a_policy_does(overrides: dict[str, Any], call: Callable[[], Any], by_hand: Callable[[], Any]) -> None:
    with tp.my_autocast("cpu", FP16, overrides=overrides):
        found = call()
    assert_same(found, by_hand())


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


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16], ids=str)
def test_banned(dtype: torch.dtype) -> None:
    with tp.my_autocast("cpu", overrides={"mm": "banned"}), leaves_no_trace():
        with pytest.raises(RuntimeError, match="aten::mm is banned under autocast on cpu: the current policy bans it"):
            torch.mm(X.to(dtype), X.to(dtype))
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
@pytest.mark.parametrize(("policy", "wanted"), [("fp16", FP16), ("fp32", FP32), (FP64, FP64), ("keep", FP16)], ids=str)
def test_an_override_of_a_call_with_tensors_of_both_devices(policy: Any, wanted: torch.dtype) -> None:
    with torch._subclasses.FakeTensorMode():
        cuda, cpu = torch.empty(2, 2, device="cuda", dtype=FP16), torch.empty(())
        with tp.my_autocast(["cpu", "cuda"], FP16, overrides={"pow": policy}):
            assert torch.pow(cuda, cpu).dtype == torch.pow(cpu, cuda).dtype == wanted


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_the_ban_that_stock_has_on_cuda(dtype: torch.dtype, fake_cuda: Callable[..., torch.Tensor]) -> None:
    x = fake_cuda(dtype)
    with tp.stock_autocast("cuda"), pytest.raises(RuntimeError):
        aten.binary_cross_entropy(x, x)
    with tp.my_autocast("cuda"), pytest.raises(RuntimeError, match="Use binary_cross_entropy_with_logits"):
        aten.binary_cross_entropy(x, x)
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
        with tp.my_autocast("cpu", policy="cuda", overrides={"exp": "float64"}):
            assert three_dtypes() == (BF16, FP64, FP16)
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
