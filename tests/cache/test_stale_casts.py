"""A kept cast is used only while its source is unchanged, in every mode, in a region and from one to the next."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.casts import CASTS, CastCount, Region, half, ours, stock
from helpers.probes import in_thread

pytestmark = pytest.mark.usefixtures("nothing_persists")

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.bfloat16).view(8, 16)
MODES = pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
TRAINABLE = pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])


def weight(trainable: bool = True) -> Any:
    return nn.Parameter(torch.randn(16, 4), requires_grad=trainable)


def right(w: torch.Tensor, x: torch.Tensor = X) -> torch.Tensor:
    """The product with fresh casts, made without `w.detach()`, which would drop casts."""
    with torch.no_grad(), tp.stock_autocast("cpu", enabled=False):
        return x.to(torch.bfloat16) @ w.to(torch.bfloat16)


def product(w: torch.Tensor, cache: str, grad: bool = False) -> torch.Tensor:
    with ours(cache=cache), torch.set_grad_enabled(grad):
        return X @ w


# --- changes that the cache sees


def stepped(w: Any, **flags: bool) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=1.0, **flags).step()


def stepped_in_a_hook(w: Any) -> None:
    """In a backward of a fused optimizer's own, as trainers do that free gradients early."""
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: stepped(w, fused=True))
    leaf.sum().backward()


def loaded(w: Any) -> None:
    holder = nn.Module()
    holder.w = w
    holder.load_state_dict({"w": torch.randn(16, 4)})


def moved(w: Any) -> None:
    module = nn.Module()
    module.w = w
    module.double()
    w.data.mul_(2)
    module.float()


def storage_grown(w: Any) -> None:
    """The storage object is the same but has moved; the write is through `data`, which has its own version."""
    w.untyped_storage().resize_(2 * w.untyped_storage().nbytes())
    w.data.normal_()


def rewritten_under_a_preserved_version(w: Any) -> None:
    """As FSDP2 does after it has gathered the shards of a weight."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
        w.mul_(3)


def no_grad(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return torch.no_grad()(change)


#: Changes that every mode sees, also in the middle of a region.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "copy_": no_grad(lambda w: w.copy_(torch.randn(16, 4))),
    "mul_": no_grad(lambda w: w.mul_(3)),
    "view": no_grad(lambda w: w.view(-1)[5:9].fill_(7.0)),
    "detach": lambda w: w.detach().mul_(3),
    "foreach": no_grad(lambda w: torch._foreach_mul_([w], 3.0)),
    "init": nn.init.ones_,
    "data =": lambda w: setattr(w, "data", torch.randn(16, 4)),
    "set_": no_grad(lambda w: w.set_(torch.randn(16, 4))),
    "storage": storage_grown,
    "load_state_dict": loaded,
    "step": stepped,
    "foreach step": functools.partial(stepped, foreach=True),
    "fused step": functools.partial(stepped, fused=True),
    "fused step in a thread": lambda w: in_thread(lambda: stepped(w, fused=True)),
    "fused step in a hook": stepped_in_a_hook,
    "fused step in a disabled region": lambda w: ours(enabled=False)(stepped)(w, fused=True),
    "preserved version": rewritten_under_a_preserved_version,
}
#: Changes through another tensor over the data. In a region, the casts of trainable weights stay, as under stock.
ALIASES: dict[str, Callable[[Any], Any]] = {
    "data.mul_": lambda w: w.data.mul_(3),
    "data.copy_": lambda w: w.data.copy_(torch.zeros(16, 4)),
    "NumPy": lambda w: w.detach().numpy().__setitem__(0, 5.0),
    "average": lambda w: w.data.lerp_(torch.zeros(16, 4), 0.5),
    "module.to": moved,
}


@MODES
@TRAINABLE
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_in_a_region(change: Callable[[Any], Any], trainable: bool, cache: str) -> None:
    w = weight(trainable)
    tp.my_autocast("cpu", cache="all")  # FSDP2's hook is installed with it, or when FSDP2 is imported
    with ours(cache=cache):
        before = X @ w
        for _ in range(2):
            change(w)
            after = X @ w
            assert torch.equal(after, right(w))
        w.grad = None
        if trainable:
            after.sum().backward()
            assert torch.equal(w.grad, (X.t() @ torch.ones(8, 4, dtype=torch.bfloat16)).float())
    assert not torch.equal(before, after)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@TRAINABLE
@pytest.mark.parametrize("change", {**CHANGES, **ALIASES}.values(), ids={**CHANGES, **ALIASES})
def test_a_change_between_persistent_regions(change: Callable[[Any], Any], trainable: bool, grad: bool) -> None:
    w = weight(trainable)
    before = product(w, "persistent", grad).detach()
    for _ in range(2):
        assert tp.cache_info()["persistent_entries"] == 1
        change(w)
        after = product(w, "persistent", grad).detach()
        assert torch.equal(after, right(w))
        with CastCount(of=w) as count:
            product(w, "persistent", not grad)
        assert count.casts == 0
    assert not torch.equal(before, after)


@MODES
@pytest.mark.parametrize("change", ALIASES.values(), ids=ALIASES)
def test_a_frozen_weight_is_changed_through_an_alias_in_a_region(change: Callable[[Any], Any], cache: str) -> None:
    w = weight(trainable=False)
    with ours(cache=cache):
        X @ w
        change(w)
        assert torch.equal(X @ w, right(w))


def test_compiled_steps() -> None:
    w = weight()
    updates = torch.optim.SGD([w], lr=0.5, momentum=0.5)
    step = torch.compile(updates.step, backend="aot_eager")
    for _ in range(2):
        product(w, "persistent")
        w.grad = torch.ones_like(w)
        step()
        assert torch.equal(product(w, "persistent"), right(w))


def test_storages_that_follow_each_other_are_told_apart() -> None:
    w = weight()
    with ours():
        for _ in range(200):
            w.data = torch.randn(16, 4)
            assert torch.equal(X @ w, right(w))


def test_casts_of_other_weights_stay() -> None:
    written, other = weight(), weight()
    with ours(cache="persistent"):
        X @ written, X @ other
        stepped(written, fused=True)
        with CastCount() as count:
            X @ written, X @ other
    assert count.casts == 1


class WriteDuringCast(TorchDispatchMode):
    """Writes in another thread, after the next cast of a tensor has been computed and before the cache stores it."""

    def __init__(self, w: torch.Tensor, write: Callable[[], object]) -> None:
        super().__init__()
        self.address, self.write, self.waits = w.data_ptr(), write, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.waits and func in CASTS and args[0].data_ptr() == self.address:
            self.waits = False
            in_thread(self.write)
        return result


@TRAINABLE
@MODES
def test_a_write_while_the_weight_is_cast(cache: str, trainable: bool) -> None:
    w = weight(trainable)
    for write in (lambda: stepped(w, fused=True), lambda: w.data.mul_(2)):
        tp.clear_cache()
        with ours(cache=cache):
            with WriteDuringCast(w, write) as mode:
                X @ w
            assert not mode.waits
            if not trainable:
                assert torch.equal(X @ w, right(w))
        with ours(cache=cache):
            assert torch.equal(X @ w, right(w))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_write_into_a_view_of_the_cast_does_not_stay_in_the_cache(grad: bool) -> None:
    w = weight()
    with ours(overrides={"einsum": "fp16"}):
        first = X @ w
        with torch.set_grad_enabled(grad):
            view = torch.einsum("ij->ij", w)
            assert view.data_ptr() != w.data_ptr()
            view.add_(1)
        assert torch.equal(X @ w, first)
        with torch.no_grad():
            assert torch.equal(X @ w, first)


@MODES
def test_an_op_that_may_return_a_view_shares_no_cast_beyond_stock(cache: str) -> None:
    w, x = weight(trainable=False), torch.randn(4, 16, requires_grad=True)
    with ours(cache=cache, overrides={"einsum": torch.bfloat16}):
        y = x @ w
        torch.einsum("ij->ji", w).mul_(2)
        assert torch.equal(x @ w, y)


# --- while other tensors share the data, no cast beyond stock's is kept


def test_a_flat_buffer_behind_a_weight() -> None:
    flat, w = torch.randn(64), weight(trainable=False)
    w.data = flat.view(16, 4)
    with ours(cache="persistent"):
        X @ w
        flat.mul_(2)
        assert torch.equal(X @ w, right(w))


@pytest.mark.parametrize("alias", [lambda w: w.data, lambda w: w.untyped_storage()])
def test_an_alias_that_is_alive(alias: Callable[[Any], Any]) -> None:
    w = weight(trainable=False)
    for _ in range(2):
        shared = alias(w)
        product(w, "persistent")
        shared.fill_(3)
        assert torch.equal(product(w, "persistent"), right(w))


def test_a_storage_object_that_was_asked_for_and_let_go() -> None:
    w = weight(trainable=False)
    w.untyped_storage().nbytes()
    product(w, "persistent")
    assert tp.cache_info()["persistent_entries"] == 1


# --- memory that code outside of PyTorch may write to: no cast outlives its region


def part_of_a_storage(_: Path) -> torch.Tensor:
    return torch.empty(0).set_(torch.ones(128).untyped_storage()[:256]).view(16, 4)


def mapped_file(folder: Path, shared: bool) -> torch.Tensor:
    (folder / "file").write_bytes(bytes(256))
    return torch.from_file(str(folder / "file"), shared=shared, size=64).view(16, 4)


def mapped_checkpoint(folder: Path) -> torch.Tensor:
    torch.save({"first": torch.zeros(5), "w": torch.ones(16, 4)}, folder / "checkpoint")
    return torch.load(folder / "checkpoint", mmap=True)["w"]  # type: ignore[no-any-return]


MEMORY: dict[str, tuple[Callable[[Path], torch.Tensor], int]] = {
    "NumPy": (lambda _: torch.from_numpy(np.ones((16, 4), np.float32)), 0),
    "buffer": (lambda _: torch.frombuffer(bytearray(256), dtype=torch.float32).view(16, 4), 0),
    "DLPack": (lambda _: torch.from_dlpack(np.ones((16, 4), np.float32)), 0),
    "shared": (lambda _: torch.ones(16, 4).share_memory_(), 0),
    "shared file": (functools.partial(mapped_file, shared=True), 0),
    "part of a storage": (part_of_a_storage, 0),
    "private file": (functools.partial(mapped_file, shared=False), 1),
    "mapped checkpoint": (mapped_checkpoint, 1),
}


@TRAINABLE
@pytest.mark.parametrize("memory", MEMORY)
def test_casts_that_outlive_regions_by_the_memory_of_the_weight(memory: str, trainable: bool, tmp_path: Path) -> None:
    make, kept = MEMORY[memory]
    w = nn.Parameter(make(tmp_path), requires_grad=trainable)
    product(w, "persistent")
    assert tp.cache_info()["persistent_entries"] == kept


# --- limits, which docs/casts.md lists


def by_address(w: Any) -> None:
    ctypes.memset(w.data_ptr(), 0, w.nbytes)


LIMITS: dict[str, Callable[[Any], Any]] = {
    "address": by_address,
    "data of a view": lambda w: w[:].data.fill_(2),
    "DLPack": lambda w: torch.from_dlpack(w.requires_grad_(False)).fill_(2),
    "kron(out=)": lambda w: torch.kron(torch.ones(4, 2), torch.full((4, 2), 2.0), out=w),
    "fused op": lambda w: torch._fused_sgd_(
        [w.requires_grad_(False)], [torch.ones_like(w)], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=False,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("no_cast_checks")
@pytest.mark.parametrize("cache", ["persistent", "all"])
@pytest.mark.parametrize("write", LIMITS.values(), ids=LIMITS)
def test_undetected_writes_need_clear_cache(write: Callable[[Any], None], cache: str) -> None:
    w = weight(trainable=False)
    with ours(cache=cache):
        X @ w
        write(w)
        assert not torch.equal(X @ w, right(w))
        tp.clear_cache()
        assert torch.equal(X @ w, right(w))


@pytest.mark.usefixtures("no_cast_checks")
@pytest.mark.parametrize("write", {**LIMITS, **ALIASES}.values(), ids={**LIMITS, **ALIASES})
def test_the_default_mode_misses_no_write_that_stock_detects(write: Callable[[Any], None]) -> None:
    def detects(region: Region, trainable: bool) -> bool:
        w = weight(trainable)
        with region(), torch.no_grad():
            X @ w
            write(w)
            return torch.equal(X @ w, right(w))

    assert detects(ours, trainable=False)
    assert detects(stock, trainable=False)
    assert detects(ours, trainable=True) >= detects(stock, trainable=True)


@pytest.mark.usefixtures("no_cast_checks")
def test_kron_writes_to_a_trainable_weight_unseen_as_under_stock() -> None:
    for region, cache in ((stock, None), *((ours, cache) for cache in ("weights", "all", "persistent"))):
        w = weight(trainable=True)
        with region(**{"cache": cache} if cache else {}), torch.no_grad():
            X @ w
            LIMITS["kron(out=)"](w)
            assert not torch.equal(X @ w, right(w))


# --- swap_tensors refuses tensors with weak references: the cache has none where stock has none


@pytest.fixture
def modules_swap() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


SWAPS: dict[str, Callable[[nn.Linear], object]] = {
    "swap_tensors": lambda linear: torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.randn(16, 16))),
    "half": lambda linear: linear.half(),
    "load_state_dict": lambda linear: linear.load_state_dict(nn.Linear(16, 16).state_dict()),
}


@pytest.mark.usefixtures("modules_swap")
@MODES
@pytest.mark.parametrize("change", SWAPS.values(), ids=SWAPS)
def test_swaps_work_where_stock_allows_them(change: Callable[[nn.Linear], object], cache: str) -> None:
    def outcome(region: Any, trainable: bool, grad: bool, inside: bool) -> str:
        linear, x = nn.Linear(16, 16).requires_grad_(trainable), X.float()
        try:
            with torch.set_grad_enabled(grad):
                with region():
                    linear(x)
                    if inside:
                        change(linear)
                if not inside:
                    change(linear)
                with region():
                    got = linear(x)
        except RuntimeError as error:
            return str(error)
        expected = torch.nn.functional.linear(half(x), half(linear.weight), half(linear.bias))
        return "right" if torch.equal(got, expected) else "wrong"

    region = functools.partial(ours, cache=cache)
    for trainable, grad, inside in itertools.product((True, False), repeat=3):
        if outcome(stock, trainable, grad, inside) == "right":
            assert outcome(region, trainable, grad, inside) == "right", (trainable, grad, inside)
    assert outcome(region, trainable=False, grad=False, inside=True) == "right"
