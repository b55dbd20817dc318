"""Decorated generators: a region applies in the steps of the body, but not in the consumer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.probes import INNER, KINDS, Region, autocast_dtype, in_thread, leaves_no_trace
from helpers.thread_state import thread_state

BF16, FP16 = torch.bfloat16, torch.float16
Seen = torch.dtype | None

half = tp.my_autocast("cpu", FP16)


def generator() -> Iterator[Seen]:
    yield autocast_dtype()
    yield autocast_dtype()


def decorated_generator(dtype: torch.dtype, log: list[Any]) -> Any:
    """Yields the sent values, and logs the state at each step; its clean-up is logged as "closed"."""

    @tp.my_autocast("cpu", dtype)
    def body() -> Generator[Any, Any, str]:
        item = None
        try:
            while item != "stop":
                log.append(autocast_dtype())
                try:
                    item = yield item
                except LookupError as error:
                    log.append(autocast_dtype())
                    item = f"caught {error}"
            return "returned"
        finally:
            log.append(("closed", autocast_dtype()))

    return body()


def test_stocks_decorated_generator_sees_no_autocast() -> None:
    @tp.stock_autocast("cpu", FP16)
    def body() -> Iterator[Seen]:
        yield autocast_dtype()

    assert list(body()) == [None]
    assert list(half(generator)()) == [FP16, FP16]


def test_a_stock_region_in_a_generator_leaks_to_the_consumer() -> None:
    def leak() -> Seen:
        def body() -> Iterator[None]:
            with tp.stock_autocast("cpu", FP16):
                yield

        suspended = body()
        next(suspended)
        return autocast_dtype()

    assert in_thread(leak) == FP16


def test_send_throw_and_return() -> None:
    log: list[Any] = []
    steps = decorated_generator(FP16, log)
    with leaves_no_trace():
        assert next(steps) is None
    with leaves_no_trace():
        assert steps.send("a") == "a"
    with leaves_no_trace():
        assert steps.throw(LookupError("b")) == "caught b"
    with leaves_no_trace(), pytest.raises(StopIteration) as stop:
        steps.send("stop")
    assert stop.value.value == "returned"
    assert log == [FP16, FP16, FP16, FP16, ("closed", FP16)]


@pytest.mark.parametrize("end", ["close", "forget"])
def test_clean_up_sees_the_region(end: str) -> None:
    log: list[Any] = []
    steps = decorated_generator(FP16, log)
    next(steps)
    with leaves_no_trace():
        if end == "close":
            steps.close()
        else:
            del steps
    assert log == [FP16, ("closed", FP16)]


def test_several_take_turns() -> None:
    logs: dict[torch.dtype, list[Any]] = {FP16: [], BF16: []}
    steps = [decorated_generator(dtype, logs[dtype]) for dtype in (FP16, BF16, FP16, BF16)]
    for _ in range(3):
        for one in steps:
            with leaves_no_trace():
                next(one)
    for one in steps[::2] + steps[1::2]:
        one.close()
    for dtype, log in logs.items():
        assert log == [dtype] * 6 + [("closed", dtype)] * 2


def test_a_step_adds_its_overrides_to_those_of_the_consumer_as_a_function_called_there_would() -> None:
    def dtypes() -> tuple[torch.dtype, torch.dtype]:
        x = torch.ones(2, 2)
        return torch.mm(x, x).dtype, torch.exp(x).dtype

    @tp.my_autocast("cpu", FP16, overrides={"exp": "fp16"})
    def body() -> Iterator[Any]:
        while True:
            yield dtypes()

    steps = body()
    assert next(steps) == (FP16, FP16)
    with tp.my_autocast("cpu", BF16, overrides={"mm": "float64"}), leaves_no_trace():
        assert next(steps) == (torch.float64, FP16)
        assert dtypes() == (torch.float64, torch.float32)
    assert next(steps) == (FP16, FP16)
    assert dtypes() == (torch.float32, torch.float32)


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_regions_that_the_body_opens_across_a_yield(inner: Callable[[], Region]) -> None:
    states: list[dict[str, Any]] = []

    @half
    def body() -> Iterator[None]:
        with inner():
            states.append(thread_state())
            yield
            states.append(thread_state())
            yield
            states.append(thread_state())
        states.append(thread_state())
        yield
        states.append(thread_state())

    with half:
        outer = thread_state()
        with inner():
            nested = thread_state()
    for number, _ in enumerate(body()):
        if number == 1:
            with tp.my_autocast("cpu", BF16), torch.autocast("cpu", FP16):
                pass
        assert thread_state()["cpu"] == (False, BF16), "the step is over"
    assert states == [nested] * 3 + [outer] * 2


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_regions_that_the_body_opens_do_not_leak(inner: Callable[[], Region]) -> None:
    @half
    def body() -> Iterator[None]:
        with inner():
            yield

    def between_steps() -> tuple[dict[str, Any], dict[str, Any]]:
        before = thread_state()
        steps = body()
        next(steps)
        return before, thread_state()

    before, between = in_thread(between_steps)
    assert between == before


def test_the_cache_is_empty_between_steps_and_the_gradients_are_those_of_one_region() -> None:
    weight = torch.rand(3, 3, requires_grad=True)

    @half
    def body() -> Iterator[torch.Tensor]:
        y = torch.mm(weight, weight)
        assert tp.cache_info()["entries"] == 1
        yield y
        yield torch.mm(y, weight)

    y = torch.empty(0)
    for result in body():
        assert tp.cache_info()["entries"] == 0
        y = result
    with tp.stock_autocast("cpu", FP16):
        y_of_stock = torch.mm(torch.mm(weight, weight), weight)
    ours, stock = (torch.autograd.grad(out.float().sum(), weight)[0] for out in (y, y_of_stock))
    assert_same(ours, stock)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    dtypes=st.lists(st.sampled_from([FP16, BF16]), min_size=1, max_size=4),
    schedule=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["next", "throw", "enter", "leave", "close"])), max_size=25
    ),
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=25, max_size=25),
)
def test_any_schedule(dtypes: list[torch.dtype], schedule: list[tuple[int, str]], kinds: list[str]) -> None:
    """Some generators and a consumer that enters and leaves regions of its own, in any order."""
    logs: list[list[Any]] = [[] for _ in dtypes]
    steps = [decorated_generator(dtype, log) for dtype, log in zip(dtypes, logs, strict=True)]
    around: list[ExitStack] = []
    with leaves_no_trace():
        for (which, action), kind in zip(schedule, kinds, strict=False):
            before = thread_state()
            one = steps[which % len(steps)]
            if action == "enter":
                stack = ExitStack()
                stack.enter_context(KINDS[kind]("cpu", dtypes[which % len(dtypes)], enabled=which != 3))
                around.append(stack)
            elif action == "leave":
                if around:
                    around.pop().close()
            else:
                if action == "close":
                    one.close()
                elif action == "next" or inspect.getgeneratorstate(one) == inspect.GEN_CREATED:
                    next(one, None)
                elif inspect.getgeneratorstate(one) == inspect.GEN_SUSPENDED:
                    one.throw(LookupError())
                assert thread_state() == before
        while around:
            around.pop().close()
    for one, dtype, log in zip(steps, dtypes, logs, strict=True):
        one.close()
        assert {entry[1] if isinstance(entry, tuple) else entry for entry in log} <= {dtype}
