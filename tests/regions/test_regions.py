"""Entering and leaving regions: the state inside, also nested in each other and in stock's, and afterwards."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import KINDS, autocast_dtype, in_thread, leaves_no_trace, seen
from torch_promote import _C
from torch_promote.regions.autocast import watch_regions

BF16, FP16 = torch.bfloat16, torch.float16


# --- ends out of order, and in another thread

OVERLAPPING: dict[str, dict[str, Any]] = {
    "a": {"device_type": "cpu", "dtype": FP16, "cache": "all", "overrides": {"mm": "fp32"}},
    "b": {"device_type": ["cpu", "cuda"], "dtype": BF16, "cache": "none", "overrides": {"bmm": "fp32"}},
    "c": {"device_type": "cuda", "dtype": FP16, "cache": "persistent", "overrides": {"mm": "keep"}},
}


def view() -> Any:
    return seen(), _C.cache_mode(), _C.current_policy()


def view_in(names: list[str]) -> Any:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(tp.my_autocast(**OVERLAPPING[name]))
        return view()


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("entered", list(itertools.permutations("abc")), ids="".join)
@pytest.mark.parametrize("left", list(itertools.permutations("abc")), ids="".join)
def test_regions_left_in_any_order(entered: tuple[str, ...], left: tuple[str, ...]) -> None:
    for around in KINDS.values():
        regions = {name: tp.my_autocast(**arguments) for name, arguments in OVERLAPPING.items()}
        with around("cpu", BF16, cache_enabled=False), leaves_no_trace():
            expected = [view_in([name for name in entered if name not in left[:n]]) for n in range(4)]
            for name in entered:
                assert regions[name].__enter__() is regions[name]
            found = [view()]
            for name in left:
                assert regions[name].__exit__(None, None, None) is None
                found.append(view())
        assert found == expected, "what is in force is what the regions still open say"
    assert _C.policy_is_stock()


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("decorates", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OVERLAPPING)
def test_an_error_ends_the_regions_that_it_leaves(name: str, kind: str, decorates: bool) -> None:
    region, inner = tp.my_autocast(**OVERLAPPING[name]), KINDS[kind]("cuda", BF16, cache_enabled=False)

    def fails() -> None:
        assert view() == view_in([name])
        with inner:
            raise LookupError

    def fails_in_a_block() -> None:
        with region:
            fails()

    before = view()
    with pytest.raises(LookupError):
        region(fails)() if decorates else fails_in_a_block()
    assert view() == before
    assert _C.depth() == 0
    assert _C.policy_is_stock()


def test_a_region_cannot_be_left_in_another_thread() -> None:
    region = tp.my_autocast("cpu", FP16)

    def leave() -> None:
        with leaves_no_trace(), tp.my_autocast("cpu", BF16), leaves_no_trace():
            with pytest.raises(tp.errors.RegionError, match="belongs to the thread that entered it"):
                region.__exit__(None, None, None)
            assert autocast_dtype() == BF16

    with region:
        with leaves_no_trace():
            in_thread(leave)
        assert autocast_dtype() == FP16


# --- workers that share a module, each in a region of its own, as in DataParallel

WORKERS: list[dict[str, Any]] = [
    {"dtype": BF16},
    {"dtype": FP16},
    {"dtype": BF16, "cache_enabled": False},
    {"dtype": FP16, "overrides": {"linear": "fp32"}},
    {"enabled": False},
]


def step(module: torch.nn.Module, x: torch.Tensor, arguments: dict[str, Any]) -> list[torch.Tensor]:
    with tp.my_autocast("cpu", **arguments):
        y = module(x)
        loss = torch.nn.functional.mse_loss(y, torch.ones_like(y))
    return [y, loss, *torch.autograd.grad(loss, tuple(module.parameters()))]


def test_workers_that_share_a_module_get_the_bits_of_one_thread() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
    )
    inputs = [torch.randn(6, 8) for _ in WORKERS]
    alone = [step(module, x, arguments) for x, arguments in zip(inputs, WORKERS, strict=True)]
    together, threads = threading.Barrier(len(WORKERS), timeout=60), torch.get_num_threads()

    def worker(x: torch.Tensor, arguments: dict[str, Any]) -> list[list[torch.Tensor]]:
        torch.set_num_threads(threads)
        results = []
        with leaves_no_trace():
            for _ in range(20):
                together.wait()
                results.append(step(module, x, arguments))
        return results

    with ThreadPoolExecutor(max_workers=len(WORKERS)) as pool:
        futures = [pool.submit(worker, x, arguments) for x, arguments in zip(inputs, WORKERS, strict=True)]
        for future, expected in zip(futures, alone, strict=True):
            for results in future.result(timeout=120):
                assert_same(results, expected, "a worker's results")
    assert len({result[0].dtype for result in alone}) == 3, "the workers did not all compute the same"


def test_what_an_entry_drops_may_open_another_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """If C++ ends PyTorch's region, its casts are dropped when the next region is entered."""
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    inner: list[Any] = []

    def open_another() -> None:
        with tp.my_autocast("cpu", FP16, cache_enabled=False, overrides={"exp": "fp16"}):
            inner.append(autocast_dtype())

    class GiveCastsFinalizers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                weakref.finalize(result, open_another)
            return result

    weight = torch.ones(2, 2, requires_grad=True)
    with tp.stock_autocast("cpu"), tp.my_autocast("cpu", BF16), torch.no_grad(), GiveCastsFinalizers():
        weight @ weight
    assert inner == []
    with tp.my_autocast("cpu", BF16):
        assert inner == [FP16]
        assert autocast_dtype() == BF16
        assert torch.is_autocast_cache_enabled()
        assert torch.exp(torch.ones(1)).dtype == torch.float32
    assert autocast_dtype() is None


def test_no_reference_is_lost_or_kept() -> None:
    """After constructing, entering and leaving a region 1000 times."""
    device_type = "".join(["c", "pu"])
    region = tp.my_autocast(device_type, FP16)
    counted = [device_type, region, region._packed, region._arguments, FP16, None, tp.my_autocast]

    def use() -> None:
        for _ in range(1000):
            with region, tp.my_autocast(device_type, FP16), tp.my_autocast(device_type, dtype=FP16, enabled=True):
                pass
            with pytest.raises(tp.errors.RegionError):
                region.__exit__(None, None, None)

    seen = []
    for _ in range(4):  # what earlier tests leave may go meanwhile, but not each time
        use()
        gc.collect()
        seen.append([sys.getrefcount(one) for one in counted])
    rounds = itertools.pairwise(seen)
    assert any(all(abs(b - a) < 100 for b, a in zip(*both, strict=True)) for both in rounds), seen


@pytest.mark.parametrize("args", [(), (None,), (None, None, None, None)], ids=len)
def test_wrong_numbers_of_arguments(args: tuple[Any, ...]) -> None:
    with tp.my_autocast("cpu", FP16) as region:
        with leaves_no_trace(), pytest.raises(TypeError, match="__exit__"):
            region.__exit__(*args)  # type: ignore[call-arg]
        with leaves_no_trace(), pytest.raises(TypeError, match="__enter__"):
            region.__enter__(3)  # type: ignore[call-arg]
        assert autocast_dtype() == FP16


def test_an_invalid_spec_is_refused() -> None:
    region = tp.my_autocast("cpu")
    for wrong in ("zz", 3, None, "g" * 16, "é" * 16):
        region._packed = wrong  # type: ignore[assignment]
        with leaves_no_trace(), pytest.raises(ValueError, match="16 hexadecimal digits"):
            region.__enter__()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_region_whose_entry_raises_ends_alone(error: type[BaseException]) -> None:
    def watcher(owner: object) -> None:
        if owner is inner:
            with tp.my_autocast("cpu", enabled=False):
                raise error

    outer, inner = tp.my_autocast("cpu", FP16), tp.my_autocast("cpu", BF16)
    with outer, watch_regions(watcher):
        with pytest.raises(error), inner:
            raise AssertionError("not entered")
        assert _C.depth() == 1
        assert autocast_dtype() == FP16
    assert autocast_dtype() is None
