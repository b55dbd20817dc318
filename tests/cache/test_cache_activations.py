"""cache="all": the cast of an activation serves its next consumers, and no other tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

import torch_promote as tp
from helpers.casts import CastCount, Region, half, stock
from helpers.casts import ours as region
from helpers.comparison import assert_same

ours = functools.partial(region, cache="all")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


EYE = torch.eye(4, dtype=BF16)


def used(x: torch.Tensor) -> torch.Tensor:
    """A consumer, whose result is the cast's numbers."""
    return torch.mm(x, EYE)


def right(x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(used(x), half(x))


# --- reuse


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_one_cast_serves_all_consumers(grad: bool) -> None:
    x = torch.randn(4, 4).mul(2)
    with CastCount(of=x) as count, ours(), torch.set_grad_enabled(grad):
        for _ in range(4):
            assert right(x)
    assert count.casts == 1


@pytest.mark.parametrize("first_grad", [False, True])
def test_a_cast_serves_every_grad_mode(first_grad: bool) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    y = x * 1
    with CastCount(of=y) as count, ours():
        for grad in (first_grad, not first_grad, first_grad):
            with torch.set_grad_enabled(grad):
                assert used(y).requires_grad is grad
        with torch.inference_mode():
            assert right(y)
        result = used(y)
    assert count.casts == 1
    result.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 4))  # type: ignore[arg-type]


# --- bounds and ends


def test_at_most_four_are_kept() -> None:
    with ours(), torch.no_grad():
        alive = [torch.randn(4, 4) for _ in range(9)]
        for number, x in enumerate(alive, start=1):
            used(x)
            assert tp.cache_info()["entries"] == min(number, 4)
        assert tp.cache_info()["bytes"] == 4 * 32
        for x in reversed(alive):
            assert right(x)


@pytest.mark.parametrize("earlier", range(4, 8))
def test_the_oldest_goes_first_whatever_an_earlier_region_used(earlier: int) -> None:
    alive = [torch.randn(4, 4) for _ in range(8)]
    with ours(), torch.no_grad():
        for x in alive[:earlier]:
            used(x)
    with ours(), torch.no_grad():
        for x in alive[:5]:
            used(x)
        with CastCount() as count:
            for x in alive[1:5]:
                used(x)
    assert count.casts == 0


def test_the_death_of_an_activation_frees_its_cast_at_the_next_cast() -> None:
    with ours(), torch.no_grad():
        x = torch.randn(4, 4)
        tensor, storage = weakref.ref(x), StorageWeakRef(x.untyped_storage())
        used(x)
        del x
        assert tensor() is None
        assert storage.expired()
        other = torch.randn(4, 4)
        used(other)
        assert tp.cache_info()["entries"] == 1
        for _ in range(30):
            used(torch.randn(4, 4))
            assert tp.cache_info()["entries"] <= 2


# --- changes of an activation between its consumers


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "view": lambda x: x.view(-1)[3:9].zero_(),
    "detach": lambda x: x.detach().neg_(),
    "data =": lambda x: setattr(x, "data", torch.randn(4, 4)),
    "set_": lambda x: x.set_(torch.randn(4, 4)),
    "resize_": lambda x: x.resize_(3, 4),
    "foreach": lambda x: torch._foreach_mul_([x], 3.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_activation_is_cast_again(change: Callable[[Any], Any]) -> None:
    x = torch.randn(4, 4)
    with ours():
        for _ in range(2):
            assert right(x)
            change(x)
            assert right(x)


def test_writing_an_activation_after_its_use_does_not_change_the_backward() -> None:
    def gradients(make: Region) -> Any:
        torch.manual_seed(0)
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with make():
            y = x * 1
            first = torch.mm(y, w)
            y.mul_(2)
            second = torch.mm(y, w)
        (first.float().sum() + second.float().square().sum()).backward()
        return x.grad, w.grad

    assert_same(gradients(ours), gradients(stock))


def test_new_tensors_at_the_address_of_dead_ones_are_cast_again() -> None:
    addresses = set()
    with ours(), torch.no_grad():
        for _ in range(200):
            x = torch.randn(4, 4)
            addresses.add(x.data_ptr())
            assert right(x)
            del x
    assert len(addresses) < 200


# --- casts under modes


def test_a_cast_that_a_mode_made_of_another_kind_is_not_held() -> None:
    x = torch.randn(4, 4)
    with ours():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert type(used(x)) is FakeTensor
            assert tp.cache_info()["entries"] == 0
        assert right(x)


# --- larger casts, such as float32 ones of bfloat16 activations


def test_a_larger_cast_is_held_only_while_autograd_holds_it() -> None:
    x = torch.randn(4, 4, dtype=BF16, requires_grad=True) * 1
    with ours(overrides={"pow": "fp32"}), CastCount(of=x, to=(FP32,)) as count:
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
    with ours(overrides={"pow": "fp32"}), CastCount(of=x, to=(FP32,)) as count:
        for _ in range(2):
            assert torch.equal(x**2, x.float() ** 2)
            assert held() == (0, 0)
        assert count.casts == 2 + 2


def saved(result: torch.Tensor) -> torch.Tensor:
    assert result.grad_fn is not None
    return result.grad_fn._saved_self  # type: ignore[attr-defined,no-any-return]


def held() -> tuple[int, int]:
    info = tp.cache_info()
    return info["entries"], info["bytes"]
