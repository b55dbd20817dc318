"""Suspends the open regions of an asyncio task at each await, so that they do not affect other tasks."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch_promote import _C

_suspended: weakref.WeakKeyDictionary[asyncio.Task[Any], _C.SuspendedRegions] = weakref.WeakKeyDictionary()


_original_run: Callable[[asyncio.Handle], None] | None = None


class _Thread(threading.local):
    guarded = False
    """Set while `_run_step` runs a callback in this thread."""
    unguarded: tuple[asyncio.Task[Any], int] | None = None
    """A task that opened a region in a step not started by `_run_step`, and the number of open regions before it."""


_thread = _Thread()


def guard_tasks() -> None:
    """Makes asyncio suspend a task's open regions whenever one of its steps ends."""
    # Python before 3.14 has no public hook between a task's steps, so this replaces `asyncio.Handle._run`, which runs
    # all callbacks. Loops that do not use it (uvloop, trio) are not covered: decorate the coroutine instead.
    global _original_run
    if _thread.guarded:
        return
    if _original_run is None:
        _original_run = asyncio.Handle._run
        asyncio.Handle._run = _run_step  # type: ignore[assignment,method-assign]
    # The running step started without the guard; `_run_step` notices its end at the start of the next step.
    task = asyncio.current_task()
    if task is not None and _thread.unguarded is None:
        _thread.unguarded = task, _C.depth() - 1


def _run_step(handle: asyncio.Handle) -> None:
    assert _original_run is not None
    if _thread.unguarded is not None:
        _suspend(*_thread.unguarded)
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
        _suspend(task, base)


def _suspend(task: asyncio.Task[Any], base: int) -> None:
    if _C.depth() > base:
        regions = _C.suspend_regions(base)
        if not task.done():
            _suspended[task] = regions


def place_of_regions() -> str:
    """Returns what holds the open regions here, a task or the thread, as the end of an error about another one's."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    if task is None:
        return (
            "this thread, so it cannot be ended here. A region belongs to the thread that entered it; enter one in "
            "each thread."
        )
    return (
        f"the asyncio task {task.get_name()!r}, so it cannot be ended here. A region belongs to the task that entered "
        f"it: end it in that task, or decorate the coroutine with the region."
    )
