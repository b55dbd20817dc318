"""Decorated asynchronous generators: a region applies in the steps of the body, but not in the consumer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import INNER, Region, autocast_dtype, in_thread, leaves_no_trace
from helpers.thread_state import thread_state

BF16, FP16 = torch.bfloat16, torch.float16
Seen = torch.dtype | None

half = tp.my_autocast("cpu", FP16)


def generator(log: list[Any], region: Region) -> Any:
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


def test_stocks_decorated_asynchronous_generator_sees_no_autocast() -> None:
    async def body() -> AsyncIterator[Seen]:
        yield autocast_dtype()

    async def items(generator: AsyncIterator[Seen]) -> list[Seen]:
        return [found async for found in generator]

    assert asyncio.run(items(tp.stock_autocast("cpu", FP16)(body)())) == [None]
    assert asyncio.run(items(half(body)())) == [FP16]


def test_asend_athrow_and_the_end() -> None:
    log: list[Any] = []

    async def main() -> None:
        steps = generator(log, half)
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
        asyncio.run(main(generator(log, half)))  # closes what was forgotten, as far as it gets
        asyncio.run(main(generator(undecorated, lambda body: body)))
    assert ("closed", None) in undecorated
    assert log == [("closed", FP16) if isinstance(entry, tuple) else FP16 for entry in undecorated]


def test_several_asynchronous_generators_take_turns() -> None:
    async def numbers(region: Region) -> list[Seen]:
        @region
        async def body() -> AsyncIterator[Seen]:
            for _ in range(3):
                yield autocast_dtype()
                await asyncio.sleep(0)

        found = []
        async for item in body():
            found += [item, autocast_dtype()]
            await asyncio.sleep(0)
        return found

    async def main() -> Any:
        return await asyncio.gather(numbers(half), numbers(tp.my_autocast("cpu", BF16)), numbers(half))

    with leaves_no_trace():
        assert asyncio.run(main()) == [[FP16, None] * 3, [BF16, None] * 3, [FP16, None] * 3]


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
