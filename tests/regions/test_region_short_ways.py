"""The short ways through `my_autocast`: what they make and do is what the Python methods make and do."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import autocast_dtype, leaves_no_trace
from torch_promote import _C

BF16, FP16 = torch.bfloat16, torch.float16


class Text(str):
    """A str that is not of the exact type."""


def made_by_python(*args: Any, **kwargs: Any) -> tp.my_autocast:
    region = tp.my_autocast.__new__(tp.my_autocast)
    region.__init__(*args, **kwargs)  # type: ignore[misc]
    return region


def outcome(make: Callable[[], tp.my_autocast]) -> Any:
    """What a region is, or the error of making it."""
    try:
        region = make()
    except Exception as error:
        return type(error), str(error)
    return type(region), region._spec, region._arguments, repr(region)


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
}


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_what_is_made_is_what_python_makes(around: Callable[[], Any]) -> None:
    with around(), leaves_no_trace():
        for args, kwargs in itertools.product(POSITIONAL, KEYWORDS):
            expected = outcome(lambda args=args, kwargs=kwargs: made_by_python(*args, **kwargs))
            for _ in range(2):
                assert outcome(lambda args=args, kwargs=kwargs: tp.my_autocast(*args, **kwargs)) == expected, (
                    f"my_autocast(*{args}, **{kwargs})"
                )


def test_regions_made_in_turn_are_each_their_own() -> None:
    made = [tp.my_autocast("cpu", *args) for args in ((), (FP16,), (), (BF16,), (FP16,), (None, False))]
    assert len(set(map(id, made))) == len(made)
    dtypes = []
    for region in made:
        with region:
            dtypes.append(autocast_dtype())
    assert dtypes == [BF16, FP16, BF16, BF16, FP16, None]


def test_no_reference_is_lost_or_kept() -> None:
    """Wherever a region is made, entered and left 1000 times."""
    device_type = "".join(["c", "pu"])
    region = tp.my_autocast(device_type, FP16)
    counted = [device_type, region, region._spec, region._arguments, FP16, None, tp.my_autocast]

    def use() -> None:
        for _ in range(1000):
            with region, tp.my_autocast(device_type, FP16), tp.my_autocast(device_type, dtype=FP16, enabled=True):
                pass
            with pytest.raises(tp.RegionError):
                region.__exit__(None, None, None)

    use()
    gc.collect()
    before = [sys.getrefcount(one) for one in counted]
    use()
    gc.collect()
    after = [sys.getrefcount(one) for one in counted]
    assert all(abs(b - a) < 100 for b, a in zip(before, after, strict=True)), (before, after)


def test_a_region_dies_as_any_object() -> None:
    region = tp.my_autocast("cpu")
    assert gc.is_tracked(region)
    gone = weakref.ref(region)
    with region:
        pass
    del region
    assert gone() is None


# --- it remains a Python class


def test_what_it_looks_like() -> None:
    for name in ("__init__", "__enter__", "__exit__", "__call__"):
        assert isinstance(inspect.getattr_static(tp.my_autocast, name), types.FunctionType), name
    assert isinstance(tp.my_autocast("cpu").__enter__, types.MethodType)
    assert list(inspect.signature(tp.my_autocast).parameters)[:2] == ["device_type", "dtype"]
    assert "Runs ops in the dtype" in (inspect.getdoc(tp.my_autocast) or "")


def test_it_takes_short_ways_once() -> None:
    for wrong in (tp.my_autocast, int, 3):
        with pytest.raises(TypeError, match="takes one class, once"):
            _C.take_short_ways(wrong)  # type: ignore[arg-type]


class Noting(tp.my_autocast):
    """A subclass with a constructor and methods of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.notes: list[str] = ["made"]
        super().__init__("cpu", dtype)

    def __enter__(self) -> Noting:
        self.notes.append("entered")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.notes.append("left")
        super().__exit__(*error)


class Plain(tp.my_autocast):
    """A subclass that adds nothing."""


def test_subclasses() -> None:
    noting, plain = Noting(FP16), Plain("cpu", FP16)
    assert (type(noting), type(plain)) == (Noting, Plain)
    for region in (noting, plain):
        with leaves_no_trace(), region as entered:
            assert entered is region
            assert autocast_dtype() == FP16
    assert noting.notes == ["made", "entered", "left"]
    plain.note = "subclasses have a dict"  # type: ignore[attr-defined]


def test_a_subclass_that_does_not_make_its_region() -> None:
    class Empty(tp.my_autocast):
        def __init__(self) -> None:
            pass

    with leaves_no_trace(), pytest.raises(AttributeError, match="_spec"):
        Empty().__enter__()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The class with methods that note that they were called, then do what they did."""
    calls: list[str] = []

    def replace(name: str) -> None:
        method = getattr(tp.my_autocast, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(tp.my_autocast, name, noting)

    for name in ("__init__", "__enter__", "__exit__"):
        replace(name)
    yield calls
    monkeypatch.undo()
    with tp.my_autocast("cpu", FP16):
        assert autocast_dtype() == FP16
    assert calls == ["__init__", "__enter__", "__exit__"]


def test_methods_that_somebody_replaces_are_called(replaced: list[str]) -> None:
    with tp.my_autocast("cpu", FP16):
        assert autocast_dtype() == FP16
    assert replaced == ["__init__", "__enter__", "__exit__"]


# --- ways to enter and to leave


@pytest.mark.parametrize("way", ["method", "function", "keywords", "stack", "with"])
def test_however_it_is_called(way: str) -> None:
    region = tp.my_autocast("cpu", FP16)
    nothing = {"kind": None, "value": None, "traceback": None}
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
        elif way == "function":
            assert tp.my_autocast.__exit__(region, None, None, None) is None
        else:
            assert region.__exit__(**nothing) is None


@pytest.mark.parametrize("args", [(), (None,), (None, None, None, None)], ids=len)
def test_wrong_numbers_of_arguments(args: tuple[Any, ...]) -> None:
    with tp.my_autocast("cpu", FP16) as region:
        with leaves_no_trace(), pytest.raises(TypeError, match=r"my_autocast\.__exit__\(\)"):
            region.__exit__(*args)  # type: ignore[call-arg]
        with leaves_no_trace(), pytest.raises(TypeError, match=r"my_autocast\.__enter__\(\)"):
            region.__enter__(3)  # type: ignore[call-arg]
        assert autocast_dtype() == FP16


@pytest.mark.parametrize("stranger", [None, 3, object(), torch.autocast("cpu")], ids=lambda one: type(one).__name__)
def test_called_with_what_is_no_region(stranger: Any) -> None:
    with leaves_no_trace(), pytest.raises(AttributeError, match="_spec"):
        tp.my_autocast.__enter__(stranger)


def test_a_spec_that_is_none_of_ours_is_refused_as_ever() -> None:
    region = tp.my_autocast("cpu")
    for wrong in ("zz", 3, None, "g" * 16, "é" * 16):
        region._spec = wrong  # type: ignore[assignment]
        with leaves_no_trace(), pytest.raises(ValueError, match="16 hexadecimal digits"):
            region.__enter__()


def test_a_region_with_an_unheard_of_policy_is_refused_as_ever() -> None:
    region = tp.my_autocast("cpu")
    region._spec = "ffffff" + region._spec[6:]
    with leaves_no_trace(), pytest.raises(RuntimeError, match="no set of overrides has the number"):
        region.__enter__()
