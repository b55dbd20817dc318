"""install and uninstall at the wrong moment: while threads open regions, after a fork."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import torch_promote as tp
from helpers.installed import ENTER, EXIT, MARKED, OURS, STOCKS
from helpers.probes import mm_dtype
from torch_promote import _C
from torch_promote.regions import autocast_methods

pytestmark = pytest.mark.usefixtures("nothing_installed")


@pytest.fixture
def nothing_is_left(nothing_installed: None) -> Iterator[None]:
    yield
    tp.uninstall()
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == (ENTER, EXIT)
    assert (_C.depth(), len(autocast_methods._thread.objects)) == (0, 0)


def open_regions() -> None:
    with torch.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False):
        pass
    region = torch.autocast("cpu")
    region.__enter__()
    region.__exit__(None, None, None)


@pytest.mark.usefixtures("nothing_is_left")
def test_changed_while_threads_open_regions() -> None:
    over, wrong = threading.Event(), []

    def work() -> None:
        while not over.is_set():
            with torch.autocast("cpu", torch.float16):
                if mm_dtype() not in (torch.float16, OURS):
                    wrong.append("inside")
            open_regions()
            if mm_dtype() is not torch.float32 or _C.depth() or torch.is_autocast_enabled("cpu"):
                wrong.append("outside")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            tp.install(**MARKED)
            tp.uninstall()
        over.set()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.usefixtures("nothing_is_left")
def test_uninstalled_while_tasks_and_generators_hold_regions() -> None:
    def steps() -> Iterator[torch.dtype]:
        with torch.autocast("cpu"):
            yield mm_dtype()
            yield mm_dtype()

    async def hold(go_on: asyncio.Event) -> torch.dtype:
        with torch.autocast("cpu"):
            await go_on.wait()
            return mm_dtype()

    async def run() -> list[torch.dtype]:
        go_on = asyncio.Event()
        tasks = [asyncio.create_task(hold(go_on)) for _ in range(2)]
        await asyncio.sleep(0)
        tp.uninstall()
        assert mm_dtype() is torch.float32
        tasks.append(asyncio.create_task(hold(go_on)))
        await asyncio.sleep(0)
        go_on.set()
        return [await task for task in tasks]

    tp.install(**MARKED)
    assert asyncio.run(run()) == [OURS, OURS, STOCKS]
    tp.install(**MARKED)
    generator = steps()
    assert next(generator) is OURS
    tp.uninstall()
    assert next(generator) is OURS
    generator.close()
