"""Writes that the cache cannot detect: under `check_casts`, a use of the weight is right or raises.

The tests of the cache check whether it detects the writes in HIDDEN. The writes in LIMITS are documented limits
(docs/casts.md), which `check_casts` has to find.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.casts import ours
from helpers.subprocesses import output_of
from torch_promote.checking.check_casts import check_casts

pytestmark = pytest.mark.usefixtures("nothing_persists")

EYE = torch.eye(4)

#: Yields a product of EYE with a weight, and the weight. (Comparing must not make an alias of the weight.)
Program = Iterator[tuple[torch.Tensor, torch.Tensor]]


def weight(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4), requires_grad=requires_grad)


def fused_sgd(w: nn.Parameter) -> torch.optim.Optimizer:
    w.grad = torch.ones_like(w)
    return torch.optim.SGD([w], lr=1.0, fused=True)


def used(w: nn.Parameter, cache: str) -> tuple[torch.Tensor, nn.Parameter]:
    with ours(cache=cache), torch.no_grad():
        return EYE @ w, w


def a_compiled_fused_step() -> Program:
    w = weight()
    step = torch.compile(fused_sgd(w).step, backend="eager")
    for _ in range(3):
        yield used(w, "persistent")
        step()


def a_fused_kernel_called_directly() -> Program:
    w = weight()
    averages = torch.zeros(4, 4), torch.zeros(4, 4)
    for _ in range(3):
        yield used(w, "persistent")
        with torch.no_grad():
            torch._fused_adamw_(
                [w],
                [torch.ones(4, 4)],
                *([average] for average in averages),
                [],
                [torch.ones(())],
                lr=0.1,
                beta1=0.9,
                beta2=0.9,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


def promotion_around_a_loop() -> Program:
    w = weight()
    with tp.promotion("torch"):
        for _ in range(3):
            yield used(w, "weights")
            w.data.sub_(0.25)


def stocks_cache_cleared() -> Program:
    w = weight()
    with ours():
        yield EYE @ w, w
        w.data.mul_(3)
        torch.clear_autocast_cache()
        yield EYE @ w, w


def a_step_with_autocast_off() -> Program:
    w = weight()
    optimizer = fused_sgd(w)
    with ours():
        yield EYE @ w, w
        with ours(enabled=False):
            optimizer.step()
        yield EYE @ w, w


def a_step_in_another_thread() -> Program:
    w = weight()
    thread = threading.Thread(target=fused_sgd(w).step)
    with ours():
        yield EYE @ w, w
        thread.start()
        thread.join()
        yield EYE @ w, w


def a_step_between_uses_in_inference_mode() -> Program:
    w = weight()
    optimizer = fused_sgd(w)
    with ours(cache="all"):
        with torch.inference_mode():
            yield EYE @ w, w
        optimizer.step()
        with torch.inference_mode():
            yield EYE @ w, w


def _frozen_and_written(write: Callable[[nn.Parameter], object]) -> Program:
    w = weight(requires_grad=False)
    for _ in range(2):
        yield used(w, "persistent")
        write(w)
        yield used(w, "persistent")


HIDDEN: dict[str, Callable[[], Program]] = {
    "compiled fused step": a_compiled_fused_step,
    "fused kernel": a_fused_kernel_called_directly,
    "promotion around a loop": promotion_around_a_loop,
    "torch.clear_autocast_cache": stocks_cache_cleared,
    "step with autocast off": a_step_with_autocast_off,
    "step in another thread": a_step_in_another_thread,
    "step between inference": a_step_between_uses_in_inference_mode,
    "from_dlpack": lambda: _frozen_and_written(lambda w: torch.from_dlpack(w).mul_(2)),
    "set_": lambda: _frozen_and_written(lambda w: torch.empty(0).set_(w).mul_(2)),
    "untyped_storage": lambda: _frozen_and_written(
        lambda w: w.untyped_storage().copy_(torch.full((4, 4), 5.0).untyped_storage())
    ),
}


@pytest.mark.parametrize("program", HIDDEN.values(), ids=HIDDEN)
def test_no_stale_result_under_the_check(program: Callable[[], Program], fresh_dynamo: None) -> None:
    uses = 0
    try:
        with check_casts():
            for product, w in program():
                uses += 1
                assert torch.equal(product.detach(), w.to(torch.bfloat16)), "a stale cast was used"
    except tp.errors.StaleCastError:
        uses += 1
    assert uses >= 2


def through_a_view() -> Program:
    w = weight(requires_grad=False)
    yield used(w, "persistent")
    w[0].data.fill_(0)
    yield used(w, "persistent")


def by_address() -> Program:
    w = weight(requires_grad=False)
    yield used(w, "persistent")
    ctypes.memset(w.data_ptr(), 0, w.nbytes)
    yield used(w, "persistent")


LIMITS: dict[str, Callable[[], Program]] = {"data of a view": through_a_view, "kernel": by_address}


@pytest.mark.parametrize("program", LIMITS.values(), ids=LIMITS)
def test_documented_limits_are_found(program: Callable[[], Program]) -> None:
    def is_right() -> list[bool]:
        return [torch.equal(product, w.to(torch.bfloat16)) for product, w in program()]

    with check_casts(False):
        assert is_right() == [True, False]
    with check_casts(), pytest.raises(tp.errors.StaleCastError, match="cache mode: persistent"):
        is_right()


def test_clear_cache_is_the_remedy() -> None:
    with check_casts() as checks:
        for program in LIMITS.values():
            run = program()
            for product, w in run:
                assert torch.equal(product, w.to(torch.bfloat16))
                tp.clear_cache()
    assert checks.checked == 0


def test_servers_beside_a_fused_trainer() -> None:
    """A stale result raises where it is used; the program below checks what the servers got after the last step."""
    w = weight()
    optimizer = fused_sgd(w)
    stop = threading.Event()
    errors: list[Any] = []

    def serve() -> None:
        while not stop.is_set():
            try:
                used(w, "persistent")
            except tp.errors.StaleCastError:
                errors.append("raised")

    with check_casts() as checks:
        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            optimizer.step()
        stop.set()
        for thread in threads:
            thread.join()
        try:
            product, _ = used(w, "persistent")
            assert torch.equal(product, w.to(torch.bfloat16))
        except tp.errors.StaleCastError:
            errors.append("raised")
    assert checks.checked > 0
    assert set(errors) <= {"raised"}


DIES_WITH_THE_LAST_WEAK_REFERENCE = """
import weakref, torch, torch_promote as tp
from torch.utils._python_dispatch import TorchDispatchMode

x, w, kept, died = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True), [], []

def on_death(_):
    died.append(1)
    with tp.my_autocast("cpu"):
        x @ torch.ones(4, 4, requires_grad=True)

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() == w.data_ptr():
            kept.append(weakref.ref(out, on_death))
        return out

def loss(w):
    with tp.my_autocast("cpu"):
        return (x @ w).float().sum()

with tp.check_casts(), Watch():
    for _ in range(80):
        torch.func.grad(loss)(w)
print(len(died) > 0)
"""


def test_what_dies_with_the_last_weak_reference_to_a_cast_may_use_regions() -> None:
    """Functorch's wrappers hold their tensors until then."""
    assert output_of(DIES_WITH_THE_LAST_WEAK_REFERENCE, timeout=60) == "True\n"
