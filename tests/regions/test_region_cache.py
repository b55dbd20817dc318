"""The argument `cache` of a region: the mode in force, and errors."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.checkpointing import KINDS as CHECKPOINT_KINDS
from helpers.checkpointing import Block, plainly, train
from helpers.comparison import assert_same
from helpers.probes import Region, leaves_no_trace
from torch_promote import _C
from torch_promote.integrations import checkpoint as _checkpoint
from torch_promote.regions import arguments as region_arguments

MODES = ("weights", "persistent", "all")
CACHES = (*MODES, "none")
LEGAL = "Legal: 'weights', 'persistent', 'all', 'none'."

ours = functools.partial(tp.my_autocast, "cpu")


def seen() -> tuple[str, bool]:
    """The cache mode, and whether casts are reused at all."""
    return _C.cache_mode(), torch.is_autocast_cache_enabled()


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("device_type", ["cpu", "cuda", ["cpu", "cuda"]], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_what_is_given_is_in_force_inside(cache: str, device_type: Any) -> None:
    region = tp.my_autocast(device_type, cache=cache)
    assert seen() == ("weights", True)
    with region:
        assert seen() == (("weights", False) if cache == "none" else (cache, True))
    assert seen() == ("weights", True)


@pytest.mark.parametrize("cache", MODES)
def test_given_or_not_the_cache_is_on_where_it_was_off(cache: str) -> None:
    with torch.autocast("cpu", cache_enabled=False):
        with ours():
            assert seen() == ("weights", False)
        with ours(cache=cache):
            assert seen() == (cache, True)
        assert seen() == ("weights", False)


# --- regions in regions


INNER: dict[str, tuple[Callable[[], Region], tuple[str, bool]]] = {
    "nothing said": (ours, ("all", True)),
    "weights": (functools.partial(ours, cache="weights"), ("weights", True)),
    "persistent": (functools.partial(ours, cache="persistent"), ("persistent", True)),
    "none": (functools.partial(ours, cache="none"), ("all", False)),
    "cache_enabled=False": (functools.partial(ours, cache_enabled=False), ("all", False)),
    "overrides": (functools.partial(ours, overrides={"mm": "fp32"}), ("all", True)),
    "disabled": (functools.partial(ours, enabled=False), ("all", True)),
    "stock": (functools.partial(torch.autocast, "cpu"), ("all", True)),
}


@pytest.mark.parametrize(("inner", "expected"), INNER.values(), ids=INNER)
def test_the_default_is_the_mode_of_the_surrounding_region(
    inner: Callable[[], Region], expected: tuple[str, bool]
) -> None:
    made_outside = inner()
    with ours(cache="all"):
        for region in (inner(), made_outside):
            with region:
                assert seen() == expected
                with ours(cache_enabled=True):
                    assert seen() == (expected[0], True)
            assert seen() == ("all", True)
    with made_outside, leaves_no_trace():
        assert seen()[0] == (expected[0] if expected[0] != "all" else "weights")


OVERLAPPING: dict[str, dict[str, Any]] = {"a": {"cache": "all"}, "b": {}, "c": {"cache": "persistent"}, "d": {}}


@pytest.mark.parametrize("left", list(itertools.permutations(OVERLAPPING)), ids="".join)
def test_regions_left_in_any_order(left: tuple[str, ...]) -> None:
    def view_in(names: list[str]) -> tuple[str, bool]:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(ours(**OVERLAPPING[name]))
            return seen()

    for entered in itertools.permutations(OVERLAPPING):
        regions = {name: ours(**arguments) for name, arguments in OVERLAPPING.items()}
        with leaves_no_trace():
            expected = [view_in([name for name in entered if name not in left[:n]]) for n in range(5)]
            for name in entered:
                regions[name].__enter__()
            found = [seen()]
            for name in left:
                regions[name].__exit__(None, None, None)
                found.append(seen())
        assert found == expected, f"entered as {entered}"


# --- code that runs in steps


@pytest.mark.parametrize("cache", CACHES)
def test_a_decorated_function_generator_and_coroutine(cache: str) -> None:
    expected = ("weights", False) if cache == "none" else (cache, True)

    @ours(cache=cache)
    def function() -> tuple[str, bool]:
        return seen()

    @ours(cache=cache)
    def generator() -> Iterator[tuple[str, bool]]:
        yield seen()
        yield seen()

    @ours(cache=cache)
    async def coroutine() -> list[tuple[str, bool]]:
        first = seen()
        await asyncio.sleep(0)
        return [first, seen()]

    assert function() == expected
    for found in generator():
        assert found == expected
        assert seen() == ("weights", True)
    assert asyncio.run(coroutine()) == [expected, expected]


# --- copies, text, refusals


UNKNOWN: list[tuple[Any, str]] = [
    ("al", f"'al'. {LEGAL} Closest: all."),
    ("weight", f"'weight'. {LEGAL} Closest: weights."),
    ("", f"''. {LEGAL}"),
    (True, f"True of type bool. {LEGAL}"),
    (0, f"0 of type int. {LEGAL}"),
    (["all"], f"['all'] of type list. {LEGAL}"),
]


@pytest.mark.parametrize(("cache", "told"), UNKNOWN, ids=repr)
def test_an_invalid_cache_mode_is_an_error(cache: Any, told: str) -> None:
    with leaves_no_trace(), pytest.raises(tp.errors.OptionError) as caught:
        ours(cache=cache)
    assert str(caught.value) == f"cache says which casts are reused: a str, or None; got {told}"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("cache", "cache_enabled"), [("none", True), ("all", False), ("weights", False), ("all", 0)])
def test_contradicting_arguments_are_an_error(cache: str, cache_enabled: Any) -> None:
    with leaves_no_trace(), pytest.raises(tp.errors.OptionError) as caught:
        ours(cache_enabled=cache_enabled, cache=cache)
    meant = cache != "none"
    assert str(caught.value) == (
        f"cache={cache!r} means cache_enabled={meant}, got cache_enabled={cache_enabled!r} with it. "
        f"Legal: cache alone, or with cache_enabled={meant}. Leave cache_enabled out."
    )


# --- checkpointing


class Watched(Block):
    """A block that records the cache mode of each of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[str, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append(seen())
        return super().forward(x)


@CHECKPOINT_KINDS
@pytest.mark.parametrize("overrides", [None, {"linear": "fp32"}], ids=str)
@pytest.mark.parametrize("cache", MODES)
@pytest.mark.parametrize("around_backward", [None, *CACHES])
def test_a_recomputation_has_the_mode_of_its_forward(
    use_reentrant: bool, overrides: Any, cache: str, around_backward: str | None
) -> None:
    _checkpoint.install()
    model = Watched()
    same_model = copy.deepcopy(model)
    around = functools.partial(ours, overrides=overrides, cache=cache)
    backward = functools.partial(ours, cache=around_backward)
    call = functools.partial(checkpoint, use_reentrant=use_reentrant)
    with leaves_no_trace():
        found = train(call, around, backward, model)
    assert model.modes == [(cache, True)] * 2
    assert_same(found, train(plainly, around, backward, same_model))


@pytest.mark.parametrize("cache", CACHES)
def test_checkpoint_hooks_are_installed_before_the_first_mode_that_stock_lacks(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(region_arguments.checkpoint, "install", lambda: calls.append("install"))
    ours(cache=cache)
    assert calls == (["install"] if cache in ("persistent", "all") else [])
