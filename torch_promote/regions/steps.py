"""Regions in code that runs in steps: coroutines, generators, asyncio tasks.

Autocast state belongs to a thread. A body that is suspended in the middle of a region would leave the region open for
the code that the thread runs next. So this module suspends the regions between steps, and resumes them for the next
step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch_promote import _C

__all__ = ["Awaited", "Steps", "drive"]

_T = TypeVar("_T")


class Steps:
    """A context manager that runs each step of one body in a region.

    Regions that the body opens itself and holds across steps are suspended and resumed together with it. After the last
    step, no region is left to end.
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

    def end(self) -> None:
        """Drops the suspended regions and their casts.

        Call it after the last step: the traceback of an error may keep this object alive for a long time.
        """
        self._suspended = None


def drive(steps: Steps, body: Any) -> Generator[Any, Any, Any]:
    """Runs a generator-like body, with each of its steps in `steps`.

    Args:
        steps: The region, used only for this body.
        body: A generator, a coroutine, or an awaitable of an async generator: anything with send, throw and close.

    Returns:
        A generator that yields, receives, raises and returns the same values as the body.
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
        except BaseException as error:  # includes GeneratorExit: the body's clean-up is another step
            step = _throw(body, error)
        else:
            step = _send(body, sent)


def _send(body: Any, value: Any) -> Callable[[], Any]:
    return lambda: body.send(value)


def _throw(body: Any, error: BaseException) -> Callable[[], Any]:
    return lambda: body.throw(error)


class Awaited(Awaitable[_T]):
    """Awaits a coroutine, or another object with send and throw, with each of its steps in `steps`."""

    def __init__(self, steps: Steps, body: Any) -> None:
        self._steps = steps
        self._body = body

    def __await__(self) -> Generator[Any, Any, _T]:
        return drive(self._steps, self._body)
