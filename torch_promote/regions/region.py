"""`Region`: the base class of `my_autocast` and `promotion`.

The extension stores the thread's open regions (csrc/region/region.cpp), and has the methods that enter and leave one
(csrc/python/region_bindings.cpp).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, ParamSpec, TypeVar

from torch_promote import _C
from torch_promote._C import RUNNING_LOOP, TORCH_FUNCTION_MODE, WATCHED, HeldChange, RegionBase
from torch_promote.errors import RegionError, body_of, check_decorated
from torch_promote.extension import fork_safe_lock
from torch_promote.integrations.asyncio_tasks import guard_tasks, place_of_regions
from torch_promote.integrations.compile import skip_frames
from torch_promote.integrations.export import record_enter, record_exit

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Steps:
    """A context manager that runs each step of one body in a region.

    Autocast state belongs to a thread: a body that is suspended in the middle of a region would leave it open for the
    code that the thread runs next. So the regions, also those that the body opens itself and holds across steps, are
    suspended after each step, and resumed for the next one. After the last step, no region is left to end.
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
    """Runs a generator, a coroutine or another object with send, throw and close, with each of its steps in `steps`.

    The generator that it returns yields, receives, raises and returns the same values.
    """
    step = functools.partial(body.send, None)
    while True:
        try:
            with steps:
                item = step()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except BaseException as error:  # includes GeneratorExit: the body's clean-up is another step
            step = functools.partial(body.throw, error)
        else:
            step = functools.partial(body.send, sent)


#: The same as a coroutine, for a coroutine or an awaitable of an asynchronous generator.
_drive_asynchronously = types.coroutine(drive)


def decorate(region: AbstractContextManager[Any], func: Any) -> Any:
    """Returns a function that runs `func` in `region`. Of a coroutine or generator, each step runs in the region."""
    body = body_of(func)
    wrapper: Any
    if inspect.iscoroutinefunction(body):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            steps = Steps(region)
            try:
                return await _drive_asynchronously(steps, func(*args, **kwargs))
            finally:
                steps.end()

    elif inspect.isasyncgenfunction(body):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            generator = func(*args, **kwargs)
            steps = Steps(region)
            step = generator.asend(None)
            try:
                while True:
                    try:
                        item: Any = await _drive_asynchronously(steps, step)
                    except StopAsyncIteration:
                        return
                    try:
                        step = generator.asend((yield item))
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = generator.athrow(error)
            finally:
                try:
                    await _drive_asynchronously(steps, generator.aclose())
                finally:
                    steps.end()

    elif inspect.isgeneratorfunction(body):

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            steps = Steps(region)
            try:
                return (yield from drive(steps, func(*args, **kwargs)))
            finally:
                steps.end()

        if inspect.isfunction(func) and func.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE:
            wrapper = types.coroutine(wrapper)

    else:

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with region:
                return func(*args, **kwargs)

    # If torch.jit compiles a function with this attribute, it raises the text.
    wrapper.__script_unsupported = "@my_autocast() decorator is not supported in script mode"
    return wrapper


Watcher = Callable[[object], None]
"""A function that receives the owner of a region that has been entered: a `my_autocast` object, or, under `install`, a
torch.autocast object. It is called in the region's thread, from within `__enter__`, and must not raise."""

_lock = fork_safe_lock()
_watchers: list[Watcher] = []


@contextmanager
def watch_regions(watcher: Watcher) -> Iterator[None]:
    """Calls a watcher for each region that any thread enters during a block, except for regions of graphs."""
    skip_frames(_remove)
    with _lock:
        _watchers.append(watcher)
        _C.set_regions_watched(True)
    try:
        yield
    finally:
        _remove(watcher)


def _remove(watcher: Watcher) -> None:
    with _lock:
        _watchers.remove(watcher)
        _C.set_regions_watched(bool(_watchers))


def tell_watchers(owner: object) -> None:
    """Notifies the watchers that a region has been entered."""
    for watcher in tuple(_watchers):
        watcher(owner)


class Region(RegionBase):
    """A region with a packed `RegionSpec`: a context manager and a decorator."""

    __slots__ = ("__weakref__", "_held")

    _held: HeldChange  # keeps the policy change registered whose number is in _packed, if there is one

    #: Called with each subclass once Dynamo is imported, to make it traceable.
    when_subclassed: ClassVar[Callable[[type[Region]], None] | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Region.when_subclassed is not None:
            Region.when_subclassed(cls)

    def __init__(self, packed: str) -> None:
        self._packed = packed

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates a callable; see the class. Its signature stays, also that of a coroutine function or generator."""
        check_decorated(f"with {type(self).__name__}(...):", func, may_suspend=True)
        decorated: Callable[_P, _R] = decorate(self, func)
        return decorated

    def _entered(self, flags: int) -> None:
        """Tells the event loop, torch.export's modes and traces that the region has been entered."""
        if flags & RUNNING_LOOP:
            guard_tasks()
        if flags & TORCH_FUNCTION_MODE:
            record_enter(self._packed)
        if flags & WATCHED:
            tell_watchers(self)

    def _exited(self, flags: int, kind: type[BaseException] | None) -> None:
        """Tells the modes of torch.export that the region has ended. Raises if it was not open."""
        if flags < 0:
            if kind is not GeneratorExit:  # which closes a body between two steps, when its regions are suspended
                raise RegionError(f"{self!r} is not open in {place_of_regions()}")
        elif flags & TORCH_FUNCTION_MODE:
            record_exit(self._packed)
