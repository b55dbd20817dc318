"""cache="persistent": a cast is used only while its weight is unchanged."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.persistent_casts import GRAD, X, casts_in, held, ours, product, right, weight

pytestmark = pytest.mark.usefixtures("nothing_persists")


def loaded(w: Any) -> None:
    holder = nn.Module()
    holder.w = w
    holder.load_state_dict({"w": torch.randn(16, 4)})


def stepped(w: Any, **flags: bool) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.Adam([w], lr=1.0, **flags).step()


def vectorized(w: Any) -> None:
    nn.utils.vector_to_parameters(torch.randn(64), [w])


def under_no_grad(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return torch.no_grad()(change)


def moved(w: Any) -> None:
    module = nn.Module()
    module.w = w
    module.double()
    w.data.mul_(2)
    module.float()


def swapped(w: Any) -> None:
    torch.utils.swap_tensors(w, nn.Parameter(torch.randn(16, 4)))


def through_numpy(w: Any) -> None:
    w.detach().numpy()[:] = 2


def moved_average(w: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(holder := nn.ParameterList([w]))
    average.update_parameters(holder)
    w.data.copy_(average.module[0].data * 3)  # type: ignore[index]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mul_": under_no_grad(lambda w: w.mul_(3)),
    "copy_": under_no_grad(lambda w: w.copy_(torch.randn(16, 4))),
    "item": under_no_grad(lambda w: w.__setitem__(3, 7.0)),
    "view": under_no_grad(lambda w: w.view(-1)[5:9].fill_(7.0)),
    "detach": lambda w: w.detach().mul_(3),
    "data =": lambda w: setattr(w, "data", torch.randn(16, 4)),
    "data.mul_": lambda w: w.data.mul_(3),
    "data.copy_": lambda w: w.data.copy_(torch.zeros(16, 4)),
    "numpy": through_numpy,
    "set_": under_no_grad(lambda w: w.set_(torch.randn(16, 4))),
    "init": nn.init.ones_,
    "foreach": under_no_grad(lambda w: torch._foreach_mul_([w], 3.0)),
    "load_state_dict": loaded,
    "vector_to_parameters": vectorized,
    "optimizer": stepped,
    "foreach optimizer": functools.partial(stepped, foreach=True),
    "fused optimizer": functools.partial(stepped, fused=True),
    "module.to": moved,
    "swap_tensors": swapped,
    "averaged": moved_average,
}


@GRAD
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_weight_is_cast_again(change: Callable[[Any], Any], grad: bool) -> None:
    w = weight()
    before = product(w, grad).detach()
    for _ in range(2):
        assert held()[0] == 1
        change(w)
        after = product(w, grad).detach()
        assert torch.equal(after, right(w))
        assert casts_in(lambda: product(w, not grad)) == 0
    assert not torch.equal(before, after)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fused_optimizer_outside_of_any_region(optimizer: str) -> None:
    w = weight()
    updates = getattr(torch.optim, optimizer)([w], lr=0.5, fused=True)
    for _ in range(3):
        product(w, grad=True).square().sum().backward()
        updates.step()
        updates.zero_grad()
        assert torch.equal(product(w), right(w))


def test_a_fused_optimizer_inside_of_a_region() -> None:
    w = weight()
    updates = torch.optim.SGD([w], lr=0.5, fused=True)
    for _ in range(3):
        with ours():
            torch.mm(X, w).square().sum().backward()
            updates.step()
        updates.zero_grad()
        assert torch.equal(product(w), right(w))


def test_a_change_in_the_middle_of_a_region() -> None:
    w = weight()
    for grad in (False, True):
        with ours(), torch.set_grad_enabled(grad):
            for _ in range(2):
                assert torch.equal(torch.mm(X, w), right(w))
                with torch.no_grad():
                    w.mul_(-2)
                assert torch.equal(torch.mm(X, w), right(w))


def test_compiled_updates_are_seen() -> None:
    w = weight()
    updates = torch.optim.SGD([w], lr=0.5, momentum=0.5)
    step = torch.compile(updates.step, backend="aot_eager")
    for _ in range(2):
        product(w)
        w.grad = torch.ones_like(w)
        step()
        assert torch.equal(product(w), right(w))


@pytest.mark.usefixtures("stale_casts_on_purpose")
def test_undetected_writes_need_clear_cache() -> None:
    """The limits documented in docs/casts.md."""
    w = weight()
    product(w)
    ctypes.memset(w.data_ptr(), 0, w.nbytes)
    assert not torch.equal(product(w), right(w))
    tp.clear_cache()
    assert torch.equal(product(w), right(w))


def test_a_tensor_over_the_weights_data_from_before_the_cast() -> None:
    w = weight()
    for _ in range(2):
        data = w.data
        product(w)
        data.mul_(3)
        assert torch.equal(product(w), right(w))
