"""`Region`: the base class of `my_autocast` and `promotion`.

The extension stores the thread's open regions (csrc/region/region.cpp), and has the methods that enter and leave one
(csrc/python/region_bindings.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch_promote._C import (
    RUNNING_LOOP,
    TORCH_FUNCTION_MODE,
    UNCHECKED_RANKS,
    WATCHED,
    HeldChange,
    RegionBase,
)
from torch_promote.errors import DecoratorError, RegionError
from torch_promote.integrations.asyncio_tasks import guard_tasks, place_of_regions
from torch_promote.integrations.export import record_enter, record_exit
from torch_promote.integrations.ranks import compare_ranks
from torch_promote.regions.decorate import decorate
from torch_promote.regions.watching import tell_watchers

__all__ = ["Region"]


class Region(RegionBase):
    """A region with a packed spec: a context manager and a decorator.

    Args:
        packed: A packed `RegionSpec`.
    """

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

    def __call__(self, func: Any) -> Any:
        """Decorates a callable; see the class."""
        if not callable(func):
            name = type(self).__name__
            raise DecoratorError(
                f"{name}(...) decorates a callable, got {type(func).__name__}. Decorate a function, or use it as a "
                f"context manager: `with {name}(...):`."
            )
        return decorate(self, func)

    def _entered(self, flags: int) -> None:
        """Tells other ranks, the event loop, torch.export's modes and traces that the region has been entered."""
        if flags & UNCHECKED_RANKS:
            compare_ranks(self)
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
