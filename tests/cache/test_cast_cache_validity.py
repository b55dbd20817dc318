"""A cached cast is used only while its source is unchanged."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import half, ours
from torch_promote.checking.comparison import same_bits

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.bfloat16).view(8, 16)


def weight() -> Any:
    return nn.Parameter(torch.randn(16, 4))


# --- changes that the cache sees


@torch.no_grad()
def copied_into(w: Any) -> None:
    w.copy_(torch.randn(16, 4))


@torch.no_grad()
def multiplied(w: Any) -> None:
    w.mul_(3)


@torch.no_grad()
def indexed(w: Any) -> None:
    w[3] = 7.0


@torch.no_grad()
def written_through_a_view(w: Any) -> None:
    w.view(-1)[5:9].fill_(7.0)


def written_through_detach(w: Any) -> None:
    w.detach().mul_(3)


@torch.no_grad()
def foreach(w: Any) -> None:
    torch._foreach_mul_([w], 3.0)


def initialized(w: Any) -> None:
    nn.init.ones_(w)


def assigned(w: Any) -> None:
    w.data = torch.randn(16, 4)


def vector_to_parameters(w: Any) -> None:
    nn.utils.vector_to_parameters(torch.randn(64), [w])


@torch.no_grad()
def set_(w: Any) -> None:
    w.set_(torch.randn(16, 4))


def storage_grown(w: Any) -> None:
    """The storage object is the same but has moved; the write is through `data`, which has its own version."""
    w.untyped_storage().resize_(2 * w.untyped_storage().nbytes())
    w.data.normal_()


def loaded(w: Any) -> None:
    holder = nn.Module()
    holder.w = w
    holder.load_state_dict({"w": torch.randn(16, 4)})


def stepped(w: Any) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=1.0).step()


CHANGES: list[Callable[[Any], None]] = [
    copied_into,
    multiplied,
    indexed,
    written_through_a_view,
    written_through_detach,
    foreach,
    initialized,
    assigned,
    vector_to_parameters,
    set_,
    storage_grown,
    loaded,
    stepped,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_weight_is_cast_again(change: Callable[[Any], None]) -> None:
    w = weight()
    with ours():
        before = X @ w
        for _ in range(2):
            change(w)
            after = X @ w
            assert torch.equal(after, X @ half(w))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_weight_gets_its_gradient(change: Callable[[Any], None]) -> None:
    w = weight()
    with ours():
        kept = X @ w  # holds the node of the first cast
        change(w)
        w.grad = None
        (X @ w).sum().backward()
    assert kept.grad_fn is not None
    assert torch.equal(w.grad, (X.t() @ torch.ones(8, 4, dtype=torch.bfloat16)).float())


def test_a_new_storage_at_the_same_address_is_seen() -> None:
    """Neither the version nor the data pointer changes."""
    memory = torch.randn(64)

    def same_memory() -> torch.Tensor:
        return torch.from_numpy(memory.numpy()).view(16, 4)

    w = nn.Parameter(same_memory())
    address, version = w.data_ptr(), w._version
    with ours():
        before = X @ w
        w.data = torch.zeros(16, 4)
        memory.mul_(3)
        w.data = same_memory()
        assert (w.data_ptr(), w._version) == (address, version)
        after = X @ w
    assert torch.equal(after, X @ half(w))
    assert not torch.equal(before, after)


def test_storages_that_follow_each_other_are_told_apart() -> None:
    w = weight()
    with ours():
        for _ in range(200):
            w.data = torch.randn(16, 4)
            assert torch.equal(X @ w, X @ half(w))


# --- training in one region

OPTIMIZERS = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def variants() -> list[Any]:
    """Each optimizer with its default implementation and the others that the CPU has."""
    cases = []
    for name in OPTIMIZERS:
        optimizer = getattr(torch.optim, name)
        flags = [flag for flag in ("foreach", "fused") if flag in inspect.signature(optimizer).parameters]
        cases += [pytest.param(optimizer, {flag: True}, id=f"{name} {flag}") for flag in flags]
        cases.append(pytest.param(optimizer, dict.fromkeys(flags, False), id=name))
    return cases


def losses(optimizer: Callable[..., torch.optim.Optimizer], flags: dict[str, bool], one_region: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    updates = optimizer(model.parameters(), lr=0.01, **flags)

    def step() -> float:
        updates.zero_grad()
        loss = model(X).float().pow(2).mean()
        loss.backward()
        updates.step()
        return loss.item()

    if one_region:
        with ours():
            return [step() for _ in range(4)]
    return [ours()(step)() for _ in range(4)]


@pytest.mark.parametrize(("optimizer", "flags"), variants())
def test_training_in_one_region_is_training_in_a_region_per_step(optimizer: Any, flags: dict[str, bool]) -> None:
    expected = losses(optimizer, flags, one_region=False)
    assert len(set(expected)) == 4
    assert losses(optimizer, flags, one_region=True) == expected


# --- somebody writes into the cast itself


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_write_into_a_view_of_the_cast_does_not_stay_in_the_cache(grad: bool) -> None:
    w = weight()
    with ours(overrides={"einsum": "fp16"}):
        first = X @ w
        with torch.set_grad_enabled(grad):
            view = torch.einsum("ij->ij", w)
            assert view.dtype is torch.bfloat16
            assert view.untyped_storage().data_ptr() != w.untyped_storage().data_ptr()
            view.add_(1)
        assert torch.equal(X @ w, first)
        with torch.no_grad():
            assert torch.equal(X @ w, first)


def test_a_view_of_the_cast_shows_that_the_cast_is_shared() -> None:
    """Otherwise the test above would prove nothing."""
    w = weight()
    with ours(overrides={"einsum": "fp16"}), torch.no_grad():
        views = [torch.einsum("ij->ij", w) for _ in range(2)]
    assert views[0].data_ptr() == views[1].data_ptr() != w.data_ptr()


# --- changes that nobody can see, as cache_info's docstring says


def through_data(w: Any) -> None:
    w.data.copy_(torch.zeros(16, 4))


def through_numpy(w: Any) -> None:
    w.detach().numpy()[:] = 0


def by_address(w: Any) -> None:
    ctypes.memset(w.data_ptr(), 0, w.nbytes)


UNSEEN = [through_data, through_numpy, by_address]


@pytest.mark.usefixtures("stale_casts_on_purpose")
@pytest.mark.parametrize("change", UNSEEN, ids=lambda change: change.__name__)
def test_the_cache_is_cleared_by_hand_after_a_change_that_no_version_tells(change: Callable[[Any], None]) -> None:
    w = weight()
    with ours():
        before = X @ w
        change(w)
        stale = X @ w
        tp.clear_cache()
        fresh = X @ w
    assert same_bits(stale, before)
    assert torch.count_nonzero(fresh) == 0
