"""The tap: shows an observer each call of an op before autocast has its turn, and its results.

The calls are those of this thread, and of the threads in which autograd runs this thread's backward. An observer sees
a composite op and then the ops that it calls, an op that autocast wraps and then the casts and the op that runs.
Nobody pays for the tap while it is off.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torch_promote import _C
from torch_promote.errors import TorchPromoteError
from torch_promote.integrations.higher_order import pass_over

__all__ = ["Observer", "TapError", "Token", "tapped"]

_KEY = torch._C._dispatch_key_parse(_C.dispatch_observer_key())


class TapError(TorchPromoteError, RuntimeError):
    """The tap cannot be used in this process."""


class Token(Protocol):
    """What an observer gives for a call, and gets back at its end.

    Attributes:
        stock_too: Whether the call is to be made under PyTorch's own autocast too, before it is made as it is.
        see_through: Whether the ops that the call makes in turn are to be seen.
    """

    stock_too: bool
    see_through: bool


class Observer(Protocol):
    """What the tap calls, in the thread of the call. What it raises is raised by the op's caller."""

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Token | None:
        """A call starts.

        Args:
            op: The overload.
            args: All its arguments, in the schema's order. A number that stands for a tensor is a Python number.

        Returns:
            A token, or None for a call of which no more is to be seen, nor of what is inside.
        """

    def before_stock(self, token: Any) -> list[Any]:
        """The call is about to be made under stock autocast.

        Returns:
            For each argument None, or what the call is to get in its place: a copy of what the op writes to.
        """

    def after_stock(self, token: Any, results: list[Any], error: str | None) -> None:
        """The call under stock autocast is over; `error` is the text of what it raised."""

    def end(self, token: Any, results: list[Any]) -> None:
        """The call is over, with the results in the schema's order."""

    def failed(self, token: Any) -> None:
        """The call has raised, or the observer has."""


@contextlib.contextmanager
def tapped(observer: Observer) -> Iterator[None]:
    """Has an observer see this thread's calls. Where taps are nested, the innermost observer sees them alone.

    Args:
        observer: What to call.

    Raises:
        TapError: Another library holds the dispatch key that the tap needs.

    Example:
        >>> class Names:
        ...     def __init__(self):
        ...         self.names = []
        ...
        ...     def begin(self, op, args):
        ...         self.names.append(str(op))
        >>> with tapped(names := Names()):
        ...     _ = torch.ones(2) * 2
        >>> [name for name in names.names if "mul" in name]
        ['aten.mul.Tensor']
    """
    try:
        _C.register_dispatch_observer()
    except RuntimeError as error:
        raise TapError(
            f"the dispatch key {_C.dispatch_observer_key()}, which has no kernels in PyTorch, has a fallback of "
            f"another library's in this process; crosscheck cannot work beside that library. PyTorch said: {error}"
        ) from error
    pass_over(_C.dispatch_observer_key())
    # All of it is here, in a generator, because torch.compile leaves these alone: a compiled function may open a block.
    taps = _taps
    before = _C.swap_observer(observer)
    if not taps.observers:
        taps.outside = before, torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    taps.observers.append(observer)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    try:
        yield
    finally:
        left = [one for one in taps.observers if one is not observer]
        if len(left) == len(taps.observers):
            raise TapError(
                "a crosscheck was ended in another thread than it began in, where it is still open. End it in the "
                "thread that entered it; open one in each thread."
            )
        taps.observers = left
        _C.swap_observer(left[-1] if left else taps.outside[0])
        if not left:
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, taps.outside[1])
            taps.outside = (None, False)


@dataclass
class _Taps(threading.local):
    """The taps that are open in a thread. Those of asyncio's tasks need not end in the order in which they began."""

    observers: list[Observer] = field(default_factory=list)
    outside: tuple[Any, bool] = (None, False)  # the observer and the key's state where none of them is open


_taps = _Taps()
