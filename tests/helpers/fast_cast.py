"""One cast by itself: its bits and strides, and whether our fast path or PyTorch's general kernel made it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import torch_promote as tp
from helpers.casts import Region

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: The casts that need not go through the dispatcher.
PAIRS = [(FP32, BF16), (FP32, FP16), (BF16, FP32), (FP16, FP32)]


@functools.cache
def _region(dtype: torch.dtype) -> Any:
    return tp.my_autocast("cpu", overrides={"aten::dropout": dtype}, cache="none")


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Our cast of a tensor: what an op got that returns its argument. Only `train` makes dropout compute."""
    with _region(dtype):
        return torch.ops.aten.dropout(tensor, 0.5, False)


def records(tensor: torch.Tensor, dtype: torch.dtype) -> set[str]:
    """Which of our cast and the general ones the profiler saw."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        cast(tensor, dtype)
    names = {event.name() for event in profiler.profiler.kineto_results.events()}  # type: ignore[union-attr]
    return names & {"torch_promote::cast", "aten::to", "aten::_to_copy"}


def assert_as_to(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Fails unless our cast gives all that `to` gives: bits, strides, and what autograd knows."""
    found, expected = cast(tensor, dtype), tensor.to(dtype)
    assert found is not tensor
    for ask in (
        lambda t: (t.dtype, t.layout, t.device, t.shape, t.stride(), t.storage_offset()),
        lambda t: (t.requires_grad, t.is_leaf, t._is_view(), t.is_inference(), t.untyped_storage().nbytes()),
        lambda t: (type(t), t._version) if not t.is_inference() else type(t),
    ):
        assert ask(found) == ask(expected)
    assert torch.equal(as_integers(found), as_integers(expected))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, which also distinguish NaNs."""
    return tensor.detach().contiguous().flatten().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Casts of an input, of a weight, of an activation and of a view; in the end one back to float32."""
    hidden = torch.mm(x * 2, w)
    return torch.cat([torch.mm(hidden.float() + 1, w.t()), x], dim=-1).square()


def run(region: Region, call: Callable[..., Any] = network) -> Any:
    torch.manual_seed(0)
    x, w = torch.randn(3, 6, requires_grad=True), nn.Parameter(torch.randn(6, 6))
    with region():
        y = call(x, w)
    if isinstance(y, torch.Tensor) and y.requires_grad:
        y.float().sum().backward()
    return y, x.grad, w.grad


def half_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def float_patterns() -> torch.Tensor:
    """Every upper half of a float32, with lower halves next to the ties of both dtypes; NaNs among them."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    bits = torch.cat([upper | low for low in lower])
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(FP32)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    return float_patterns() if dtype is FP32 else half_patterns(dtype)
