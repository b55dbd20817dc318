"""The warning for an override that had no effect: when it comes, its text and line, and the programs that get none."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import torch_promote as tp
from helpers.probes import leaves_no_trace
from torch_promote.regions import autocast

X, W = torch.randn(4, 8), torch.randn(8, 8)
BATCH = torch.randn(2, 4, 4)
NET = nn.Linear(8, 8)
Body = Callable[[], object]

_number = iter(range(10**6))


def program(source: str, **names: Any) -> Callable[..., None]:
    """Returns a function that runs the source: each time a program of its own, whose lines nobody has run before."""
    scope = {"torch": torch, "tp": tp, **names}
    code = compile(source, f"<program {next(_number)}>", "exec")
    return lambda: exec(code, scope)


def told(run: Body) -> list[str]:
    """Returns the texts of the warnings of a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run()
    return [str(warning.message) for warning in caught if warning.category is tp.UnusedOverrideWarning]


def region(overrides: dict[Any, Any], body: Body, enter: str = 'tp.my_autocast("cpu", overrides=overrides)') -> Body:
    """Returns a program with one region."""
    return program(f"with {enter}:\n    body()", overrides=overrides, body=body)


def linear_12_times() -> None:
    for _ in range(12):
        NET(X)


@pytest.fixture(autouse=True)
def forget_regions() -> None:
    """Regions with equal overrides share the notes of what was called in them."""
    autocast._register.cache_clear()
    gc.collect()


# --- what is told


def test_the_text() -> None:
    (text,) = told(region({"mm": "fp32"}, lambda: (linear_12_times(), X @ W)))
    assert text == (
        "the override of aten::mm was never used. Instead, the region ran aten::linear, aten::matmul, which may call "
        "mm, with autocast off. Name in the overrides: linear, matmul."
    )


CALLS: dict[str, tuple[Body, str, str]] = {
    "linear without a bias": (lambda: F.linear(X, W), "mm", "linear"),
    "linear with a bias": (lambda: NET(X), "addmm", "linear"),
    "linear with a bias, as mm": (lambda: NET(X), "mm", "linear"),
    "linear of three dimensions": (lambda: NET(X.view(2, 2, 8)), "mm", "linear"),
    "linear of one dimension": (lambda: F.linear(X[0], W), "mm", "linear"),
    "matmul": (lambda: X @ W, "mm", "matmul"),
    "matmul of batches": (lambda: BATCH @ BATCH, "bmm", "matmul"),
    "both": (lambda: (NET(X), X @ W), "mm", "linear, matmul"),
    "conv2d": (lambda: F.conv2d(X.view(1, 1, 4, 8), torch.ones(1, 1, 2, 2)), "convolution", "conv2d"),
    "an overload": (lambda: X @ W, "mm.default", "matmul"),
    "an op object": (lambda: X @ W, torch.ops.aten.mm, "matmul"),
    "an overload object": (lambda: X @ W, torch.ops.aten.mm.default, "matmul"),
}


@pytest.mark.parametrize(("body", "named", "ran"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("policy", ["fp32", torch.float64, "fallthrough", "keep", "banned", "promote"], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_an_op_that_runs_inside_another_one(
    body: Body, named: Any, ran: str, policy: Any, mode: Callable[[], Any]
) -> None:
    with mode():
        (text,) = told(region({named: policy}, body))
    assert text.startswith("the override of aten::")
    assert text.endswith(f" with autocast off. Name in the overrides: {ran}.")


def test_the_line_is_that_of_the_region() -> None:
    with pytest.warns(tp.UnusedOverrideWarning) as caught, tp.my_autocast("cpu", overrides={"mm": "fp32"}):
        linear_12_times()
    line = test_the_line_is_that_of_the_region.__code__.co_firstlineno + 1
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


def test_a_line_is_told_once() -> None:
    run = region({"mm": "fp32"}, linear_12_times)
    assert len(told(lambda: [run() for _ in range(3)])) == 1
    twice = program(
        "for n in (1, 2, 3):\n    with tp.my_autocast('cpu', overrides={'mm': 'fp32'}):\n        body(n)",
        body=lambda n: [NET(X) for _ in range(n)],
    )
    assert len(told(twice)) == 1, "whatever the number of runs"


def test_a_nested_region_tells_of_its_own_overrides() -> None:
    def both(inner: dict[str, str]) -> list[str]:
        return told(region({"mm": "fp32"}, region(inner, linear_12_times)))

    assert [text[: text.index(" was")] for text in both({"addmm": "keep"})] == [
        "the override of aten::addmm",
        "the override of aten::mm",
    ]
    assert len(both({"softmax": "fp32"})) == 1, "the outer region's"


# --- programs that are right

RIGHT: dict[str, tuple[dict[Any, Any], Body]] = {
    "the op is called": ({"mm": "fp32"}, lambda: torch.mm(X, W)),
    "both are called": ({"mm": "fp32"}, lambda: (NET(X), torch.mm(X, W))),
    "the override names the dtype that runs": ({"mm": torch.bfloat16}, lambda: NET(X)),
    "another overload of the op": ({"mm": "fp32"}, lambda: torch.mm(X.detach(), W, out=torch.empty(4, 8))),
    "no call": ({"mm": "fp32"}, lambda: None),
    "a kernel that calls the op": ({"mul": "keep", "add": "keep"}, lambda: torch.linalg.matrix_exp(W)),
    "neither is called": ({"mm": "fp32"}, lambda: torch.softmax(X, 0)),
    "another op that is not made of it": ({"softmax": "fp32"}, lambda: NET(X)),
    "a pattern": ({"m[m]": "fp32", "add*": "fp32"}, lambda: NET(X)),
    "both are named": ({"mm": "fp32", "linear": "fp32"}, lambda: NET(X)),
    "both are named, the other one by a pattern": ({"mm": "fp32", "linea[r]": "fp16"}, lambda: NET(X)),
    "the other op has no policy": ({"mm": "fp32", "matmul": "fallthrough"}, lambda: X @ W),
    "the override asks for what runs": ({"mm": "fp16"}, lambda: NET(X)),
    "backward in the region": ({"mm": "fp32"}, lambda: NET(X.requires_grad_()).sum().backward()),
    "the other op has no policy on the CPU": (
        {"bmm": "fp32"},
        lambda: torch.einsum("bij,bjk->bik", BATCH, BATCH),
    ),
}


@pytest.mark.parametrize(("overrides", "body"), RIGHT.values(), ids=RIGHT)
def test_a_program_that_is_right(overrides: dict[Any, Any], body: Body) -> None:
    assert told(region(overrides, body)) == []


@pytest.mark.parametrize(
    "enter",
    [
        'tp.my_autocast("cpu", policy=tp.Policy.stock().override(overrides))',
        'tp.my_autocast("cpu", enabled=False, overrides=overrides)',
        'tp.install(overrides=overrides), torch.autocast("cpu")',
        'tp.my_autocast("cpu", overrides=overrides), torch.autocast("cpu", enabled=False)',
        'tp.my_autocast("cpu", overrides=overrides), tp.my_autocast("cpu", policy="off")',
        'tp.my_autocast("cpu", overrides=overrides), tp.my_autocast("cpu", overrides={"linear": "fp32"})',
    ],
)
def test_regions_that_tell_nothing(enter: str) -> None:
    assert told(region({"mm": "fp32"}, linear_12_times, enter)) == []


# --- exceptions, filters, and what is left


def test_calls_under_a_mode_count_for_the_regions_that_existed_then_alone() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def under_a_mode() -> None:
        with Mode():
            torch.mm(X, W)

    with tp.my_autocast("cpu", overrides={"mm": "fp32"}):
        under_a_mode()
    autocast._register.cache_clear()
    gc.collect()
    assert len(told(region({"mm": "fp32"}, linear_12_times))) == 1
    assert told(region({"mm": "fp32"}, lambda: (linear_12_times(), under_a_mode()))) == []


def test_after_an_exception_nothing_is_told() -> None:
    def caught() -> None:
        with pytest.raises(KeyError):
            region({"mm": "fp32"}, lambda: (linear_12_times(), {}["as it was"]))()

    assert told(caught) == []


def test_a_warning_as_an_error_leaves_nothing_open() -> None:
    run = region({"mm": "fp32"}, linear_12_times)
    with leaves_no_trace(), warnings.catch_warnings():
        warnings.simplefilter("error", tp.UnusedOverrideWarning)
        for _ in range(2):
            with pytest.raises(tp.UnusedOverrideWarning, match="overrides: linear"):
                run()
