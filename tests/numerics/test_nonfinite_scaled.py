"""`find_nonfinite` and backwards under GradScaler: faults that its scale does not excuse, and calls made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_promote as tp
from helpers.counted_collectives import counted_collective
from helpers.nonfinite_blocks import HALF, INF, big, find, nothing_is_left, origin_of
from torch_promote.numerics.nonfinite_finder import call_again

__all__ = ["nothing_is_left"]  # a fixture


@pytest.fixture
def half_only() -> Iterator[Callable[[Tensor], Tensor]]:
    """An op that multiplies by 1e5 in float16, and refuses other dtypes."""

    def kernel(x: Tensor) -> Tensor:
        torch.rand(1)
        if x.dtype is not HALF:
            raise TypeError("only float16")
        return x * 1e5

    with torch.library._scoped_library("nonfinite_scaled", "DEF") as library:
        library.define("half_only(Tensor x) -> Tensor")
        library.impl("half_only", kernel, "CompositeExplicitAutograd")
        yield torch.ops.nonfinite_scaled.half_only


def scaled(make: Callable[[Tensor], Tensor], x: Tensor) -> tuple[str, str] | None:
    """The phase and the kind of the origin in a backward of a loss that is scaled by 2."""

    def program() -> None:
        torch.amp.GradScaler("cpu", init_scale=2.0).scale(make(x.requires_grad_()).float().sum()).backward()

    origin = find(program).origin
    return None if origin is None else (origin.phase, origin.kind)


def test_what_the_scale_does_not_excuse() -> None:
    # The gradient fits without the scale.
    assert scaled(lambda x: x * 6e4, big(0.0, HALF)) is None
    # It does not fit.
    assert scaled(lambda x: x * 1e5, big(0.0, HALF)) == ("backward", "overflow in the op")
    # It is infinite in every dtype: 1 / sqrt(0).
    assert scaled(torch.sqrt, big(0.0)) == ("backward", "mathematics")
    # 0 times infinity.
    infinite = big(INF)
    assert scaled(lambda x: torch.where(big(0.0) > 0, x * infinite, x), big(1.0)) == ("backward", "mathematics")


def test_an_overflow_that_cannot_be_run_in_another_dtype(half_only: Callable[[Tensor], Tensor]) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return half_only(gradient)

    assert scaled(Function.apply, big(0.0, HALF)) == ("backward", "overflow in the op")
    random = torch.get_rng_state()
    assert call_again(half_only.default, [big(1.0, HALF)], torch.float32) is None  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), random)


def test_a_call_that_other_ranks_would_have_to_make_is_not_made_again() -> None:
    with counted_collective() as (op, calls):
        assert origin_of(lambda: op(big(4e4, HALF))) == (
            "_dtensor::counted_by_tests",
            "_dtensor::counted_by_tests",
            "overflow in the op",
        )
        assert calls == [HALF]


def test_mathematics_in_an_op_that_autocast_ran_in_float32() -> None:
    with tp.my_autocast("cpu", HALF, overrides={"log": "fp32"}):
        assert origin_of(lambda: torch.log(big(0.0, HALF))) == ("aten::log", "aten::log", "mathematics")
