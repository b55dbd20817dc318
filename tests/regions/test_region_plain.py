"""Plain regions, whose arguments C checks: they equal the regions that Python's checks give."""

from __future__ import annotations

import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import torch_promote as tp
from helpers.probes import autocast_dtype, leaves_no_trace
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


# --- it remains a Python class


class Plain(tp.my_autocast):
    """A subclass that adds nothing."""


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
