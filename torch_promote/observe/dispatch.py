"""Shows an observer each call of an op before autocast sees it, and the results of the call.

An observer sees the calls of its thread, and of the threads in which autograd runs the thread's backward. It sees a
composite op, then the ops that the composite calls; an op that autocast casts, then the casts and the op on the cast
arguments. Without an observer, ops cost nothing more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torch_promote import _C
from torch_promote.errors import DispatchObserverError
from torch_promote.integrations.compile import skip_frames
from torch_promote.loader import let_operators_fall_through


@dataclass(slots=True, eq=False)
class _Tokens:
    """The token of a call that several observers see."""

    open: list[tuple[Any, Any]]  # the observers that have begun the call and not ended it, with their tokens
    blinded: list[int]  # the ids of the observers that do not see what the call calls in turn
    stock_too: bool = False
    see_through: bool = False
    real_results: bool = False


class _Blind(threading.local):
    """The ids of the observers that do not see the calls that a thread makes now."""

    def __init__(self) -> None:
        self.ids: list[int] = []


class SeveralObservers:
    """Passes each call on to several observers, to the outermost first, and its end in the other order.

    At most one of them may ask for runs under stock autocast.
    """

    def __init__(self, observers: Sequence[Any]) -> None:
        self.observers: tuple[Any, ...] = tuple(observers)
        self._blind = _Blind()

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> _Tokens | None:
        """The call begins."""
        blind = self._blind.ids
        tokens = _Tokens([], [])
        for observer in self.observers:
            if id(observer) in blind:
                continue
            try:
                token = observer.begin(op, args)
            except BaseException:
                tokens.blinded.clear()
                self.failed(tokens)
                raise
            if token is not None:
                tokens.open.append((observer, token))
                tokens.stock_too |= token.stock_too
                tokens.real_results |= getattr(token, "real_results", False)
            if token is not None and token.see_through:
                tokens.see_through = True
            else:
                tokens.blinded.append(id(observer))
        if not tokens.open:
            return None
        blind.extend(tokens.blinded)
        return tokens

    def before_stock(self, tokens: _Tokens) -> list[Any]:
        """The run under stock autocast begins."""
        observer, token = next(one for one in tokens.open if one[1].stock_too)
        return observer.before_stock(token)  # type: ignore[no-any-return]

    def after_stock(self, tokens: _Tokens, results: list[Any], error: str | None) -> None:
        """The run under stock autocast has ended."""
        observer, token = next(one for one in tokens.open if one[1].stock_too)
        observer.after_stock(token, results, error)

    def end(self, tokens: _Tokens, results: list[Any]) -> None:
        """The call has ended."""
        self._see_again(tokens)
        while tokens.open:
            observer, token = tokens.open[-1]
            observer.end(token, results)
            tokens.open.pop()  # of one that raises, `failed` is called, too

    def failed(self, tokens: _Tokens) -> None:
        """The call, or an observer, has raised."""
        self._see_again(tokens)
        while tokens.open:
            observer, token = tokens.open.pop()
            observer.failed(token)

    def _see_again(self, tokens: _Tokens) -> None:
        blind = self._blind.ids
        while tokens.blinded:
            blind.remove(tokens.blinded.pop())


_KEY = torch._C._dispatch_key_parse(_C.DISPATCH_OBSERVER_KEY)


class Token(Protocol):
    """An observer's handle for a call.

    If it has a true attribute `real_results`, `end` gets the results that the caller gets, on which hooks can be put.
    Otherwise those that are new to Python are copies that share the data.
    """

    stock_too: bool  # whether the call runs under PyTorch's own autocast first, and then as it is
    see_through: bool  # whether the observer sees the ops that the call makes in turn


class Observer(Protocol):
    """The methods are called in the thread of the op. An error that they raise reaches the op's caller.

    An observer whose tokens ask for a run under stock autocast has two more methods: `before_stock(token)` returns for
    each argument None, or the value for that run in its place (a copy, if the op writes to it);
    `after_stock(token, results, error)` gets the results, or the text of the error that the run raised.

    If blocks are nested, each observer sees the calls; of those with an attribute `innermost_only` that is true, and of
    one class, only the innermost.
    """

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Token | None:
        """The call begins. None ignores it and the ops that it calls. A wrapped number is a Python number."""

    def end(self, token: Any, results: list[Any]) -> None:
        """The call has ended, with these results, in the schema's order."""

    def failed(self, token: Any) -> None:
        """The call, or another method of the observer, has raised."""


@contextlib.contextmanager
def observe_dispatch(observer: Observer) -> Iterator[None]:
    """Shows an observer the calls of this thread. The observers of blocks around this one see them, too."""
    try:
        _C.register_dispatch_observer()
    except RuntimeError as error:
        raise DispatchObserverError(
            f"the dispatch key {_C.DISPATCH_OBSERVER_KEY}, which crosscheck and trace need, is taken in this "
            f"process: another library has registered a fallback on it. Run them in a process without that "
            f"library. PyTorch says: {error}"
        ) from error
    let_operators_fall_through(_C.DISPATCH_OBSERVER_KEY)
    _keep_from_dynamo(type(observer))
    _keep_from_dynamo(SeveralObservers)
    skip_frames(_end)
    # In one generator, since torch.compile does not trace generators: a compiled function may open a block.
    thread, begun = _thread, False
    try:
        if not thread.observers:
            thread.outside = _C.swap_observer(None), torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        thread.observers.append(observer)
        _C.swap_observer(_all_of(thread.outside[0], thread.observers))
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
        begun = True
        yield
    finally:
        _end(observer, begun)


def _end(observer: Observer, begun: bool) -> None:
    thread = _thread
    left = [one for one in thread.observers if one is not observer]
    if begun and len(left) == len(thread.observers):
        raise DispatchObserverError(
            "a block of crosscheck, trace or find_nonfinite ended in another thread than the one that entered it, "
            "where it is still open. End it in the thread that entered it. Each thread needs a block of its own."
        )
    _C.swap_observer(_all_of(thread.outside[0], left))
    if not left:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, thread.outside[1])
        thread.outside = (None, False)
    thread.observers = left


def _keep_from_dynamo(kind: type) -> None:
    """After a graph break, torch.compile would compile an observer's methods when an op calls them."""
    methods = (getattr(kind, name, None) for name in ("begin", "before_stock", "after_stock", "end", "failed"))
    skip_frames(*(method for method in methods if hasattr(method, "__code__")))


def _all_of(outside: Any, observers: list[Any]) -> Any:
    """The observer that shows the calls to those outside of the thread's blocks and to those of the blocks."""
    around = outside.observers if isinstance(outside, SeveralObservers) else [] if outside is None else [outside]
    found: list[Any] = []
    for one in reversed([*around, *observers]):
        if not (getattr(one, "innermost_only", False) and any(type(other) is type(one) for other in found)):
            found.insert(0, one)
    return found[0] if len(found) == 1 else SeveralObservers(found) if found else None


@dataclass
class _Observers(threading.local):
    """The observers of a thread. Blocks of asyncio tasks may end in any order."""

    observers: list[Observer] = field(default_factory=list)
    outside: tuple[Any, bool] = (None, False)  # the observer and the key's state outside of all blocks


_thread = _Observers()
