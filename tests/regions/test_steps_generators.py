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
from helpers.probes import INNER, KINDS, Region, autocast_dtype, leaves_no_trace
from helpers.thread_state import thread_state

BF16, FP16 = torch.bfloat16, torch.float16

half = tp.my_autocast("cpu", FP16)


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


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_consumer_may_change_its_regions_between_steps(kind: Callable[..., Region]) -> None:
    log: list[Any] = []
    steps = decorated_generator(FP16, log)
    with kind("cpu", BF16):
        next(steps)
        assert autocast_dtype() == BF16
    next(steps)
    assert autocast_dtype() is None
    with kind("cpu", enabled=False), kind("cpu", BF16, cache_enabled=False), leaves_no_trace():
        next(steps)
    with tp.my_autocast("cpu", BF16), leaves_no_trace(), pytest.raises(StopIteration):
        steps.send("stop")
    assert log == [FP16, FP16, FP16, ("closed", FP16)]


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
