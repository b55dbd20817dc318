"""Bodies in steps: the region of a decorator, or one held across an await, applies in each step and nowhere else."""

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
from helpers.probes import INNER, KINDS, Region, autocast_dtype, in_thread, leaves_no_trace
from helpers.thread_state import thread_state

pytestmark = pytest.mark.usefixtures("nothing_installed")

BF16, FP16 = torch.bfloat16, torch.float16
Seen = torch.dtype | None

half = tp.my_autocast("cpu", FP16)


async def look(times: int = 3) -> list[Seen]:
    """The states before, between and after awaits that take several turns of the loop."""
    found = [autocast_dtype()]
    for _ in range(times):
        await asyncio.sleep(0)
        found.append(autocast_dtype())
    return found


async def hold(region: Region, times: int = 3) -> list[Seen]:
    """The same inside a region held across awaits."""
    with region:
        return await look(times)


# --- what can be decorated, and what it still is afterwards


def plain() -> list[Seen]:
    return [autocast_dtype()] * 4


class Model:
    @half
    def method(self) -> list[Seen]:
        return plain()

    @classmethod
    @half
    def class_method(cls) -> list[Seen]:
        return plain()

    @half
    async def coroutine(self) -> list[Seen]:
        return await look()

    def __call__(self) -> list[Seen]:
        return plain()


class Service:
    async def __call__(self) -> list[Seen]:
        return await look()


CALLABLES: dict[str, Callable[[], Any]] = {
    "function": half(plain),
    "method": Model().method,
    "bound method": half(Model().__call__),
    "class method": Model.class_method,
    "a staticmethod decorated": half(staticmethod(plain)),
    "callable object": half(Model()),
    "partial": half(functools.partial(plain)),
    "twice": tp.my_autocast("cpu", BF16)(half(plain)),
    "coroutine function": half(look),
    "coroutine method": Model().coroutine,
    "callable object with coroutines": half(Service()),
    "partial of a coroutine function": half(functools.partial(look, 3)),
    "coroutine function, twice": tp.my_autocast("cpu", BF16)(half(look)),
}


@pytest.mark.parametrize("call", CALLABLES.values(), ids=CALLABLES)
def test_a_region_holds_while_the_callable_runs(call: Callable[[], Any]) -> None:
    async def in_a_loop() -> Any:
        return await call()

    for around in (None, BF16):
        with tp.my_autocast("cpu", around, enabled=around is not None), leaves_no_trace():
            found = call()
            assert (asyncio.run(in_a_loop()) if inspect.iscoroutine(found) else found) == [FP16] * 4
            if inspect.iscoroutine(found):
                found.close()
            assert autocast_dtype() == around


def generator() -> Generator[Seen, Any, str]:
    """Yields what it sees."""
    yield autocast_dtype()
    return "done"


async def asynchronous_generator() -> Any:
    """Yields what it sees."""
    yield autocast_dtype()


@pytest.mark.parametrize("function", [plain, generator, look, asynchronous_generator])
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
    assert inspect.unwrap(decorated) is function


# --- regions that the body itself opens, and holds across steps

States = list[dict[str, Any]]


def across_yields(inner: Callable[[], Region], states: States) -> Iterator[None]:
    with inner():
        states.append(thread_state())
        yield
        states.append(thread_state())
        yield
        states.append(thread_state())
    states.append(thread_state())
    yield
    states.append(thread_state())


async def across_awaits(inner: Callable[[], Region], states: States) -> None:
    for _ in across_yields(inner, states):
        await asyncio.sleep(0)


async def across_asynchronous_yields(inner: Callable[[], Region], states: States) -> AsyncIterator[None]:
    for _ in across_yields(inner, states):
        yield


async def held(inner: Callable[[], Region], states: States) -> None:
    with tp.my_autocast("cpu", FP16):
        await across_awaits(inner, states)


async def held_by_torch(inner: Callable[[], Region], states: States) -> None:
    with tp.install(), torch.autocast("cpu", FP16):
        await across_awaits(inner, states)


BODIES = {
    "generator": half(across_yields),
    "coroutine": half(across_awaits),
    "asynchronous generator": half(across_asynchronous_yields),
    "region held in a task": held,
    "installed region held in a task": held_by_torch,
}


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_regions_that_the_body_opens_across_a_step(body: Callable[..., Any], inner: Callable[[], Region]) -> None:
    states: States = []
    elsewhere: States = []

    async def other() -> None:
        for _ in range(4):
            elsewhere.append(thread_state())
            await asyncio.sleep(0)

    async def run() -> None:
        await other()
        steps = body(inner, states)
        if inspect.isasyncgen(steps):
            async for _ in steps:
                await other()
        else:
            await asyncio.gather(steps, other())

    def main() -> None:
        if inspect.isgeneratorfunction(body):
            elsewhere.append(thread_state())
            for _ in body(inner, states):
                with tp.my_autocast("cpu", BF16), torch.autocast("cpu", FP16):
                    pass
                elsewhere.append(thread_state())
        else:
            asyncio.run(run())

    with half:
        outer = thread_state()
        with inner():
            nested = thread_state()
    in_thread(main)
    assert states == [nested] * 3 + [outer] * 2
    assert elsewhere == elsewhere[:1] * len(elsewhere)


# --- several tasks, and tasks that end early


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_tasks_see_their_own_region_and_the_one_around_the_loop(kind: str | None) -> None:
    async def main() -> Any:
        off = tp.my_autocast("cpu", enabled=False)
        tasks = [half(look)(), tp.my_autocast("cpu", BF16)(look)(), look(), off(look)(), half(look)(5)]
        held = [hold(tp.my_autocast("cpu", FP16)), hold(tp.my_autocast("cpu", BF16), 5), hold(off), look(9)]
        return await asyncio.gather(*tasks, *held)

    around = None if kind is None else BF16
    with contextlib.nullcontext() if kind is None else KINDS[kind]("cpu", BF16), leaves_no_trace():
        decorated = [[FP16] * 4, [BF16] * 4, [around] * 4, [None] * 4, [FP16] * 6]
        assert asyncio.run(main()) == [*decorated, [FP16] * 4, [BF16] * 6, [None] * 4, [around] * 10]


async def cleans_up(log: list[Seen]) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        log.append(autocast_dtype())
        await asyncio.sleep(0)
        log.append(autocast_dtype())


async def cleans_up_in(region: Region, log: list[Seen]) -> None:
    with region:
        await cleans_up(log)


CANCELLED: dict[str, Callable[[list[Seen]], Any]] = {
    "decorated": half(cleans_up),
    "held": lambda log: cleans_up_in(tp.my_autocast("cpu", FP16), log),
    "installed": lambda log: cleans_up_in(torch.autocast("cpu", FP16), log),
}


@pytest.mark.parametrize("body", CANCELLED.values(), ids=CANCELLED)
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_the_clean_up_of_a_cancelled_task_sees_the_region(how: str, body: Callable[[list[Seen]], Any]) -> None:
    log: list[Seen] = []

    async def main() -> None:
        if how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await body(log)
        else:
            task = asyncio.create_task(body(log))
            await asyncio.sleep(0)
            assert autocast_dtype() is None
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert autocast_dtype() is None

    with tp.install(), leaves_no_trace():
        asyncio.run(main())
    assert log == [FP16, FP16]


# --- generators


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


def test_the_clean_up_of_a_forgotten_generator_sees_the_region() -> None:
    log: list[Any] = []
    steps = decorated_generator(FP16, log)
    next(steps)
    with leaves_no_trace():
        del steps
    assert log == [FP16, ("closed", FP16)]


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


def test_asend_athrow_and_the_end() -> None:
    log: list[Any] = []

    async def main() -> None:
        steps = logging_generator(log, half)
        with leaves_no_trace():
            assert await anext(steps) is None
            assert await steps.asend("a") == "a"
            assert await steps.athrow(LookupError("b")) == "caught b"
        with leaves_no_trace(), pytest.raises(StopAsyncIteration):
            await steps.asend("stop")
        with pytest.raises(StopAsyncIteration):
            await anext(steps)

    asyncio.run(main())
    assert log == [FP16] * 6 + [("closed", FP16)] * 2


@pytest.mark.parametrize("end", ["aclose", "aclosing", "break", "forgotten"])
def test_the_clean_up_of_an_asynchronous_generator_sees_the_region_and_happens_when_it_would_without(end: str) -> None:
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
