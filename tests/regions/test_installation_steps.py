"""Regions of torch.autocast in generators, coroutines and tasks while `install` is in force."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from helpers.installed import OURS
from helpers.probes import leaves_no_trace, mm_dtype
from torch_promote.regions import autocast_methods

pytestmark = pytest.mark.usefixtures("installed_marked")

CPU = "cpu"


def test_generator_that_holds_a_region() -> None:
    def body() -> Iterator[torch.dtype]:
        with torch.autocast(CPU):
            yield mm_dtype()
            yield mm_dtype()

    with leaves_no_trace():
        assert list(body()) == [OURS, OURS]
        started = body()
        next(started)
        started.close()


def test_tasks_do_not_see_each_others_regions() -> None:
    async def inside(region: Any) -> list[torch.dtype]:
        seen = []
        with region:
            for _ in range(3):
                seen.append(torch.get_autocast_dtype(CPU))
                await asyncio.sleep(0)
        return seen

    async def outside() -> list[bool]:
        seen = []
        for _ in range(3):
            seen.append(torch.is_autocast_enabled(CPU))
            await asyncio.sleep(0)
        return seen

    async def main() -> list[Any]:
        regions = [torch.autocast(CPU), torch.autocast(CPU, torch.float16)]
        return await asyncio.gather(*map(inside, regions), outside())

    with leaves_no_trace():
        assert asyncio.run(main()) == [[torch.bfloat16] * 3, [torch.float16] * 3, [False] * 3]
    assert not autocast_methods._thread.objects


def test_cancelled_and_abandoned_tasks() -> None:
    async def forever() -> None:
        with torch.autocast(CPU):
            await asyncio.sleep(3600)

    async def agen() -> AsyncIterator[torch.dtype]:
        with torch.autocast(CPU):
            yield mm_dtype()
            yield mm_dtype()

    async def main() -> None:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for dtype in agen():
            assert dtype is OURS
            break
        abandoned.append(forever())
        abandoned[0].send(None)

    abandoned: list[Any] = []
    with leaves_no_trace():
        with contextlib.suppress(RuntimeError):
            asyncio.run(main())
        abandoned.pop().close()
    assert not autocast_methods._thread.objects
