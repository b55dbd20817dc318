"""Several observers of one thread: each sees what it would see alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["SeveralObservers"]


@dataclass(slots=True, eq=False)
class _Tokens:
    """The token of a call that several observers see.

    Attributes:
        open: The observers that have begun the call and not ended it, with their tokens.
        blinded: The ids of the observers that do not see what the call calls in turn.
    """

    open: list[tuple[Any, Any]]
    blinded: list[int]
    stock_too: bool = False
    see_through: bool = False
    real_results: bool = False


class SeveralObservers:
    """Passes each call on to several observers, to the outermost first, and its end in the other order.

    Args:
        observers: The observers, the outermost first. At most one of them may ask for runs under stock autocast.
    """

    def __init__(self, observers: Sequence[Any]) -> None:
        self.observers = tuple(observers)
        self._threads = threading.local()

    def _blind(self) -> list[int]:
        """The ids of the observers that do not see the calls that this thread makes now."""
        blind: list[int] | None = getattr(self._threads, "blind", None)
        if blind is None:
            blind = self._threads.blind = []
        return blind

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> _Tokens | None:
        """The call begins."""
        blind = self._blind()
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
        observer, token = self._who_compares(tokens)
        return observer.before_stock(token)  # type: ignore[no-any-return]

    def after_stock(self, tokens: _Tokens, results: list[Any], error: str | None) -> None:
        """The run under stock autocast has ended."""
        observer, token = self._who_compares(tokens)
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
        blind = self._blind()
        while tokens.blinded:
            blind.remove(tokens.blinded.pop())

    @staticmethod
    def _who_compares(tokens: _Tokens) -> tuple[Any, Any]:
        return next((observer, token) for observer, token in tokens.open if token.stock_too)
