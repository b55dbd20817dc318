"""`check_casts`: a stale cast raises, in every cache mode and for every kind of tensor, and nothing else changes."""

from __future__ import annotations

import ctypes
import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.casts import ours
from helpers.comparison import assert_same
from helpers.models import EVERY_MODEL, loss_of, made, region_of
from helpers.probes import OpLog, in_thread
from helpers.subprocesses import environment, run_python
from torch_promote.checking.check_casts import check_casts
from torch_promote.errors import StaleCastError

pytestmark = pytest.mark.usefixtures("nothing_persists")

CACHES = ("weights", "persistent", "all")
EVERY_MODE = pytest.mark.parametrize("cache", CACHES)
EYE = torch.eye(4)


def weight(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-2, 2, 16).view(4, 4), requires_grad=requires_grad)


# --- writes that the cache does not detect

#: Yields a product of EYE with a weight, and the weight. (Comparing must not make an alias of the weight.)
Program = Iterator[tuple[torch.Tensor, Any]]


def in_one_region(write: Callable[[Any], object], cache: str = "weights") -> Program:
    w = weight()
    with ours(cache=cache):
        yield EYE @ w, w
        write(w)
        yield EYE @ w, w


def frozen(write: Callable[[Any], object], cache: str = "persistent") -> Program:
    w = weight(requires_grad=False)
    for _ in range(2):
        yield used(w, cache)
        write(w)
        yield used(w, cache)


def used(w: nn.Parameter, cache: str = "persistent") -> tuple[torch.Tensor, nn.Parameter]:
    with ours(cache=cache), torch.no_grad():
        return EYE @ w, w


def activation() -> Program:
    x, other = EYE * 1.5, torch.ones(4, 2, dtype=torch.bfloat16)
    with ours(cache="all"):
        yield x @ other, x
        x.data.mul_(2)
        yield x @ other, x


def over_numpy() -> Program:
    array = torch.linspace(-2, 2, 16).view(4, 4).numpy()
    w = nn.Parameter(torch.from_numpy(array), requires_grad=False)
    with ours(cache="all"):
        yield EYE @ w, w
        array *= 2
        yield EYE @ w, w


def double(w: torch.Tensor) -> None:
    w.data.mul_(2)


def clear(w: torch.Tensor) -> None:
    ctypes.memset(w.data_ptr(), 0, w.nbytes)


STALE: dict[str, tuple[str, Callable[[], Program]]] = {
    **{f"data, {cache}": (cache, functools.partial(in_one_region, double, cache)) for cache in CACHES},
    "memory of an array": ("all", over_numpy),
    "memset between regions": ("persistent", lambda: frozen(clear)),
    "data of an activation": ("all", activation),
}


@pytest.mark.parametrize(("cache", "program"), STALE.values(), ids=STALE)
def test_a_stale_cast_raises(cache: str, program: Callable[[], Program]) -> None:
    with check_casts(False):
        run = program()
        first, second = next(run)[0], next(run)[0]
    assert torch.equal(first, second), "the cache detects this write: nothing is stale"
    run = program()
    with check_casts() as checks:
        next(run)
        with pytest.raises(StaleCastError, match=f"cache mode: {cache}"):
            next(run)
    assert checks.checked == 1


@EVERY_MODE
def test_the_stale_cast_is_dropped(cache: str) -> None:
    w = weight()
    with check_casts(), ours(cache=cache):
        EYE @ w
        w.data.mul_(2)
        with pytest.raises(StaleCastError):
            EYE @ w
        assert torch.equal(EYE @ w, EYE.bfloat16() @ w.detach().bfloat16())


# --- what does not raise


@EVERY_MODE
@EVERY_MODEL
def test_all_uses_of_cached_casts_are_compared(name: str, cache: str) -> None:
    model, x = made(name)
    before = tp.cache_info()["hits"]
    with check_casts() as checks:
        for _ in range(2):
            with region_of(cache)():
                loss = loss_of(model, x)
            loss.backward()
    assert (checks.checked, checks.skipped) == (tp.cache_info()["hits"] - before, 0)
    assert name != "tied" or checks.checked > 0


@EVERY_MODE
def test_a_detected_write_does_not_raise(cache: str) -> None:
    w = weight()
    with check_casts() as checks, ours(cache=cache):
        for _ in range(3):
            EYE @ w
            with torch.no_grad():
                w.mul_(2)
            EYE @ w
    assert checks.checked >= 2 or cache != "weights"


def test_bits_are_compared() -> None:
    w = nn.Parameter(torch.tensor([[0.0, float("nan")]]))
    with check_casts() as checks, ours():
        for _ in range(3):
            torch.ones(1, 1) @ w
        assert checks.checked == 2
        w.data.neg_()
        with pytest.raises(StaleCastError, match=r"the first at \[0, 0\]: 0\.0 instead of -0\.0"):
            torch.ones(1, 1) @ w


def test_a_wrapper_subclass() -> None:
    inner = torch.linspace(-2, 2, 16).view(4, 4)
    w = nn.Parameter(TwoTensor(inner, inner.clone()))
    with check_casts() as checks, ours():
        for _ in range(2):
            EYE @ w
        assert (checks.checked, checks.skipped) == (1, 0)
        inner.data.mul_(2)
        with pytest.raises(StaleCastError):
            EYE @ w


# --- the error


class Encoder(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def test_the_error_names_the_weight_the_mode_and_both_lines() -> None:
    model = nn.ModuleDict({"encoder": Encoder(nn.Linear(4, 4), nn.Linear(4, 4))})
    with check_casts(), ours():
        model["encoder"](EYE)
        model["encoder"][1].weight.data.mul_(2)
        with pytest.raises(StaleCastError) as caught:
            model["encoder"](EYE)
    error = caught.value
    assert error.weight == "encoder.1.weight (Parameter, 4 x 4, float32)"
    assert (error.dtype, error.mode) == ("bfloat16", "weights")
    for line in (error.first_line, error.this_line):  # those of the user's module, not of nn.Linear
        assert line.startswith(f"{__file__}:")
        assert line.endswith("in forward: x = layer(x)")
    text = str(error)
    for part in (error.weight, "cache mode: weights", error.first_line, "clear_cache()", 'cache="none"'):
        assert part in text
    assert str(pickle.loads(pickle.dumps(error))) == text


# --- blocks, threads and the environment


def test_the_block_entered_last_decides() -> None:
    with check_casts(False) as outer, check_casts() as inner:
        with check_casts(False) as off:
            list(in_one_region(double))
        with pytest.raises(StaleCastError):
            list(in_one_region(double))
    assert (outer.checked, inner.checked, off.checked) == (1, 1, 0)
    with check_casts(False):
        first, second = check_casts(), check_casts()
        for block in (first, second):
            block.__enter__()
        first.__exit__(None, None, None)
        with pytest.raises(StaleCastError):
            list(in_one_region(double))
        second.__exit__(None, None, None)
        list(in_one_region(double))
    assert (first.checked, second.checked) == (0, 1)


def test_every_thread_is_checked() -> None:
    with check_casts() as checks, pytest.raises(StaleCastError):
        in_thread(lambda: list(in_one_region(double)))
    assert checks.checked == 1


def test_a_backward_that_recomputes() -> None:
    w = weight()
    x = EYE.clone().requires_grad_() * 1
    with check_casts() as checks, ours():
        y = checkpoint(lambda x: (x @ w) + (x @ w), x, use_reentrant=False)
        assert checks.checked == 1
        w.data.mul_(2)
        with pytest.raises(StaleCastError, match=r"y\.sum\(\)\.backward\(\)|lambda"):
            y.sum().backward()


PROGRAM = """
import torch, torch_promote as tp
w = torch.nn.Parameter(torch.ones(4, 4))
with tp.my_autocast("cpu"):
    torch.ones(4, 4) @ w
    w.data.mul_(2)
    torch.ones(4, 4) @ w
print("not detected")
"""


@pytest.mark.parametrize(
    ("value", "end"),
    [
        ("1", "StaleCastError: the cast of a Parameter (4 x 4, float32) to bfloat16 has stale data"),
        ("0", "not detected"),
        ("on", "TORCH_PROMOTE_CHECK_CASTS is 'on'. Legal: 1 (check every reused cast), 0."),
    ],
)
def test_the_environment(value: str, end: str) -> None:
    ran = run_python(PROGRAM, env=environment(TORCH_PROMOTE_CHECK_CASTS=value), compiler=value == "1")
    assert end in ran.stdout + ran.stderr
    assert (ran.returncode == 0) == (value == "0")


# --- side effects


def trace_of(name: str, cache: str, watch: str) -> Any:
    """What someone who watches two steps of a model sees of them."""
    model, x = made(name)
    before = tp.cache_info()
    torch.manual_seed(3)
    log = OpLog()
    with log if watch == "mode" else nullcontext():
        for _ in range(2):
            with region_of(cache)():
                loss = loss_of(model, x)
            loss.backward()
    seen = [loss.detach(), *(p.grad for p in model.parameters()), *(p._version for p in model.parameters())]
    seen += [torch.rand(1), {key: value - before[key] for key, value in tp.cache_info().items()}, *map(str, log.ops)]
    tp.clear_cache()
    return seen


@pytest.mark.parametrize("watch", ["nobody", "mode"])
@EVERY_MODE
@pytest.mark.parametrize("name", ["tied", "frozen"])
def test_a_check_has_no_side_effects(name: str, cache: str, watch: str) -> None:
    with check_casts(False):
        unchecked = trace_of(name, cache, watch)
    with check_casts() as checks:
        checked = trace_of(name, cache, watch)
    assert_same(checked, unchecked)
    assert checks.checked > 0 or cache == "weights" or watch == "mode"
