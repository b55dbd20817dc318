"""Entering and leaving regions: the state inside, also nested in each other and in stock's, and afterwards."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import KINDS, Region, autocast_dtype, in_thread, leaves_no_trace, seen
from torch_promote import _C
from torch_promote.parity.model import pretend_cuda
from torch_promote.regions import autocast
from torch_promote.regions.region import watch_regions

BF16, FP16 = torch.bfloat16, torch.float16

#: Arguments of both kinds of regions.
REGIONS: list[tuple[Any, ...]] = [
    ("cpu", BF16),
    ("cpu", FP16, True, False),
    ("cpu", FP16, False),
    ("cuda", FP16),
    ("cuda", BF16, True, False),
    ("cuda", BF16, False),
]
#: The kinds of an outer and an inner region, to compare with two of stock's.
MIXTURES = [kinds for kinds in itertools.product(KINDS, repeat=2) if kinds != ("stock", "stock")]


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("mixture", MIXTURES, ids="-".join)
@pytest.mark.parametrize("pair", list(itertools.product(REGIONS, repeat=2)), ids=str)
def test_in_nested_regions_of_either_kind_the_innermost_decides(pair: Any, mixture: tuple[str, str]) -> None:
    def views(kinds: tuple[str, str]) -> list[dict[str, Any]]:
        outer, inner = (KINDS[kind](*arguments) for kind, arguments in zip(kinds, pair, strict=True))
        with leaves_no_trace(), outer:
            result = [seen()]
            with inner:
                result.append(seen())
            with leaves_no_trace(), inner:
                pass
            return [*result, seen()]

    assert views(mixture) == views(("stock", "stock"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_innermost_decides_by_the_dtypes_that_come_out(kind: Callable[..., Region]) -> None:
    """The same with expected values, so that the comparison above is not vacuous."""
    with kind("cpu", BF16):
        assert autocast_dtype() == BF16
        with tp.my_autocast("cpu", FP16):
            assert autocast_dtype() == FP16
            with kind("cpu", enabled=False):
                assert autocast_dtype() is None
                with tp.my_autocast("cpu", BF16):
                    assert autocast_dtype() == BF16
                assert autocast_dtype() is None
            assert autocast_dtype() == FP16
        assert autocast_dtype() == BF16
    assert autocast_dtype() is None


# --- ways out


@pytest.mark.parametrize("way", ["return", "break", "continue"])
def test_leaving_in_the_middle(way: str) -> None:
    def leave() -> None:
        for _ in range(1):
            with tp.my_autocast("cpu"):
                if way == "return":
                    return
                if way == "break":
                    break
                continue

    with leaves_no_trace():
        leave()


@pytest.mark.parametrize("around", [None, "ours", "stock"])
def test_leaving_a_region_that_is_not_open_is_an_error_and_changes_nothing(around: str | None) -> None:
    region = tp.my_autocast("cpu", FP16)
    with ExitStack() as stack:
        if around is not None:
            stack.enter_context(KINDS[around]("cpu"))
        with leaves_no_trace(), pytest.raises(tp.errors.RegionError, match="is not open in this thread"):
            region.__exit__(None, None, None)
        assert autocast_dtype() == (None if around is None else BF16)
        with region:
            pass
        with leaves_no_trace(), pytest.raises(tp.errors.RegionError):
            region.__exit__(None, None, None)


# --- one object more than once


def test_one_object_entered_twice_nested() -> None:
    region = tp.my_autocast("cpu", FP16)
    with leaves_no_trace():
        with region:
            with region:
                assert autocast_dtype() == FP16
            assert autocast_dtype() == FP16
            with tp.my_autocast("cpu", BF16), region:
                assert autocast_dtype() == FP16
            assert autocast_dtype() == FP16
        assert autocast_dtype() is None


# --- ends out of order

OVERLAPPING: dict[str, tuple[Any, ...]] = {
    "a": ("cpu", FP16, True, True),
    "b": (["cpu", "cuda"], BF16, True, False),
    "c": ("cuda", FP16, True, True),
}


def view_in(names: list[str]) -> dict[str, Any]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(tp.my_autocast(*OVERLAPPING[name]))
        return seen()


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("entered", list(itertools.permutations("abc")), ids="".join)
@pytest.mark.parametrize("left", list(itertools.permutations("abc")), ids="".join)
def test_regions_left_in_any_order(entered: tuple[str, ...], left: tuple[str, ...]) -> None:
    for around in KINDS.values():
        regions = {name: tp.my_autocast(*arguments) for name, arguments in OVERLAPPING.items()}
        with around("cpu", BF16, cache_enabled=False), leaves_no_trace():
            expected = [view_in([name for name in entered if name not in left[:n]]) for n in range(4)]
            for name in entered:
                regions[name].__enter__()
            found = [seen()]
            for name in left:
                regions[name].__exit__(None, None, None)
                found.append(seen())
        assert found == expected, "what is in force is what the regions still open say"


@pytest.mark.parametrize("left", list(itertools.permutations(range(3))), ids=str)
def test_overrides_left_in_any_order(left: tuple[int, ...]) -> None:
    regions = [tp.my_autocast("cpu", overrides=o) for o in ({"mm": "fp32"}, {"bmm": "fp32"}, {"mm": "keep"})]

    def policy_in(numbers: list[int]) -> list[list[int]]:
        with ExitStack() as stack:
            for number in numbers:
                stack.enter_context(regions[number])
            return _C.current_policy_bytes()

    with tp.my_autocast("cpu", overrides={"linear": "fp32"}), leaves_no_trace():
        expected = [policy_in([number for number in range(3) if number not in left[:n]]) for n in range(4)]
        for region in regions:
            region.__enter__()
        found = [_C.current_policy_bytes()]
        for number in left:
            regions[number].__exit__(None, None, None)
            found.append(_C.current_policy_bytes())
        assert found == expected
    assert _C.policy_is_stock()


def test_the_cache_lives_until_the_last_region_ends_in_whatever_order() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    outer, inner = tp.my_autocast("cpu"), tp.my_autocast("cpu")
    outer.__enter__()
    inner.__enter__()
    torch.mm(weight, weight)
    outer.__exit__(None, None, None)
    assert tp.cache_info()["entries"] == 1
    inner.__exit__(None, None, None)
    assert tp.cache_info()["entries"] == 0


@contextmanager
def another_thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yields a function that runs functions in one other thread, which lives as long as the block."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield lambda function: pool.submit(function).result(timeout=60)


# --- ends that do not come


def test_a_region_cannot_be_left_in_another_thread() -> None:
    region = tp.my_autocast("cpu", FP16)
    with another_thread() as there, region:

        def leave() -> None:
            with leaves_no_trace(), tp.my_autocast("cpu", BF16), leaves_no_trace():
                with pytest.raises(tp.errors.RegionError, match="belongs to the thread that entered it"):
                    region.__exit__(None, None, None)
                assert autocast_dtype() == BF16

        with leaves_no_trace():
            there(leave)
        assert autocast_dtype() == FP16


# --- the cast cache


def test_threads_of_two_dtypes_do_not_get_each_others_casts() -> None:
    """Stock keeps one cast of a weight for all threads and dtypes."""
    weight = torch.ones(2, 2, requires_grad=True)
    x = torch.ones(2, 2)

    def product(kind: Callable[..., Region], dtype: torch.dtype) -> torch.dtype:
        with kind("cpu", dtype):
            return torch.mm(x, weight).dtype

    def in_half_while_here_in_bfloat16(kind: Callable[..., Region]) -> torch.dtype:
        with kind("cpu", BF16):
            torch.mm(x, weight)
            return in_thread(lambda: product(kind, FP16))

    assert in_half_while_here_in_bfloat16(tp.my_autocast) == FP16
    with pytest.raises(RuntimeError, match="same dtype"):
        in_half_while_here_in_bfloat16(tp.stock_autocast)


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
    together = threading.Barrier(len(WORKERS), timeout=60)

    def worker(x: torch.Tensor, arguments: dict[str, Any]) -> list[list[torch.Tensor]]:
        torch.set_num_threads(1)
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


class Text(str):
    """A str that is not of the exact type."""


def made_by_python(*args: Any, **kwargs: Any) -> tp.my_autocast:
    with mock.patch.object(autocast, "pack_plain_region", return_value=None):
        return tp.my_autocast(*args, **kwargs)


def outcome(make: Callable[[], tp.my_autocast]) -> Any:
    """The settings of a region, or the error of constructing it."""
    try:
        region = make()
    except Exception as error:
        return type(error), str(error)
    return type(region), region._packed, autocast._Arguments(*region._arguments), repr(region)


POSITIONAL: list[tuple[Any, ...]] = [
    (),
    ("cpu",),
    ("".join(["c", "pu"]),),
    (Text("cpu"),),
    (None,),
    (["cpu"],),
    ("cpu", BF16),
    ("cpu", FP16, False),
    ("cpu", None, True, False),
    ("cpu", None, True, None),
    ("cpu", FP16, True, True),
    ("cpu", None, 1),
    ("cpu", None, 0, 1),
    ("cpu", None, None),
    ("cpu", None, True, "yes"),
    ("cpu", torch.int8),
    ("cpu", "bfloat16"),
    ("cpu", None, True, None, None),
    ("cuda",),
    ("cuda", BF16),
    ("cuda", FP16, False, False),
    ("cuda", torch.float32),
    ("cuda", "bfloat16"),
    ("xpu",),
    (torch.device("cpu"),),
    ({},),
]
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"device_type": "cpu"},
    {"dtype": FP16},
    {"enabled": False},
    {"cache_enabled": False},
    {"cache_enabled": None, "enabled": True, "dtype": None},
    {"device_type": "cpu", "dtype": BF16, "enabled": True, "cache_enabled": True},
    {"".join(["dty", "pe"]): FP16},
    {"cache": "all"},
    {"cache": "".join(["persist", "ent"])},
    {"cache": "weights", "dtype": FP16},
    {"cache": "none"},
    {"cache": "none", "cache_enabled": True},
    {"cache": "most"},
    {"cache": None},
    {"policy": None},
    {"policy": "cuda"},
    {"overrides": None},
    {"overrides": {"mm": "fp32"}},
    {"dtypes": FP16},
]
SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "outside": ExitStack,
    "fp16": lambda: tp.my_autocast("cpu", FP16),
    "cache off": lambda: torch.autocast("cpu", cache_enabled=False),
    "cuda": pretend_cuda,
    "cuda without bfloat16": lambda: cuda_answers(is_bf16_supported=False),
}


@contextmanager
def cuda_answers(is_bf16_supported: bool = True, is_available: bool = True) -> Iterator[None]:
    """Replaces the functions of torch.cuda that "cuda" regions of ours and of stock call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: not is_available)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda: is_bf16_supported)
        yield


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_what_is_made_is_what_python_makes(around: Callable[[], Any]) -> None:
    same_line = mock.patch.object(autocast, "line_of", return_value=None)  # the two are made in two lines
    with warnings.catch_warnings(), around(), leaves_no_trace(), same_line:
        warnings.simplefilter("ignore")
        for args, kwargs in itertools.product(POSITIONAL, KEYWORDS):
            expected = outcome(lambda args=args, kwargs=kwargs: made_by_python(*args, **kwargs))
            for _ in range(2):
                assert outcome(lambda args=args, kwargs=kwargs: tp.my_autocast(*args, **kwargs)) == expected, (
                    f"my_autocast(*{args}, **{kwargs})"
                )


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


# --- ways to enter and to leave


@pytest.mark.parametrize("way", ["method", "function", "stack", "with"])
def test_however_it_is_called(way: str) -> None:
    region = tp.my_autocast("cpu", FP16)
    with leaves_no_trace():
        if way == "stack":
            with ExitStack() as stack:
                assert stack.enter_context(region) is region
                assert autocast_dtype() == FP16
            return
        if way == "with":
            with region as entered:
                assert entered is region
                assert autocast_dtype() == FP16
            return
        assert (tp.my_autocast.__enter__(region) if way == "function" else region.__enter__()) is region
        assert autocast_dtype() == FP16
        if way == "method":
            assert region.__exit__(None, None, None) is None
        else:
            assert tp.my_autocast.__exit__(region, None, None, None) is None


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
