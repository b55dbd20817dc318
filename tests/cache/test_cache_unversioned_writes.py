"""Writes that leave the version unchanged, in any thread: the casts of all threads are made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.casts import CASTS, CastCount, ours
from helpers.probes import in_thread
from helpers.subprocesses import output_of
from torch_promote import _C

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Any:
    tp.clear_cache()
    yield
    tp.clear_cache()


def weight(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.randn(16, 4), requires_grad=requires_grad)


def product(w: torch.Tensor, x: torch.Tensor = X) -> torch.Tensor:
    """The product with fresh casts, made without `w.detach()`, which would drop persistent casts."""
    with torch.no_grad(), tp.stock_autocast("cpu", enabled=False):
        return x.to(torch.bfloat16) @ w.to(torch.bfloat16)


def step(*weights: torch.Tensor) -> None:
    """A step of fused SGD, which does not increase versions, by a call of the op."""
    with torch.no_grad():
        grads = [torch.ones_like(w) for w in weights]
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        torch._fused_sgd_(list(weights), grads, [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, **flags)


def in_disabled_region(w: torch.Tensor) -> None:
    with ours(enabled=False):
        step(w)


def in_stock_disabled_region(w: torch.Tensor) -> None:
    with tp.stock_autocast("cpu", enabled=False):
        step(w)


def in_hook_of_backward(w: torch.Tensor) -> None:
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: step(w))
    leaf.sum().backward()


def in_inference_mode(w: torch.Tensor) -> None:
    with torch.inference_mode():
        step(w)


def write_and_report(w: torch.Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
        w.mul_(2)
    _C.forget_casts([w])


WRITES: dict[str, Callable[[torch.Tensor], None]] = {
    "here": step,
    "disabled region": in_disabled_region,
    "stock's disabled region": in_stock_disabled_region,
    "thread": lambda w: in_thread(lambda: step(w)),
    "hook": in_hook_of_backward,
    "inference mode": in_inference_mode,
    "reported": lambda w: in_thread(lambda: write_and_report(w)),
}
MODES = pytest.mark.parametrize("cache", ["weights", "persistent", "all"])
TRAINABLE = pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])


@TRAINABLE
@MODES
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_step_in_a_region(write: Callable[[torch.Tensor], None], cache: str, trainable: bool) -> None:
    w = weight(trainable)
    with ours(cache=cache):
        for _ in range(3):
            assert torch.equal(X @ w, product(w))
            write(w)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_inference_mode_around_the_uses(write: Callable[[torch.Tensor], None]) -> None:
    w = weight()
    with ours(cache="persistent"):
        for _ in range(3):
            with torch.inference_mode():
                assert torch.equal(X @ w, product(w))
            write(w)


@TRAINABLE
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_step_between_regions(write: Callable[[torch.Tensor], None], trainable: bool) -> None:
    w = weight(trainable)
    for _ in range(3):
        with ours(cache="persistent"), torch.no_grad():
            assert torch.equal(X @ w, product(w))
        write(w)


def test_every_fused_optimizer_is_watched() -> None:
    for name in _C.UNVERSIONED_WRITERS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "ADInplaceOrView"), name
    # The list contains all of PyTorch's fused optimizers.
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_fused_"))
    fused = {name for name in names if name.split(".")[0].endswith("_") and ".out" not in name}
    assert fused == {name for name in _C.UNVERSIONED_WRITERS if name.startswith("aten::")}


def test_casts_of_other_weights_stay() -> None:
    written, other = weight(), weight()
    with ours(cache="persistent"):
        X @ written, X @ other
        step(written)
        with CastCount() as count:
            X @ written, X @ other
    assert count.casts == 3  # x twice, and the weight that was written


def test_a_view_of_a_written_weight() -> None:
    w = nn.Parameter(torch.randn(4, 16))
    with ours(cache="all"):
        X @ w.t()
        step(w)
        assert torch.equal(X @ w.t(), product(w.t()))


def test_a_write_of_more_than_the_log_holds() -> None:
    written, other = weight(), weight()
    with ours(cache="all"):
        X @ written, X @ other
        with torch.autograd._unsafe_preserve_version_counter(written), torch.no_grad():
            written.mul_(2)
        _C.forget_casts([written] * 70_000)
        _C.forget_casts([torch.ones(1)])
        assert torch.equal(X @ written, product(written))
        assert torch.equal(X @ other, product(other))


class WriteDuringCast(TorchDispatchMode):
    """Steps a weight in another thread, after its next cast has been computed and before the cache stores it."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = w
        self.waits = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.waits and func in CASTS and args[0].data_ptr() == self.w.data_ptr():
            self.waits = False
            in_thread(lambda: step(self.w))
        return result


@TRAINABLE
@MODES
def test_a_write_while_the_weight_is_cast(cache: str, trainable: bool) -> None:
    w = weight(trainable)
    with ours(cache=cache):
        with WriteDuringCast(w) as mode:
            X @ w
        assert not mode.waits
        assert torch.equal(X @ w, product(w))
    with ours(cache=cache):
        assert torch.equal(X @ w, product(w))


def test_a_write_while_an_activation_is_cast() -> None:
    x, w = X.clone(), weight()
    with ours(cache="all"):
        with WriteDuringCast(x):
            x @ w
        assert torch.equal(x @ w, product(w, x))


def test_no_cast_is_stored_after_the_data_was_shared() -> None:
    """`weight.data` in another thread, while the weight is cast."""
    w = weight(requires_grad=False)

    class WriteThroughData(WriteDuringCast):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if self.waits and func in CASTS and args[0].data_ptr() == self.w.data_ptr():
                self.waits = False
                in_thread(lambda: self.w.data.mul_(2))
            return result

    for _ in range(2):
        with ours(cache="persistent"):
            with WriteThroughData(w):
                X @ w
            assert torch.equal(X @ w, product(w))


SERVING = """
import sys, threading, torch
from torch import nn
import torch_promote as tp

torch.set_num_threads(1)
w = nn.Parameter(torch.zeros(2048, 2048))
x = torch.eye(2048, dtype=torch.bfloat16)[:1]
optimizer = torch.optim.SGD([w], lr=1.0, fused=True)
together = threading.Barrier(7, timeout=100)  # breaks if a thread raises
stale = []


def serve():
    for now in range(1, rounds + 1):
        together.wait()
        for _ in range(3):  # while the weight is written
            with tp.my_autocast("cpu", cache="persistent"), torch.no_grad():
                x @ w
        together.wait()  # the step is done
        with tp.my_autocast("cpu", cache="persistent"), torch.no_grad():
            got = (x @ w)[0, 0].item()
        if got != -now:
            stale.append((now, got))
        together.wait()


rounds = int(sys.argv[1])
threads = [threading.Thread(target=serve) for _ in range(6)]
for thread in threads:
    thread.start()
for _ in range(rounds):
    w.grad = torch.ones(2048, 2048)
    tp.clear_cache()  # so that the threads cast
    with tp.check_casts(False):  # what is being written differs from its cast
        together.wait()
        optimizer.step()
        together.wait()
    together.wait()
for thread in threads:
    thread.join()
print(len(stale), stale[:3])
"""


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_threads_that_serve_while_one_trains(rounds: int) -> None:
    assert output_of(SERVING, str(rounds)) == "0 []\n"


def test_an_op_that_raises_has_written_to_some() -> None:
    w = weight()
    with ours():
        X @ w
        before = w.detach().clone()
        with pytest.raises(NotImplementedError):
            step(w, torch.ones(2).long())
        assert not torch.equal(before, w), "it wrote to the first before it raised for the second"
        with CastCount(of=w) as count:
            assert torch.equal(X @ w, X.bfloat16() @ w.detach().bfloat16())
        assert count.casts == 1
