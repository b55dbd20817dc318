"""Overrides where two device types are on, and calls with tensors of both. CUDA's tensors are fake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import message_of

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


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
