"""Blocks that end in another order or another thread, and threads that used a block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.crosscheck_state import is_on, off_before_and_after
from helpers.subprocesses import run_python
from torch_promote.observe.dispatch import DispatchObserverError

__all__ = ["off_before_and_after"]  # a fixture

SIN, COS, TAN = "aten.sin.default", "aten.cos.default", "aten.tan.default"


def block(report_to: list[tp.CrosscheckReport]) -> Iterator[None]:
    """A block that is open between two steps."""
    with tp.crosscheck() as report:
        report_to.append(report)
        yield


def test_generators_that_end_in_another_order() -> None:
    reports: list[tp.CrosscheckReport] = []
    first, second = block(reports), block(reports)
    next(first), next(second)
    x = torch.ones(2)
    next(first, None)
    assert is_on()
    x.sin()  # of the block that is still open
    next(second, None)
    assert not is_on()
    x.cos()
    assert reports[1].checked[SIN] == 1
    assert all(report.checked[COS] == 0 for report in reports)


def test_the_block_around_still_sees_its_calls() -> None:
    reports: list[tp.CrosscheckReport] = []
    x = torch.ones(2)
    with tp.crosscheck() as outer:
        first, second = block(reports), block(reports)
        next(first), next(second)
        x.sin()
        next(first, None), next(second, None)
        x.cos()
    assert reports[1].checked[SIN] == 1
    assert outer.checked[COS] == 1


def test_the_block_around_may_end_first() -> None:
    reports: list[tp.CrosscheckReport] = []
    outer, inner = block(reports), block(reports)
    next(outer), next(inner)
    next(outer, None)
    torch.ones(2).sin()
    with tp.crosscheck() as another:
        torch.ones(2).cos()
    torch.ones(2).tan()
    next(inner, None)
    assert another.checked[COS] == 1
    assert (reports[1].checked[SIN], reports[1].checked[COS], reports[1].checked[TAN]) == (1, 1, 1)


def test_mismatches_of_interleaved_blocks_reach_the_enclosing_block() -> None:
    reports: list[tp.CrosscheckReport] = []
    with tp.crosscheck() as around:
        first, second = block(reports), block(reports)
        next(first), next(second)
        torch.ones(2).sin()
        next(first, None)
        torch.ones(2).cos()
        next(second, None)
        torch.ones(2).tan()
    assert (reports[1].checked[SIN], reports[1].checked[COS]) == (1, 1)
    assert (around.checked[SIN], around.checked[COS], around.checked[TAN]) == (1, 1, 1)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_tasks(first_to_end: int) -> None:
    async def work(index: int, begun: list[asyncio.Event], over: list[asyncio.Event]) -> None:
        with tp.crosscheck():
            begun[index].set()
            await begun[1 - index].wait()
            if index != first_to_end:
                await over[1 - index].wait()
        over[index].set()

    async def both() -> None:
        begun, over = ([asyncio.Event() for _ in range(2)] for _ in range(2))
        await asyncio.gather(work(0, begun, over), work(1, begun, over))

    asyncio.run(both())
    assert not is_on()
    with tp.crosscheck() as outer:
        asyncio.run(both())
        assert is_on()
        torch.ones(2).sin()
    assert outer.checked[SIN] == 1


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Returns or raises the result of a function that ran in a separate thread, which has ended."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def ended_too_far_away(*, inside_its_own: bool) -> tuple[tp.CrosscheckReport, tp.CrosscheckReport]:
    """Enters a block whose end is tried in another thread. The reports of this thread's block and of the other's."""
    here = tp.crosscheck()
    report = here.__enter__()

    def end_it() -> None:
        with pytest.raises(DispatchObserverError, match="was not entered in this thread, so it cannot end here"):
            here.__exit__(None, None, None)

    def elsewhere() -> tp.CrosscheckReport:
        if not inside_its_own:
            end_it()
        assert not is_on()
        with tp.crosscheck() as own:
            if inside_its_own:
                end_it()
            assert is_on()
            torch.ones(2).sin()
        assert not is_on()
        return own

    own = in_a_thread(elsewhere)
    assert is_on()
    torch.ones(2).cos()
    here.__exit__(None, None, None)
    assert not is_on()
    return report, own


@pytest.mark.parametrize("inside_its_own", [False, True])
def test_a_block_that_is_ended_in_another_thread(inside_its_own: bool) -> None:
    report, own = ended_too_far_away(inside_its_own=inside_its_own)
    assert (own.checked[SIN], own.checked[COS]) == (1, 0)
    assert (report.checked[SIN], report.checked[COS]) == (0, 1)


def test_it_cannot_be_used_as_a_decorator() -> None:
    def step() -> None:
        pytest.fail("it ran")

    with pytest.raises(
        tp.errors.DecoratorError, match=r"^crosscheck is not a decorator: the caller could not read its report\."
    ):
        tp.crosscheck(level="bits")(step)


#: Threads that are over, and whose last objects go when Python is gone.
THREADS = """
import threading
import torch, torch_promote as tp

def work(level):
    with tp.crosscheck(level=level) as report, tp.my_autocast("cpu"):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert report.checked.total() and report.ok

for level in ("dtype", "bits"):
    threads = [threading.Thread(target=work, args=(level,)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print("done")
"""


@pytest.mark.parametrize("attempt", range(3))
def test_threads_that_used_one_do_not_abort_the_process_at_its_end(attempt: int) -> None:
    process = run_python(THREADS, quiet=True, finalize=True)
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr
