"""The end of a region in another asyncio task than the one that entered it."""

from __future__ import annotations

import asyncio

import pytest

import torch_promote as tp


def test_the_error_names_the_task() -> None:
    region = tp.my_autocast("cpu")

    async def enter() -> None:
        region.__enter__()
        await asyncio.sleep(0.05)
        region.__exit__(None, None, None)

    async def leave() -> None:
        await asyncio.sleep(0)
        with pytest.raises(tp.errors.RegionError) as error:
            region.__exit__(None, None, None)
        assert str(error.value) == (
            "my_autocast('cpu') is not open in the asyncio task 'the other', so it cannot be ended here. A region "
            "belongs to the task that entered it: end it in that task, or decorate the coroutine with the region."
        )

    async def main() -> None:
        await asyncio.gather(enter(), asyncio.create_task(leave(), name="the other"))

    asyncio.run(main())
