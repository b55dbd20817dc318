"""Products with a weight whose casts outlive the region."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import CastCount
from helpers.casts import ours as region

ours = functools.partial(region, cache="persistent")

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.bfloat16).view(8, 16)
BF16, FP16 = torch.bfloat16, torch.float16


def held() -> tuple[int, int]:
    info = tp.cache_info()
    return info["persistent_entries"], info["persistent_bytes"]


def weight(*shape: int) -> Any:
    return nn.Parameter(torch.randn(*(shape or (16, 4))))


def product(w: torch.Tensor, grad: bool = False, dtype: torch.dtype = BF16) -> torch.Tensor:
    with ours(dtype), torch.set_grad_enabled(grad):
        return torch.mm(X.to(dtype), w)


def right(w: torch.Tensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    """The expected product, without creating another tensor over the weight's data, which would drop our casts."""
    with torch.no_grad():
        return torch.mm(X.to(dtype), w.to(dtype))


def casts_in(action: Callable[[], Any]) -> int:
    with CastCount() as count:
        action()
    return count.casts


GRAD = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
