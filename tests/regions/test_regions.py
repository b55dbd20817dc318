"""Entering and leaving regions: the state inside, also nested in each other and in stock's, and afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import KINDS, Region, autocast_dtype, in_thread, leaves_no_trace, seen
from torch_promote import _C
from torch_promote.extension import DeviceSpec, RegionSpec

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


def test_an_exception_passes_through_and_everything_is_as_before() -> None:
    error = LookupError("mine")
    with tp.my_autocast("cpu", FP16), leaves_no_trace():
        with pytest.raises(LookupError) as caught, tp.my_autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
            raise error
        assert caught.value is error
        assert autocast_dtype() == FP16


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


def test_a_region_that_cannot_be_entered_leaves_no_trace() -> None:
    unheard_of = (1 << 24) - 1  # a set of overrides with a number that no set has
    with tp.my_autocast("cpu", FP16), leaves_no_trace():
        with pytest.raises(RuntimeError, match="there is no policy change with the number"):
            _C.enter_region(object(), RegionSpec((DeviceSpec("cpu", BF16, True),), policy_change=unheard_of).pack())
        assert autocast_dtype() == FP16


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


def test_stocks_object_entered_twice_nested_leaves_autocast_on() -> None:
    def twice() -> torch.dtype | None:
        region = tp.stock_autocast("cpu", FP16)
        with region, region:
            pass
        return autocast_dtype()

    assert in_thread(twice) == FP16


def test_a_decorated_function_may_call_itself() -> None:
    @tp.my_autocast("cpu", FP16)
    def descend(levels: int) -> list[torch.dtype | None]:
        found = [autocast_dtype()]
        if levels:
            with tp.my_autocast("cpu", BF16, enabled=levels % 2 == 0):
                found += descend(levels - 1)
        return [*found, autocast_dtype()]

    with leaves_no_trace():
        assert descend(5) == [FP16] * 12


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


@pytest.mark.usefixtures("pretend_cuda")
def test_regions_of_two_device_types_may_overlap_as_stocks_may() -> None:
    def views(kind: Callable[..., Region]) -> list[dict[str, Any]]:
        cpu, cuda = kind("cpu"), kind("cuda")
        cpu.__enter__()
        cuda.__enter__()
        cpu.__exit__(None, None, None)
        overlap = seen()
        cuda.__exit__(None, None, None)
        return [overlap, seen()]

    with leaves_no_trace():
        assert views(tp.my_autocast) == views(tp.stock_autocast)


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
