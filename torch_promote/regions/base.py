"""`Region`: the base class of `my_autocast` and `promotion`.

The extension stores the thread's open regions (csrc/region/region.cpp). csrc/python/region_bindings.cpp, NOTE
[ Regions in Python and in C ], explains why these methods are in Python.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from torch_promote._C import (
    RUNNING_LOOP,
    TORCH_FUNCTION_MODE,
    UNCHECKED_RANKS,
    WATCHED,
    HeldChange,
    enter_region,
    exit_region,
    undo_enter,
)
from torch_promote.errors import DecoratorError, RegionError
from torch_promote.integrations.asyncio_tasks import guard_tasks, place_of_regions
from torch_promote.integrations.export import record_enter, record_exit
from torch_promote.integrations.ranks import compare_ranks
from torch_promote.native.interrupts import without_interrupt_at_start
from torch_promote.regions.decorate import decorate
from torch_promote.regions.watching import tell_watchers

__all__ = ["Region"]


class Region:
    """A region with a packed spec: a context manager and a decorator.

    Args:
        packed: A packed `RegionSpec`.
    """

    __slots__ = ("__weakref__", "_held", "_packed")

    _held: HeldChange  # keeps the policy change registered whose number is in _packed, if there is one

    def __init__(self, packed: str) -> None:
        self._packed = packed

    def __enter__(self) -> Self:
        try:
            surroundings = enter_region(self, self._packed)
            if surroundings:
                self._tell_surroundings(surroundings)
        except BaseException:  # includes one from a signal handler, right after the call
            undo_enter(self)
            raise
        return self

    @without_interrupt_at_start
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        surroundings = exit_region(self)
        if surroundings:
            if surroundings > 0:
                self._tell_end(surroundings, kind is None)
            elif kind is not GeneratorExit:  # which closes a body between two steps, when its regions are suspended
                raise RegionError(f"{self!r} is not open in {place_of_regions()}")

    def __call__(self, func: Any) -> Any:
        """Decorates a callable; see the class."""
        if not callable(func):
            name = type(self).__name__
            raise DecoratorError(
                f"{name}(...) decorates a callable, got {type(func).__name__}. Decorate a function, or use it as a "
                f"context manager: `with {name}(...):`."
            )
        return decorate(self, func)

    def _tell_end(self, surroundings: int, returned: bool) -> None:
        """Tells the modes of torch.export that the region has ended, by an exception or not (`returned`)."""
        if surroundings & TORCH_FUNCTION_MODE:
            record_exit(self._packed)

    def _tell_surroundings(self, surroundings: int) -> None:
        """Notifies other ranks, the event loop, torch.export's modes and traces that the region was entered."""
        if surroundings & UNCHECKED_RANKS:
            compare_ranks(self)
        if surroundings & RUNNING_LOOP:
            guard_tasks()
        if surroundings & TORCH_FUNCTION_MODE:
            record_enter(self._packed)
        if surroundings & WATCHED:
            tell_watchers(self)
