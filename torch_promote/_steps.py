"""Regions and code that runs in steps: coroutines, generators, asyncio tasks.

Autocast state belongs to a thread. A body that is suspended in the middle of a region would leave that region to
whatever the thread runs next. So between steps the regions are taken off the thread, and put back for the next step.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch_promote import _C

__all__ = ["Steps", "drive", "guard_tasks"]

_T = TypeVar("_T")


def drive(region: AbstractContextManager[Any], body: Any) -> Generator[Any, Any, Any]:
    """Runs a generator-like body so that `region`, and regions that the body itself opens, hold in its steps only.

    Args:
        region: Entered before the first step and left after the last.
        body: A generator, a coroutine, or an awaitable of an async generator: anything with send, throw and close.

    Returns:
        A generator that yields, receives, raises and returns what the body does.
    """
    base = _C.depth()
    region.__enter__()
    step: Callable[[], Any] = lambda: body.send(None)  # noqa: E731
    while True:
        try:
            item = step()
        except StopIteration as stop:
            region.__exit__(None, None, None)
            return stop.value
        except BaseException:
            region.__exit__(None, None, None)
            raise
        suspended = _C.suspend_regions(base)
        try:
            sent = yield item
        except BaseException as error:  # GeneratorExit too: the body's clean-up is one more step
            step = _throw(body, error)
        else:
            step = _send(body, sent)
        base = _C.depth()
        _C.resume_regions(suspended)


def _send(body: Any, value: Any) -> Callable[[], Any]:
    return lambda: body.send(value)


def _throw(body: Any, error: BaseException) -> Callable[[], Any]:
    return lambda: body.throw(error)


class Steps(Awaitable[_T]):
    """Awaits a coroutine, or another object with send and throw, in a region that holds in its steps only."""

    def __init__(self, region: AbstractContextManager[Any], body: Any) -> None:
        self._region = region
        self._body = body

    def __await__(self) -> Generator[Any, Any, _T]:
        return drive(self._region, self._body)


# --- a plain `with my_autocast()` held across an await, in asyncio's own event loops

_suspended: weakref.WeakKeyDictionary[asyncio.Task[Any], _C.SuspendedRegions] = weakref.WeakKeyDictionary()
_original_run: Callable[[asyncio.Handle], None] | None = None


def guard_tasks() -> None:
    """Has asyncio take a task's open regions off the thread whenever one of its steps ends.

    Called when a region is entered while an event loop runs; from then on every callback of asyncio's loops is looked
    at (two comparisons where no region is open). There is no public hook between a task's steps before Python 3.14, so
    this wraps `asyncio.Handle._run`, the one place from which asyncio's loops run them. Loops that do not use it
    (uvloop, trio) are not covered: decorate the coroutine instead.
    """
    global _original_run
    if _original_run is None:
        _original_run = asyncio.Handle._run
        asyncio.Handle._run = _run_step  # type: ignore[assignment,method-assign]


def _run_step(handle: asyncio.Handle) -> None:
    assert _original_run is not None
    base = _C.depth()
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    if not isinstance(task, asyncio.Task):
        return _original_run(handle)
    suspended = _suspended.pop(task, None)
    if suspended is not None:
        _C.resume_regions(suspended)
    try:
        _original_run(handle)
    finally:
        if _C.depth() > base:
            regions = _C.suspend_regions(base)
            if not task.done():
                _suspended[task] = regions
