"""Plain regions, whose arguments C checks: they equal the regions that Python's checks give."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import torch_promote as tp
from helpers.probes import autocast_dtype, leaves_no_trace
from torch_promote.extension import RegionSpec
from torch_promote.parity.model import pretend_cuda
from torch_promote.regions import autocast

BF16, FP16 = torch.bfloat16, torch.float16


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


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_of_pytorchs_answer_comes_through(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def is_available() -> bool:
        asked.append(None)
        raise error

    asked: list[None] = []
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", is_available)
    with pytest.raises(error):
        tp.my_autocast("cuda", torch.float16)
    assert len(asked) == (2 if error is OSError else 1)  # an interrupt is not asked for again


@pytest.mark.parametrize("cache", ["weights", "persistent", "all", "none"])
def test_a_region_with_a_cache_mode_is_plain(cache: str) -> None:
    tp.my_autocast("cpu", cache=cache)
    with mock.patch.object(autocast, "check_devices") as check, mock.patch.object(torch, "UntypedStorage") as storage:
        tp.my_autocast("cpu", cache=cache)
    assert not check.called
    assert not storage.called


def test_regions_made_in_turn_are_each_their_own() -> None:
    made = [tp.my_autocast("cpu", *args) for args in ((), (FP16,), (), (BF16,), (FP16,), (None, False))]
    assert len(set(map(id, made))) == len(made)
    dtypes = []
    for region in made:
        with region:
            dtypes.append(autocast_dtype())
    assert dtypes == [BF16, FP16, BF16, BF16, FP16, None]


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
    assert list(inspect.signature(tp.my_autocast).parameters)[:2] == ["device_type", "dtype"]
    assert "drop-in" in (inspect.getdoc(tp.my_autocast) or "")


def test_the_answer_of_torch_cuda_is_dropped_with_its_functions() -> None:
    """A "yes" is remembered, because the calls take longer than the region, as long as the functions are the same."""

    def enabled(dtype: torch.dtype) -> bool | str:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                region = tp.my_autocast("cuda", dtype)
            except tp.errors.UnsupportedDeviceError as error:
                return str(error)
            with region:
                return torch.is_autocast_enabled("cuda")

    refused = "this CUDA device does not support bfloat16. Use dtype=torch.float16."
    for _ in range(2):
        with cuda_answers():
            assert [enabled(dtype) for dtype in (FP16, BF16, FP16)] == [True, True, True]
            with cuda_answers(is_bf16_supported=False):
                assert [enabled(dtype) for dtype in (FP16, BF16, FP16)] == [True, refused, True]
            with cuda_answers(is_available=False):
                assert [enabled(dtype) for dtype in (FP16, BF16)] == [False, False]
            assert enabled(BF16) is True
        assert enabled(BF16) is torch.cuda.is_available()


def test_a_mock_is_called_each_time() -> None:
    with cuda_answers(), mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True) as supported:
        tp.my_autocast("cuda", BF16)
        supported.return_value = False
        with pytest.raises(tp.errors.UnsupportedDeviceError):
            tp.my_autocast("cuda", BF16)


def test_an_error_of_torch_cuda_is_raised() -> None:
    def broken() -> bool:
        raise OSError("no driver")

    with cuda_answers(), mock.patch.object(torch.cuda, "is_bf16_supported", broken), leaves_no_trace():
        with pytest.raises(OSError, match="no driver"):
            tp.my_autocast("cuda", BF16)
        assert tp.my_autocast("cuda", FP16)._packed


class Noting(tp.my_autocast):
    """A subclass with its own constructor and methods."""

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

    with leaves_no_trace(), pytest.raises(AttributeError, match="_packed"):
        Empty().__enter__()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The class with methods that record their calls before they call the originals."""
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


def test_replaced_methods_are_called(replaced: list[str]) -> None:
    with tp.my_autocast("cpu", FP16):
        assert autocast_dtype() == FP16
    assert replaced == ["__init__", "__enter__", "__exit__"]


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


@pytest.mark.parametrize("stranger", [None, 3, object(), torch.autocast("cpu")], ids=lambda one: type(one).__name__)
def test_calling_the_methods_on_another_object_is_an_error(stranger: Any) -> None:
    with leaves_no_trace(), pytest.raises(TypeError, match="__enter__"):
        tp.my_autocast.__enter__(stranger)


def test_an_invalid_spec_is_refused() -> None:
    region = tp.my_autocast("cpu")
    for wrong in ("zz", 3, None, "g" * 16, "é" * 16):
        region._packed = wrong  # type: ignore[assignment]
        with leaves_no_trace(), pytest.raises(ValueError, match="16 hexadecimal digits"):
            region.__enter__()


def test_a_region_with_an_unknown_policy_number_is_refused() -> None:
    region = tp.my_autocast("cpu")
    region._packed = RegionSpec(policy_change=(1 << 24) - 1).pack()
    with leaves_no_trace(), pytest.raises(RuntimeError, match="there is no policy change with the number"):
        region.__enter__()
