"""Decorated coroutines: a region applies in the steps of the body, but not in other tasks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import INNER, Region, autocast_dtype, in_thread, leaves_no_trace
from helpers.thread_state import thread_state

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


def test_stocks_decorated_coroutine_sees_no_autocast() -> None:
    assert asyncio.run(tp.stock_autocast("cpu", FP16)(look)()) == [None] * 4
    assert asyncio.run(half(look)()) == [FP16] * 4


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


def test_without_an_event_loop() -> None:
    """Any code can drive a coroutine with send: trio, uvloop, or a test."""

    class Ask:
        def __await__(self) -> Any:
            return (yield "question")

    @half
    async def body() -> Any:
        answer = await Ask()
        assert autocast_dtype() == FP16
        try:
            await Ask()
        except LookupError:
            return answer, autocast_dtype()

    coroutine = body()
    with leaves_no_trace():
        assert coroutine.send(None) == "question"
    with tp.my_autocast("cpu", BF16), leaves_no_trace():
        assert coroutine.send("answer") == "question"
    with leaves_no_trace(), pytest.raises(StopIteration) as stop:
        coroutine.throw(LookupError())
    assert stop.value.value == ("answer", FP16)


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
