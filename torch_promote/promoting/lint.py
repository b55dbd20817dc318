"""The lint for silent promotion: the kinds that it looks for, and its reports with the line of Python that promotes."""

from __future__ import annotations

import enum
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torch_promote.errors import OptionError, PromotionLintError, PromotionWarning, did_you_mean

__all__ = ["PromotionEvent", "PromotionKind", "kinds_of"]


class PromotionKind(enum.StrEnum):
    """A kind of silent promotion.

    The lint reports a call once for each kind that you ask for and that describes it. `ANY` includes all kinds; an
    event has the kind `ANY` if no other kind describes the call.

    Example:
        >>> PromotionKind("up to float64") is PromotionKind.UP_TO_FLOAT64
        True
    """

    ZERO_DIM_PRECISION_LOSS = "0-dim precision loss"
    INT_OVERFLOW = "int overflow by wrapping scalar"
    FLOAT_OVERFLOW = "number overflows to inf"
    INT_TO_LOW_PRECISION = "int to low-precision float"
    UP_TO_FLOAT64 = "up to float64"
    ANY = "any"


#: In the order of csrc/promotion/rule.h, LintKind.
_KINDS = tuple(PromotionKind)
_ALL = (1 << len(_KINDS)) - 1
_BY_NAME = {kind.name.lower(): kind for kind in _KINDS} | {kind.value: kind for kind in _KINDS}

_LINE_OF_TRACE = re.compile(r'File "([^"]+)", line (\d+)')

#: Frames of files in these folders do not belong to the caller.
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

WARN, RAISE, CALL = 1, 2, 3


@dataclass(frozen=True, slots=True)
class PromotionEvent:
    """A silent promotion that the lint found.

    Attributes:
        op: The op, such as `aten::add.Tensor`.
        operands: The operands in words, such as `float16[3]` or `256 (a Python int)`.
        result: The dtype that the op computes in.
        kind: The kind of promotion.
        rule: The name of the promotion rule in force.
        filename: The file of the line of Python that called the op; "" if no Python did.
        lineno: Its number in the file, 0 if no Python did.

    Example:
        >>> import torch
        >>> kind = PromotionKind.INT_TO_LOW_PRECISION
        >>> print(PromotionEvent("mul", ("int32[3]", "bfloat16[3]"), torch.bfloat16, kind, "torch", "a.py", 1))
        a.py:1: mul of int32[3] and bfloat16[3] computes in bfloat16 (int to low-precision float)
    """

    op: str
    operands: tuple[str, ...]
    result: torch.dtype
    kind: PromotionKind
    rule: str
    filename: str
    lineno: int

    def __str__(self) -> str:
        result = str(self.result).removeprefix("torch.")
        where = f"{self.filename}:{self.lineno}: " if self.filename else ""
        return f"{where}{self.op} of {' and '.join(self.operands)} computes in {result} ({self.kind})"


def kinds_of(kinds: object) -> int:
    """Returns the kinds to look for as bits.

    Args:
        kinds: A kind or several: a `PromotionKind`, its value (`"up to float64"`) or its name in lower case
            (`"up_to_float64"`).

    Raises:
        OptionError: There is no such kind, or none is given.

    Example:
        >>> kinds_of("any"), kinds_of(["up_to_float64", PromotionKind.ANY])
        (63, 63)
    """
    given = [kinds] if isinstance(kinds, str) or not isinstance(kinds, Iterable) else list(kinds)
    legal = ", ".join(repr(kind.value) for kind in _KINDS)
    if not given:
        raise OptionError(f"kinds names no kind of promotion. Legal: {legal}. Leave it out to look for all.")
    bits = 0
    for name in given:
        kind = _BY_NAME.get(name) if isinstance(name, str) else None
        if kind is None:
            close = did_you_mean(name, _BY_NAME) if isinstance(name, str) else ""
            raise OptionError(f"there is no kind of promotion {name!r}. Legal: {legal}, one or several.{close}")
        bits |= _ALL if kind is PromotionKind.ANY else 1 << _KINDS.index(kind)
    return bits


class Lint:
    """The lint of one `promotion` object, which reports each kind once for each line of Python."""

    __slots__ = ("__weakref__", "_seen", "handler")

    def __init__(self, handler: Callable[[PromotionEvent], object] | None) -> None:
        self.handler = handler
        self._seen: set[tuple[str, int, PromotionKind]] = set()

    def is_new(self, filename: str, lineno: int, kind: PromotionKind) -> bool:
        """Marks a kind as reported for a line, and returns whether it was not before."""
        before = len(self._seen)
        self._seen.add((filename, lineno, kind))
        return len(self._seen) > before


#: The lint of each `promotion` object that has one, by the object's address; the extension passes the address back.
lints: weakref.WeakValueDictionary[int, Lint] = weakref.WeakValueDictionary()

#: The lint of regions without an object, which compiled functions open.
_without_object = Lint(None)


def report(mode: int, region: int, kinds: int, event: dict[str, Any]) -> None:
    """Reports a promotion as the region's `on_promotion` says: one event for each kind that describes it.

    Args:
        mode: WARN, RAISE or CALL.
        region: The address of the `promotion` object.
        kinds: The kinds, a bit each, as the extension numbers them.
        event: The other attributes of `PromotionEvent`, without the line.
    """
    lint = lints.get(region, _without_object)
    frame = _caller()
    filename, lineno = _traced_line() or ((frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0))
    all_kinds = [kind for number, kind in enumerate(_KINDS) if kinds >> number & 1]
    found = [PromotionEvent(kind=kind, filename=filename, lineno=lineno, **event) for kind in all_kinds]
    if mode == RAISE:
        text = str(found[0]).replace(f"({found[0].kind})", f"({', '.join(all_kinds)})")
        raise PromotionLintError(f"{text}. Write the cast that you mean, or change `kinds`.")
    for one in found:
        if not lint.is_new(filename, lineno, one.kind):
            continue
        if mode == WARN:
            _warn(one, frame)
        elif lint.handler is not None:
            _call(lint.handler, one)


def check_handler(handler: Callable[[PromotionEvent], object]) -> None:
    """Raises if a callable cannot be called with one argument.

    Raises:
        OptionError: It cannot.

    Example:
        >>> check_handler(print)
    """
    try:
        inspect.signature(handler).bind(None)
    except TypeError as error:
        raise OptionError(
            f"on_promotion={handler!r} is called with one PromotionEvent, and does not take one argument: {error}. "
            f"Legal: a callable such as `events.append` or `lambda event: print(event)`."
        ) from None
    except ValueError:
        pass  # a builtin without a signature


def _call(handler: Callable[[PromotionEvent], object], event: PromotionEvent) -> None:
    try:
        handler(event)
    except TypeError as error:  # PyTorch swallows a TypeError raised inside `x + y`
        raise PromotionLintError(f"on_promotion={handler!r} raised TypeError: {error}") from error


def _warn(event: PromotionEvent, frame: FrameType | None) -> None:
    registry = None if frame is None else frame.f_globals.setdefault("__warningregistry__", {})
    module = None if frame is None else frame.f_globals.get("__name__")
    text = str(event).removeprefix(f"{event.filename}:{event.lineno}: ")
    warnings.warn_explicit(text, PromotionWarning, event.filename or "<no Python>", event.lineno, module, registry)


def _caller() -> FrameType | None:
    """Returns the innermost frame that is neither PyTorch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def _traced_line() -> tuple[str, int] | None:
    """Returns the line of the function that torch.compile is compiling; None outside a compilation.

    While Dynamo traces, its tracing context has the line; when the graph is traced again, the graph's nodes have it.
    """
    if torch._guards.TracingContext.try_get() is None:
        return None
    stack = torch._guards.TracingContext.extract_stack()
    if stack:
        return stack[-1].filename, stack[-1].lineno or 0
    lines = _LINE_OF_TRACE.findall(torch.fx.traceback.get_current_meta().get("stack_trace") or "")
    return (lines[-1][0], int(lines[-1][1])) if lines else None
