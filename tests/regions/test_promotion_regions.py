"""Regions of `promotion` with autocast, autograd and transforms, and the promotions that their lint reports."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.probes import in_thread
from helpers.subprocesses import plain_environment, run_python
from torch_promote.errors import (
    DecoratorError,
    OptionError,
    PromotionLintError,
    PromotionRuleError,
    PromotionWarning,
    RuleDefinitionError,
)
from torch_promote.regions.promotion import PromotionEvent, PromotionKind

HALF = torch.ones(3, dtype=torch.float16)
BRAIN = torch.ones(3, dtype=torch.bfloat16)
INTS = torch.full((3,), 257, dtype=torch.int32)
SINGLE = torch.ones(3)
BYTES = torch.ones(3, dtype=torch.uint8)
DOUBLE = torch.ones(3, dtype=torch.float64)
CHOICE = torch.ones(3, dtype=torch.bool)


def mixed() -> torch.dtype:
    """float32 under stock and jax, float64 under numpy."""
    return (INTS + SINGLE).dtype


promotion: Any = tp.promotion
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: promotion(3), RuleDefinitionError, "3"),
    (lambda: promotion(mixed), RuleDefinitionError, "As a decorator, write it with a rule: @promotion("),
    (lambda: promotion("torch", "warn", kinds="up to flaot64"), OptionError, "no kind of promotion 'up to flaot64'. L"),
    (lambda: promotion("torch", "warn", kinds=[]), OptionError, "names no kind of promotion. Legal: "),
    (lambda: promotion("torch", "warn", kinds=3), OptionError, "no kind of promotion 3"),
    (lambda: promotion("torch", kinds="any"), OptionError, "there is no on_promotion"),
    (lambda: promotion("torch", "wran"), OptionError, "on_promotion is 'warn', 'raise', None or a callable"),
    (lambda: promotion("torch", ["warn"]), OptionError, "on_promotion is 'warn', 'raise', None or a callable"),
    (lambda: promotion("torch", lambda: None), OptionError, "does not take one argument"),
    (lambda: promotion("jax")(3), DecoratorError, "decorates a callable, got int"),
]


@pytest.mark.parametrize(("ask", "kind", "text"), BAD)
def test_bad_input(ask: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        ask()
    assert text in str(error.value)


def test_the_innermost_counts_in_each_thread_and_step() -> None:
    @tp.promotion("jax")
    def steps() -> Any:
        yield mixed()
        yield mixed()

    with tp.promotion("numpy"):
        iterator = steps()
        assert [mixed(), next(iterator), mixed(), next(iterator)] == [torch.float64, torch.float32] * 2
        assert in_thread(mixed) is torch.float32
    assert mixed() is torch.float32


ADD = {"aten::add.Tensor": "fp32"}
#: Regions around and inside, and the dtypes of a product plus integers, and of bfloat16 plus integers.
WITH_AUTOCAST: dict[str, tuple[Callable[[], Any], Callable[[], Any], torch.dtype]] = {
    "the rule inside": (lambda: tp.my_autocast("cpu"), lambda: tp.promotion("numpy"), torch.float64),
    "the rule around": (lambda: tp.promotion("numpy"), lambda: tp.my_autocast("cpu"), torch.float64),
    "around stock's": (lambda: tp.promotion("numpy"), lambda: tp.stock_autocast("cpu"), torch.float64),
    "around a policy": (lambda: tp.promotion("numpy"), lambda: tp.my_autocast("cpu", policy="cuda"), torch.float64),
    "around overrides": (
        lambda: tp.promotion("numpy"),
        lambda: tp.my_autocast("cpu", overrides=ADD),
        torch.float64,
    ),
    "in overrides": (lambda: tp.my_autocast("cpu", overrides=ADD), lambda: tp.promotion("numpy"), torch.float64),
    "no rule": (lambda: tp.my_autocast("cpu", overrides=ADD), lambda: tp.my_autocast("cpu"), torch.float32),
}


@pytest.mark.parametrize(("around", "inside", "dtype"), WITH_AUTOCAST.values(), ids=WITH_AUTOCAST)
def test_autocast_casts_before_the_rule(
    around: Callable[[], Any], inside: Callable[[], Any], dtype: torch.dtype
) -> None:
    with around(), inside():
        product = torch.ones(3, 3) @ torch.ones(3, 3)
        assert (product.dtype, (product + INTS).dtype, (BRAIN + INTS).dtype) == (torch.bfloat16, dtype, dtype)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_have_the_operands_dtypes(inside: bool) -> None:
    a, b = (torch.full((3,), 1.5, dtype=dtype, requires_grad=True) for dtype in (torch.float16, torch.bfloat16))
    with tp.promotion("jax"):
        total = (a * b).sum()
        grads = torch.autograd.grad(total, (a, b)) if inside else ()
    grads = grads or torch.autograd.grad(total, (a, b))
    assert [total.dtype, *(grad.dtype for grad in grads)] == [torch.float32, torch.float16, torch.bfloat16]
    assert torch.equal(grads[0], b.detach().half())


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_again_as_before(reentrant: bool, inside: bool) -> None:
    dtypes = []

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a * b
        dtypes.append(product.dtype)
        return product.sin()

    x = torch.ones(3, requires_grad=True)
    with tp.promotion("numpy"):
        y = checkpoint(function, x, INTS, use_reentrant=reentrant)
        if inside:
            y.sum().backward()
    if not inside:
        y.sum().backward()
    assert dtypes == [torch.float64, torch.float64]


def test_vmap() -> None:
    with tp.promotion("jax"):
        result = torch.vmap(lambda x, y: x + y)(torch.ones(2, 3).half(), torch.ones(2, 3).bfloat16())
    assert result.dtype is torch.float32
    with tp.promotion("numpy"):
        assert torch.vmap(torch.add, (0, None))(torch.ones(2, 3), INTS).dtype is torch.float64
    with tp.promotion("strict"), pytest.raises(PromotionRuleError):
        torch.vmap(torch.add)(torch.ones(2, 3), torch.ones(2, 3).half())


def test_fake_tensors() -> None:
    with FakeTensorMode(), tp.promotion("numpy"):
        assert (torch.ones(3) + torch.ones(3, dtype=torch.int32)).dtype is torch.float64
        x = torch.ones(3)
        x += torch.ones((), dtype=torch.float64)
        assert x.dtype is torch.float32
    with tp.promotion("numpy"):
        assert (torch.empty(3, device="meta") + torch.empty(3, dtype=torch.int8, device="meta")).dtype is torch.float32


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_casts(mode: str) -> None:
    with tp.promotion("numpy"):
        traced = make_fx(torch.add, tracing_mode=mode)(INTS, SINGLE)
    assert traced.code.count("torch.float64") == 2
    assert traced(INTS, SINGLE).dtype is torch.float64


def test_export_says_that_it_cannot() -> None:
    class Adds(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with tp.promotion("numpy"):
                return x + y

    with pytest.raises(Exception, match="a promotion rule cannot be exported"):
        torch.export.export(Adds(), (INTS, SINGLE))


NOTHING_BEFORE_THE_FIRST_USE = """
import sys, torch, torch_promote as tp
def ours(op):
    return next(l for l in torch._C._dispatch_dump_table(op).splitlines() if l.startswith("AutocastPrivateUse1"))
ops = ("aten::add.Tensor", "aten::where.self", "aten::_foreach_add.List", "aten::mm", "aten::quantile")
before = [ours(op) for op in ops]
assert "fallthrough" in before[0] and "fallthrough" in before[2], before
assert not any(name.startswith("torch_promote.reference") for name in sys.modules)
with tp.my_autocast("cpu"):
    torch.ones(2, 2) @ torch.ones(2, 2)
assert [ours(op) for op in ops] == before
tp.promotion("jax")
after = [ours(op) for op in ops]
assert "fallthrough" not in after[0] and "fallthrough" not in after[2], after
"""


def test_nothing_is_registered_until_the_first_use() -> None:
    done = run_python(NOTHING_BEFORE_THE_FIRST_USE, env=plain_environment())
    assert done.returncode == 0, done.stderr


def test_another_rule_is_compared_with_its_own_tables() -> None:
    x, scalar = SINGLE.clone(), torch.tensor(2.5, dtype=torch.float64)
    with tp.crosscheck() as report, tp.promotion("numpy"):
        _ = INTS + SINGLE, INTS / INTS, SINGLE * scalar, torch.cat([HALF, INTS]), torch.where(x > 0, HALF, BRAIN)
        _ = INTS + 5.5, torch._foreach_mul([HALF, INTS], [BRAIN, INTS]), torch.sqrt(INTS), INTS > SINGLE
        x += scalar
        torch.add(INTS, SINGLE, out=torch.empty(3))
    report.raise_for_mismatches()
    assert report.checked["aten.add.Tensor"] >= 2
    assert report.checked["aten._foreach_mul.List"] == 1


# --- the lint

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
    "where with 1e6": (PromotionKind.FLOAT_OVERFLOW, lambda: torch.where(CHOICE, HALF, 1e6)),
    "where of a Python float and ints": (PromotionKind.ANY, lambda: torch.where(CHOICE, 2.5, INTS)),
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
