"""cache="all": which casts of activations the cache holds, and for how long."""

from __future__ import annotations

import functools
from typing import Any

import torch

import torch_promote as tp
from helpers.casts import CASTS, CastCount, Region
from helpers.casts import ours as region
from helpers.comparison import assert_same

ours = functools.partial(region, cache="all")

BF16, FP32 = torch.bfloat16, torch.float32


def test_a_larger_cast_is_held_only_while_autograd_holds_it() -> None:
    x = torch.randn(4, 4, dtype=BF16, requires_grad=True) * 1
    with ours(overrides={"pow": "fp32"}), CastCount32(of=x) as count:
        first = x**2  # saves the cast
        assert held() == (1, 0)
        second = x**3
        assert count.casts == 1
        assert saved(first).data_ptr() == saved(second).data_ptr()
        del first, second
        x**2
        assert (count.casts, held()) == (2, (1, 0))
        with torch.no_grad():
            x**2
            x**2
        assert held() == (1, 0)


def test_a_larger_cast_with_other_strides_is_not_held() -> None:
    x = torch.randn(8, 4, dtype=BF16)[::2]
    with ours(overrides={"pow": "fp32"}), CastCount32(of=x) as count:
        for _ in range(2):
            assert torch.equal(x**2, x.float() ** 2)
            assert held() == (0, 0)
        assert count.casts == 2 + 2


def test_a_larger_cast_has_stocks_gradients() -> None:
    def program(kind: Region) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 4, dtype=BF16, requires_grad=True)
        with kind(overrides={"pow": "fp32"}):
            y = x * 1
            total = (y**2).sum() + (y**3).sum() + (y**2 * 0.3).sum()
        total.backward()
        assert x.grad is not None
        return [total.detach(), x.grad]

    assert_same(program(ours), program(functools.partial(region, cache="none")))


def test_a_backward_inside_the_region_holds_no_more_than_four_casts_none_larger_than_its_source() -> None:
    bytes_held = []
    with ours(overrides={"pow": "fp32"}):
        x = torch.randn(16, 16, requires_grad=True)
        x.register_hook(lambda grad: bytes_held.append(held()[1]))
        y = x * 1
        for _ in range(8):
            y = used_of_size(y).float() + (y.bfloat16() ** 2)
        y.sum().backward()
        x.grad = None
    assert bytes_held[0] <= 4 * 16 * 16 * 2


def used_of_size(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, torch.eye(len(x), dtype=BF16))


def saved(result: torch.Tensor) -> torch.Tensor:
    assert result.grad_fn is not None
    return result.grad_fn._saved_self  # type: ignore[attr-defined,no-any-return]


def held() -> tuple[int, int]:
    info = tp.cache_info()
    return info["entries"], info["bytes"]


class CastCount32(CastCount):
    """Counts the casts of a tensor to float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CASTS and args[0] is self.of and result.dtype == FP32:
            self.casts += 1
        return result
