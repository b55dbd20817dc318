"""Features built on autograd have stock's bits on a device whose backward runs on a separate thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import torch_promote as tp
from helpers.casts import Region
from helpers.comparison import assert_same
from helpers.models import EVERY_MODEL, checkpointed
from helpers.program_comparison import ANYWHERE, grads
from helpers.program_comparison import assert_like_stock as compare

pytestmark = pytest.mark.usefixtures("nothing_persists")

INSIDE = pytest.mark.parametrize(  # tests/cache/test_cache_modes.py has both on the CPU
    "inside",
    [pytest.param(False, id="backward after"), pytest.param(True, id="backward inside", marks=pytest.mark.slow)],
)
REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
MODES = pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
assert_like_stock = functools.partial(compare, regions=ANYWHERE)

#: Gradients of many sizes, so that the order and the dtype of their sums show in the bits.
SIZES = (1.0, 3e-4, 7e2, 1e-2, 3e1)


def run_backward(region: Any, loss: Callable[[], Tensor], inside: bool) -> Tensor:
    with region:
        result = loss()
        if inside:
            result.backward()
    if not inside:
        result.backward()
    return result


# --- one weight, several uses


def uses_of(w: Tensor, x: Tensor) -> Tensor:
    return sum((F.linear(x * size, w).float().tanh().sum() / size for size in SIZES), torch.zeros((), device=x.device))


def leaves() -> tuple[nn.Parameter, Tensor]:
    return nn.Parameter(torch.randn(8, 8).cuda()), torch.randn(4, 8).cuda()


@INSIDE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_several_uses_of_a_weight(dtype: torch.dtype, inside: bool) -> None:
    def program(region: Region) -> Any:
        w, x = leaves()
        return run_backward(region("cuda", dtype=dtype), lambda: uses_of(w, x), inside), grads(w)

    assert_like_stock(program)


# --- checkpointing


@MODES
@INSIDE
@REENTRANT
@EVERY_MODEL
def test_checkpointed_models(name: str, use_reentrant: bool, inside: bool, cache: str) -> None:
    ours = functools.partial(tp.my_autocast, "cuda", torch.bfloat16, cache=cache)
    stock = functools.partial(tp.stock_autocast, "cuda", torch.bfloat16)
    assert_same(*(checkpointed(region, name, use_reentrant, inside, "cuda") for region in (ours, stock)))
