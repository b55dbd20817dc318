"""Code that runs while a region is being entered."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.probes import autocast_dtype

BF16, FP16 = torch.bfloat16, torch.float16


def test_what_an_entry_drops_may_open_another_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """If C++ ends PyTorch's region, its casts are dropped when the next region is entered."""
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    inner: list[Any] = []

    def open_another() -> None:
        with tp.my_autocast("cpu", FP16, cache_enabled=False, overrides={"exp": "fp16"}):
            inner.append(autocast_dtype())

    class GiveCastsFinalizers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                weakref.finalize(result, open_another)
            return result

    weight = torch.ones(2, 2, requires_grad=True)
    with tp.stock_autocast("cpu"), tp.my_autocast("cpu", BF16), torch.no_grad(), GiveCastsFinalizers():
        weight @ weight
    assert inner == []
    with tp.my_autocast("cpu", BF16):
        assert inner == [FP16]
        assert autocast_dtype() == BF16
        assert torch.is_autocast_cache_enabled()
        assert torch.exp(torch.ones(1)).dtype == torch.float32
    assert autocast_dtype() is None
