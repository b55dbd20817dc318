"""A plain `with my_autocast()` held across an await affects only the task that opened it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.probes import INNER, KINDS, Region, autocast_dtype, in_thread, leaves_no_trace
from helpers.thread_state import thread_state

BF16, FP16 = torch.bfloat16, torch.float16
Seen = torch.dtype | None


async def look(times: int = 3) -> list[Seen]:
    """The state in a task without a region."""
    found = []
    for _ in range(times):
        found.append(autocast_dtype())
        await asyncio.sleep(0)
    return found


async def hold(region: Region, times: int = 3) -> list[Seen]:
    """The state inside a region held across awaits, and after it."""
    found = []
    with region:
        for _ in range(times):
            found.append(autocast_dtype())
            await asyncio.sleep(0)
        found.append(autocast_dtype())
    return [*found, autocast_dtype()]


def half() -> tp.my_autocast:
    return tp.my_autocast("cpu", FP16)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with leaves_no_trace():
        return asyncio.run(main())


def test_a_region_affects_only_its_task() -> None:
    async def main() -> Any:
        return await asyncio.gather(look(), hold(half()), look(), hold(tp.my_autocast("cpu", BF16), 5), look(9))

    held = [[FP16] * 4 + [None], [BF16] * 6 + [None]]
    assert run(main) == [[None] * 3, held[0], [None] * 3, held[1], [None] * 9]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_region_around_the_loop_holds_in_every_task(kind: Callable[..., Region]) -> None:
    async def main() -> Any:
        return await asyncio.gather(look(), hold(half()), hold(tp.my_autocast("cpu", enabled=False)))

    with kind("cpu", BF16):
        assert run(main) == [[BF16] * 3, [FP16] * 4 + [BF16], [None] * 4 + [BF16]]
        assert autocast_dtype() == BF16


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_cancelled_task_leaves_its_region(how: str) -> None:
    log: list[Seen] = []

    async def held() -> None:
        with half():
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
                    await held()
        else:
            task = asyncio.create_task(held())
            await asyncio.sleep(0)
            assert autocast_dtype() is None
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert autocast_dtype() is None

    run(main)
    assert log == [FP16, FP16]


@pytest.mark.usefixtures("pretend_cuda")
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_regions_inside_it_are_there_again_after_the_await(inner: Callable[[], Region]) -> None:
    states: list[dict[str, Any]] = []
    elsewhere: list[dict[str, Any]] = []

    async def held() -> None:
        with half():
            with inner():
                states.append(thread_state())
                await asyncio.sleep(0)
                states.append(thread_state())
            states.append(thread_state())
            await asyncio.sleep(0)
            states.append(thread_state())

    async def other() -> None:
        for _ in range(3):
            elsewhere.append(thread_state())
            await asyncio.sleep(0)

    async def main() -> None:
        elsewhere.append(thread_state())
        await asyncio.gather(held(), other())

    with half():
        outer = thread_state()
        with inner():
            nested = thread_state()
    in_thread(lambda: asyncio.run(main()))
    assert states == [nested] * 2 + [outer] * 2
    assert elsewhere == elsewhere[:1] * 4
