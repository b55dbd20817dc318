"""The lint: which promotions it reports, the content of reports, and that it reports each line once."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import Any

import pytest
import torch

import torch_promote as tp
from torch_promote.errors import OptionError, PromotionLintError, PromotionWarning
from torch_promote.regions.promotion import PromotionEvent, PromotionKind

HALF = torch.ones(3, dtype=torch.float16)
BRAIN = torch.ones(3, dtype=torch.bfloat16)
INTS = torch.full((3,), 257, dtype=torch.int32)
BYTES = torch.ones(3, dtype=torch.uint8)
SINGLE = torch.ones(3)
DOUBLE = torch.ones(3, dtype=torch.float64)

#: Calls, and their kind.
OF_KIND: dict[str, tuple[PromotionKind | None, Any]] = {
    "half with a 0-dim float32": (PromotionKind.ZERO_DIM_PRECISION_LOSS, lambda: HALF + torch.tensor(1e6)),
    "bfloat16 with a 0-dim float64": (PromotionKind.ZERO_DIM_PRECISION_LOSS, lambda: BRAIN * DOUBLE[0]),
    "int8 with a 0-dim int64": (PromotionKind.ZERO_DIM_PRECISION_LOSS, lambda: BYTES + torch.tensor(300)),
    "uint8 < 256": (PromotionKind.INT_OVERFLOW, lambda: BYTES < 256),
    "uint8 + -1": (PromotionKind.INT_OVERFLOW, lambda: BYTES + -1),
    "in place": (PromotionKind.INT_OVERFLOW, lambda: BYTES.clone().mul_(1000)),
    "int32 with bfloat16": (PromotionKind.INT_TO_LOW_PRECISION, lambda: INTS * BRAIN),
    "float32 with float64": (PromotionKind.UP_TO_FLOAT64, lambda: SINGLE + DOUBLE),
    "float16 with float32": (PromotionKind.ANY, lambda: HALF + SINGLE),
    "ints divide": (PromotionKind.ANY, lambda: INTS / INTS),
    "int with a Python float": (PromotionKind.ANY, lambda: INTS + 0.5),
    "half times 1e6": (PromotionKind.FLOAT_OVERFLOW, lambda: HALF * 1e6),
    "complex64 with a complex number": (PromotionKind.FLOAT_OVERFLOW, lambda: SINGLE.cfloat() * 1e39j),
    "half with the least number that rounds to inf": (PromotionKind.FLOAT_OVERFLOW, lambda: HALF + 65520.0),
    "in place with 1e6": (PromotionKind.FLOAT_OVERFLOW, lambda: HALF.clone().mul_(1e6)),
    "a number that rounds down": (None, lambda: HALF + 65519.0),
    "an infinite number": (None, lambda: (HALF + float("inf"), HALF * float("nan"), SINGLE + 3.4e38, DOUBLE + 1e308)),
    "alike": (None, lambda: SINGLE + SINGLE),
    "a fitting number": (None, lambda: (BYTES + 255, INTS + (2**31 - 1), INTS < -(2**31), HALF + 1e3)),
    "a number beside floats": (None, lambda: BRAIN + 257),
    "uint8 with a 0-dim bool": (PromotionKind.ANY, lambda: BYTES + torch.tensor(True)),
    "a number inside of a transform, whose value is unknown": (
        None,
        lambda: torch.func.grad(lambda x: (x * 1e6).sum())(HALF),
    ),
}


@pytest.mark.parametrize("name", OF_KIND)
def test_each_call_is_of_its_kind(name: str) -> None:
    kind, call = OF_KIND[name]
    events: list[PromotionEvent] = []
    with tp.promotion("torch", on_promotion=events.append):
        call()
    assert [event.kind for event in events][:1] == ([] if kind is None else [kind])


@pytest.mark.parametrize(
    "dtype", [*(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))], ids=str
)
def test_an_int_overflows_beyond_the_limits_of_the_dtype(dtype: torch.dtype) -> None:
    info, ones = torch.iinfo(dtype), torch.ones(3, dtype=dtype)
    for number in (info.min, info.max, info.min - 1, info.max + 1):
        if not -(2**63) <= number < 2**63:  # PyTorch takes no such number here
            continue
        events: list[PromotionEvent] = []
        with (
            tp.promotion("torch", on_promotion=events.append, kinds="int overflow by wrapping scalar"),
            contextlib.suppress(NotImplementedError),  # of an op that has no kernel for the dtype
        ):
            ones + number
        assert len(events) == (not info.min <= number <= info.max), number


@pytest.mark.parametrize("kind", PromotionKind)
def test_kinds_choose(kind: PromotionKind) -> None:
    for chosen in (kind, kind.value, kind.name.lower(), [kind.value]):
        events: list[PromotionEvent] = []
        with tp.promotion("torch", on_promotion=events.append, kinds=chosen):
            for _, call in OF_KIND.values():
                call()
        assert {event.kind for event in events} == (set(PromotionKind) if kind is PromotionKind.ANY else {kind})


def test_every_kind_on_a_line_is_reported_once() -> None:
    with warnings.catch_warnings(record=True) as caught, tp.promotion("torch", on_promotion="warn"):
        warnings.simplefilter("always")
        for _ in range(2):
            _ = (HALF * 1e6 + SINGLE) + DOUBLE, HALF - 1e6
    assert [str(warning.message).partition("computes in ")[2] for warning in caught] == [
        "float16 (number overflows to inf)",
        "float32 (any)",
        "float64 (up to float64)",
    ]


def test_an_event_says_where_and_what() -> None:
    events: list[PromotionEvent] = []
    with tp.promotion("torch", on_promotion=events.append, kinds="int to low-precision float"):
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        _ = INTS * BRAIN
    operands, kind = ("int32[3]", "bfloat16[3]"), PromotionKind.INT_TO_LOW_PRECISION
    assert events == [PromotionEvent("aten::mul.Tensor", operands, torch.bfloat16, kind, "torch", __file__, line)]
    assert (
        str(events[0])
        == f"{__file__}:{line}: aten::mul.Tensor of int32[3] and bfloat16[3] computes in bfloat16 ({kind})"
    )


def test_the_line_is_the_callers_also_inside_of_pytorchs_python() -> None:
    events: list[PromotionEvent] = []
    with tp.promotion("torch", on_promotion=events.append):
        torch.nn.functional.mse_loss(SINGLE, DOUBLE)
    assert {event.filename for event in events} == {__file__}


@pytest.mark.parametrize(("handler", "error"), [("raise", PromotionLintError), ("warn", PromotionWarning)])
def test_an_error_comes_each_time_and_before_anything_is_written(handler: str, error: type[Exception]) -> None:
    x = HALF.clone()
    with warnings.catch_warnings(), tp.promotion("torch", on_promotion=handler):
        warnings.simplefilter("error")
        for _ in range(2 if handler == "raise" else 1):
            with pytest.raises(error, match=r"aten::add_.Tensor of float16\[3\]"):
                x += SINGLE
        _ = x + x
    assert x._version == 0


def test_errors_of_the_callable_come_through() -> None:
    def fail(event: PromotionEvent) -> None:
        raise KeyError(event.op)

    def mistyped(event: PromotionEvent) -> None:
        raise TypeError("of the callable's own")

    with tp.promotion("torch", on_promotion=fail), pytest.raises(KeyError, match=r"add.Tensor"):
        _ = HALF + SINGLE
    with tp.promotion("torch", on_promotion=mistyped), pytest.raises(PromotionLintError, match="of the callable's own"):
        _ = HALF + SINGLE


def test_the_callable_may_run_ops() -> None:
    seen = []
    with tp.promotion("strict", on_promotion=lambda event: seen.append((HALF + SINGLE).dtype)):
        _ = SINGLE + 1
        _ = INTS / INTS
    assert seen == [torch.float32]


def test_the_innermost_of_nested_regions_reports() -> None:
    outer: list[PromotionEvent] = []
    inner: list[PromotionEvent] = []
    with tp.promotion("torch", on_promotion=outer.append):
        with tp.promotion("torch", on_promotion=inner.append):
            _ = HALF + SINGLE
        with tp.my_autocast("cpu"):
            _ = HALF + DOUBLE
        with tp.promotion("torch"):
            _ = HALF + DOUBLE
    assert (len(outer), len(inner)) == (1, 1)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"on_promotion": "warn", "kinds": "up to flaot64"}, "no kind of promotion 'up to flaot64'. Legal: "),
    ({"on_promotion": "warn", "kinds": []}, "names no kind of promotion. Legal: "),
    ({"on_promotion": "warn", "kinds": 3}, "no kind of promotion 3"),
    ({"kinds": "any"}, "there is no on_promotion"),
    ({"on_promotion": "wran"}, "on_promotion is 'warn', 'raise', None or a callable"),
    ({"on_promotion": ["warn"]}, "on_promotion is 'warn', 'raise', None or a callable"),
    ({"on_promotion": lambda: None}, "does not take one argument"),
]


@pytest.mark.parametrize(("arguments", "text"), BAD)
def test_bad_input(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as error:
        tp.promotion("torch", **arguments)
    assert text in str(error.value)
