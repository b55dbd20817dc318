"""The end of a region in another asyncio task than the one that entered it."""

from __future__ import annotations

import asyncio

import pytest

import torch_promote as tp
from helpers.subprocesses import output_of


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


def test_an_error_of_a_replaced_event_loop_function_opens_no_region() -> None:
    """The package keeps the function that asyncio has during the import."""
    program = """
        import asyncio

        def get_running_loop():
            if fails:
                raise RuntimeError("no loops here")

        asyncio._get_running_loop = get_running_loop
        fails = False
        import torch
        import torch_promote as tp

        region = tp.my_autocast("cpu")
        with region:
            print(torch.is_autocast_enabled("cpu"))
        fails = True
        try:
            region.__enter__()
        except RuntimeError as error:
            print(error, torch.is_autocast_enabled("cpu"), tp._C.depth())
    """
    assert output_of(program) == "True\nno loops here False 0\n"
