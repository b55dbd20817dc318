"""The blocks of functions that yield a report, such as `trace`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch_promote.errors import RegionError

__all__ = ["block"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Block(contextlib._GeneratorContextManager[_R, None, None]):
    """The block of a report. Whoever takes it for the report, or opens it again, is told what to write."""

    def __enter__(self) -> _R:
        if "args" not in vars(self):  # contextlib has deleted them
            raise RegionError(f"this block was opened before. Write `{self._usage}` for each block.")
        return super().__enter__()

    @property
    def _name(self) -> str:
        return str(getattr(vars(self).get("gen"), "__name__", ""))  # a copy in the making has no attributes

    @property
    def _usage(self) -> str:
        return f"with {self._name}(...) as report:"

    def __repr__(self) -> str:
        return f"<a {self._name}, which `{self._usage}` starts>"

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"{self._name}() returns a block, which has no {name!r}. Write `{self._usage}`, and use the report."
            )


def block(function: Callable[_P, Iterator[_R]]) -> Callable[_P, _Block[_R]]:
    """Does what `contextlib.contextmanager` does, with errors for those who forget `with`, or use a block again.

    Example:
        >>> @block
        ... def counting():
        ...     yield [1]
        >>> counting()
        <a counting, which `with counting(...) as report:` starts>
    """

    @functools.wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> _Block[_R]:
        return _Block(function, args, kwargs)  # type: ignore[arg-type]

    return make
