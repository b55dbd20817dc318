"""Decorated callables: the region applies while they run, and they keep their type and metadata."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator, Iterator
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


async def look(times: int = 3) -> list[Seen]:
    """The states before, between and after awaits that take several turns of the loop."""
    found = [autocast_dtype()]
    for _ in range(times):
        await asyncio.sleep(0)
        found.append(autocast_dtype())
    return found


class Service:
    @half
    async def method(self) -> list[Seen]:
        return await look()

    @classmethod
    @half
    async def class_method(cls) -> list[Seen]:
        return await look()

    @staticmethod
    @half
    async def static_method() -> list[Seen]:
        return await look()

    async def __call__(self) -> list[Seen]:
        return await look()


COROUTINES: dict[str, Callable[[], Any]] = {
    "function": half(look),
    "method": Service().method,
    "class method": Service.class_method,
    "static method": Service.static_method,
    "callable object": half(Service()),
    "partial": half(functools.partial(look, 3)),
    "bound method": half(Service().__call__),
    "twice": tp.my_autocast("cpu", BF16)(half(look)),
}


@pytest.mark.parametrize("call", COROUTINES.values(), ids=COROUTINES)
def test_every_kind_of_coroutine_function(call: Callable[[], Any]) -> None:
    with leaves_no_trace():
        assert asyncio.run(call()) == [FP16] * 4


def test_several_at_once_see_each_its_own() -> None:
    async def main() -> Any:
        with leaves_no_trace():
            return await asyncio.gather(
                half(look)(),
                tp.my_autocast("cpu", BF16)(look)(),
                look(),
                tp.my_autocast("cpu", enabled=False)(look)(),
                half(look)(5),
            )

    with leaves_no_trace():
        assert asyncio.run(main()) == [[FP16] * 4, [BF16] * 4, [None] * 4, [None] * 4, [FP16] * 6]


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_cancelled_in_the_middle_the_clean_up_sees_the_region(how: str) -> None:
    log: list[Seen] = []

    @half
    async def body() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            log.append(autocast_dtype())
            await asyncio.sleep(0)
            log.append(autocast_dtype())

    async def main() -> None:
        if how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await body()
        else:
            task = asyncio.create_task(body())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert autocast_dtype() is None

    with leaves_no_trace():
        asyncio.run(main())
    assert log == [FP16, FP16]


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_regions_that_a_coroutine_opens_across_an_await(inner: Callable[[], Region]) -> None:
    states: list[dict[str, Any]] = []
    others: list[Seen] = []

    @half
    async def body() -> None:
        with inner():
            states.append(thread_state())
            await asyncio.sleep(0)
            states.append(thread_state())
        states.append(thread_state())
        await asyncio.sleep(0)
        states.append(thread_state())

    async def main() -> None:
        _, seen_by_other = await asyncio.gather(body(), look())
        others.extend(seen_by_other)

    with half:
        outer = thread_state()
        with inner():
            nested = thread_state()
    in_thread(lambda: asyncio.run(main()))
    assert states == [nested] * 2 + [outer] * 2
    assert others == [None] * 4


def logging_generator(log: list[Any], region: Region) -> Any:
    @region
    async def body() -> AsyncIterator[Any]:
        item: Any = None
        try:
            while item != "stop":
                log.append(autocast_dtype())
                await asyncio.sleep(0)
                log.append(autocast_dtype())
                try:
                    item = yield item
                except LookupError as error:
                    item = f"caught {error}"
        finally:
            log.append(("closed", autocast_dtype()))
            await asyncio.sleep(0)
            log.append(("closed", autocast_dtype()))

    return body()


CLOSED = [("closed", FP16)] * 2


def test_asend_athrow_and_the_end() -> None:
    log: list[Any] = []

    async def main() -> None:
        steps = logging_generator(log, half)
        with leaves_no_trace():
            assert await anext(steps) is None
        with leaves_no_trace():
            assert await steps.asend("a") == "a"
        with leaves_no_trace():
            assert await steps.athrow(LookupError("b")) == "caught b"
        with leaves_no_trace(), pytest.raises(StopAsyncIteration):
            await steps.asend("stop")
        with pytest.raises(StopAsyncIteration):
            await anext(steps)

    asyncio.run(main())
    assert log == [FP16] * 6 + CLOSED


@pytest.mark.parametrize("end", ["aclose", "aclosing", "break", "forgotten"])
def test_clean_up_sees_the_region_and_happens_when_it_ever_would(end: str) -> None:
    async def main(steps: Any) -> None:
        with leaves_no_trace():
            if end == "aclose":
                await anext(steps)
                await steps.aclose()
            elif end == "aclosing":
                async with contextlib.aclosing(steps):
                    await anext(steps)
            else:
                async for _ in steps:
                    break
                if end == "break":
                    await steps.aclose()

    log: list[Any] = []
    undecorated: list[Any] = []
    with leaves_no_trace():
        asyncio.run(main(logging_generator(log, half)))  # closes what was forgotten, as far as it gets
        asyncio.run(main(logging_generator(undecorated, lambda body: body)))
    assert ("closed", None) in undecorated
    assert log == [("closed", FP16) if isinstance(entry, tuple) else FP16 for entry in undecorated]


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_regions_that_an_asynchronous_generator_opens_across_a_yield(inner: Callable[[], Region]) -> None:
    states: list[dict[str, Any]] = []
    consumer: list[dict[str, Any]] = []

    @half
    async def body() -> AsyncIterator[None]:
        with inner():
            states.append(thread_state())
            yield
            states.append(thread_state())
            yield
        states.append(thread_state())
        yield

    async def main() -> None:
        consumer.append(thread_state())
        async for _ in body():
            consumer.append(thread_state())

    with half:
        outer = thread_state()
        with inner():
            nested = thread_state()
    in_thread(lambda: asyncio.run(main()))
    assert consumer == consumer[:1] * 4
    assert states == [nested] * 2 + [outer]
