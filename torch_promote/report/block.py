"""The blocks of functions that yield a report, such as `trace`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch_promote.errors import DecoratorError, RegionError, check_decorated, refuse_arguments

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Result = TypeVar("_Result")


class ReportBlock(contextlib._GeneratorContextManager[_R, None, None]):
    """What `trace` and `find_nonfinite` return: a context manager, which yields a report.

    It decorates a function only if more is left of it than the report, which a caller of the function could not read.
    Code that takes it for the report, or opens it again, gets an error that says what to write.
    """

    def __enter__(self) -> _R:
        if "args" not in vars(self):  # contextlib has deleted them
            raise RegionError(f"this block was opened before. Write `{self._usage}` for each block.")
        return super().__enter__()

    def __call__(self, func: Callable[_P, _Result]) -> Callable[_P, _Result]:  # type: ignore[override]
        """Decorates a function: each of its calls is a block. Its signature stays.

        Raises:
            DecoratorError: It is a coroutine function or a generator function, or is not callable, or the report would
                be lost. It is a TypeError.
        """
        check_decorated(self._usage, func)
        if keeping := vars(self).get("_lost_without"):
            raise DecoratorError(
                f"{self._name}() as a decorator loses its report. Write `{self._usage}` around the call, or inside the "
                f"function. Only {self._name}({keeping}=...) decorates, which does not need the report."
            )
        return super().__call__(func)

    @property
    def _name(self) -> str:
        return str(getattr(vars(self).get("gen"), "__name__", ""))  # copy.copy looks up names first

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


def block(
    check: Callable[..., None], keeping: str = ""
) -> Callable[[Callable[_P, Iterator[_R]]], Callable[_P, ReportBlock[_R]]]:
    """Does what `contextlib.contextmanager` does, with errors for those who forget `with`, or use a block again."""
    # `check` gets the arguments by name when the block is made, and raises for those that are not legal. `keeping` is
    # the argument without which all that a block finds is in its report; "" if it is elsewhere, too.

    def decorate(function: Callable[_P, Iterator[_R]]) -> Callable[_P, ReportBlock[_R]]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def make(*args: _P.args, **kwargs: _P.kwargs) -> ReportBlock[_R]:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                refuse_arguments(function, args, kwargs)
            bound.apply_defaults()
            check(**bound.arguments)
            made: ReportBlock[_R] = ReportBlock(function, args, kwargs)  # type: ignore[arg-type]
            if keeping and not bound.arguments[keeping]:
                vars(made)["_lost_without"] = keeping
            return made

        # help() would show what the generator yields.
        result = str(signature.return_annotation).replace("Iterator", "ReportBlock", 1)
        make.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        return make

    return decorate
