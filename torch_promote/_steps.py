"""Regions and code that runs in steps: coroutines, generators, asyncio tasks.

Autocast state belongs to a thread. A body that is suspended in the middle of a region would leave that region to
whatever the thread runs next. So between steps the regions are taken off the thread, and put back for the next step.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch_promote import _C

__all__ = ["Awaited", "Steps", "drive", "guard_tasks"]

_T = TypeVar("_T")


class Steps:
    """A region that is on the thread only while a step of one body runs: a context manager to put around each step.

    What regions the body opens itself and holds across its steps goes off and on with it. After the last step there is
    nothing to end.
    """

    def __init__(self, region: AbstractContextManager[Any]) -> None:
        self._region = region
        self._base = 0
        self._suspended: _C.SuspendedRegions | None = None

    def __enter__(self) -> None:
        self._base = _C.depth()
        if self._suspended is None:
            self._region.__enter__()
        else:
            _C.resume_regions(self._suspended)

    def __exit__(self, *error: object) -> None:
        self._suspended = _C.suspend_regions(self._base)


def drive(steps: Steps, body: Any) -> Generator[Any, Any, Any]:
    """Runs a generator-like body, each of its steps in `steps`.

    Args:
        steps: The region, for this body alone.
        body: A generator, a coroutine, or an awaitable of an async generator: anything with send, throw and close.

    Returns:
        A generator that yields, receives, raises and returns what the body does.
    """
    step: Callable[[], Any] = _send(body, None)
    while True:
        try:
            with steps:
                item = step()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except BaseException as error:  # GeneratorExit too: the body's clean-up is one more step
            step = _throw(body, error)
        else:
            step = _send(body, sent)


def _send(body: Any, value: Any) -> Callable[[], Any]:
    return lambda: body.send(value)


def _throw(body: Any, error: BaseException) -> Callable[[], Any]:
    return lambda: body.throw(error)


class Awaited(Awaitable[_T]):
    """Awaits a coroutine, or another object with send and throw, each of its steps in `steps`."""

    def __init__(self, steps: Steps, body: Any) -> None:
        self._steps = steps
        self._body = body

    def __await__(self) -> Generator[Any, Any, _T]:
        return drive(self._steps, self._body)


# --- a plain `with my_autocast()` held across an await, in asyncio's own event loops

_suspended: weakref.WeakKeyDictionary[asyncio.Task[Any], _C.SuspendedRegions] = weakref.WeakKeyDictionary()
_original_run: Callable[[asyncio.Handle], None] | None = None


class _Thread(threading.local):
    guarded = False
    """The callback that runs in this thread was started by `_run_step`."""
    unguarded: tuple[asyncio.Task[Any], int] | None = None
    """A task that opened a region in a step that was not, and how many regions were open before."""


_thread = _Thread()


def guard_tasks() -> None:
    """Has asyncio take a task's open regions off the thread whenever one of its steps ends.

    Called when a region is entered while an event loop runs; from then on every callback of asyncio's loops is looked
    at. There is no public hook between a task's steps before Python 3.14, so this wraps `asyncio.Handle._run`, the one
    place from which asyncio's loops run them. Loops that do not use it (uvloop, trio) are not covered: decorate the
    coroutine instead.
    """
    global _original_run
    if _thread.guarded:
        return
    if _original_run is None:
        _original_run = asyncio.Handle._run
        asyncio.Handle._run = _run_step  # type: ignore[assignment,method-assign]
    # The step that runs now began without the guard; its end is seen when the next one begins.
    task = asyncio.current_task()
    if task is not None and _thread.unguarded is None:
        _thread.unguarded = task, _C.depth() - 1


def _run_step(handle: asyncio.Handle) -> None:
    assert _original_run is not None
    if _thread.unguarded is not None:
        _take_off(*_thread.unguarded)
        _thread.unguarded = None
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    if not isinstance(task, asyncio.Task):
        return _original_run(handle)
    base = _C.depth()
    suspended = _suspended.pop(task, None)
    if suspended is not None:
        _C.resume_regions(suspended)
    outer, _thread.guarded = _thread.guarded, True
    try:
        _original_run(handle)
    finally:
        _thread.guarded = outer
        _take_off(task, base)


def _take_off(task: asyncio.Task[Any], base: int) -> None:
    if _C.depth() > base:
        regions = _C.suspend_regions(base)
        if not task.done():
            _suspended[task] = regions
