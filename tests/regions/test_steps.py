"""Decorated callables: the region applies while they run, and they keep their type and metadata."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import autocast_dtype, leaves_no_trace

BF16, FP16 = torch.bfloat16, torch.float16
Seen = torch.dtype | None


# --- what runs in one go


class Model:
    scale = 3

    @tp.my_autocast("cpu", FP16)
    def method(self, x: int) -> tuple[int, Seen]:
        return self.scale * x, autocast_dtype()

    @classmethod
    @tp.my_autocast("cpu", FP16)
    def class_method(cls, x: int) -> tuple[int, Seen]:
        return cls.scale * x, autocast_dtype()

    @staticmethod
    @tp.my_autocast("cpu", FP16)
    def static_method(x: int) -> tuple[int, Seen]:
        return 3 * x, autocast_dtype()

    @property
    @tp.my_autocast("cpu", FP16)
    def attribute(self) -> tuple[int, Seen]:
        return 3, autocast_dtype()

    def __call__(self, x: int) -> tuple[int, Seen]:
        return self.scale * x, autocast_dtype()


def plain(x: int, times: int = 3) -> tuple[int, Seen]:
    return times * x, autocast_dtype()


half = tp.my_autocast("cpu", FP16)
CALLABLES: dict[str, Callable[[int], tuple[int, Seen]]] = {
    "function": half(plain),
    "lambda": half(lambda x: plain(x)),
    "method": Model().method,
    "bound method": half(Model().__call__),
    "class method": Model.class_method,
    "class method of an object": Model().class_method,
    "static method": Model.static_method,
    "static method of an object": Model().static_method,
    "a staticmethod decorated": half(staticmethod(plain)),
    "callable object": half(Model()),
    "partial": half(functools.partial(plain, times=3)),
    "twice": tp.my_autocast("cpu", BF16)(half(plain)),
}


@pytest.mark.parametrize("call", CALLABLES.values(), ids=CALLABLES)
def test_a_region_holds_while_the_callable_runs(call: Callable[[int], tuple[int, Seen]]) -> None:
    with leaves_no_trace():
        assert call(7) == (21, FP16)
        assert call(7) == (21, FP16)
    with tp.my_autocast("cpu", BF16):
        assert call(7) == (21, FP16)
        assert autocast_dtype() == BF16


def test_an_exception_leaves_the_function_and_the_region() -> None:
    @half
    def fail() -> None:
        raise LookupError(str(autocast_dtype()))

    with leaves_no_trace(), pytest.raises(LookupError, match="float16"):
        fail()


# --- what a decorated thing still is


def generator() -> Generator[Seen, Any, str]:
    """Yields what it sees, twice."""
    yield autocast_dtype()
    yield autocast_dtype()
    return "done"


async def coroutine() -> Seen:
    """Returns what it sees."""
    return autocast_dtype()


async def asynchronous_generator() -> Any:
    """Yields what it sees."""
    yield autocast_dtype()


@pytest.mark.parametrize("function", [plain, generator, coroutine, asynchronous_generator])
def test_metadata(function: Callable[..., Any]) -> None:
    function.mark = "kept"  # type: ignore[attr-defined]
    decorated = tp.my_autocast("cpu")(function)
    for ask in (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
        inspect.signature,
    ):
        assert ask(decorated) == ask(function), ask
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "mark"):
        assert getattr(decorated, attribute) == getattr(function, attribute)
    assert decorated.__wrapped__ is function
    assert inspect.unwrap(decorated) is function
