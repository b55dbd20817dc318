"""Interrupts (Ctrl-C, any signal handler that raises) at the moment in which a region ends."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

__all__ = ["without_interrupt_at_start"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Arguments of RESUME: what has just happened. After an await, CPython asks for no signals.
_AT_START, _AFTER_AWAIT = 0, 3


def without_interrupt_at_start(function: _Function) -> _Function:
    """Decorates `__exit__`: no signal handler runs between its call and its first call of another function.

    CPython runs the handlers of signals when a Python function starts (the instruction RESUME), and after calls of C
    functions. If a handler raises as `__exit__` starts, then `__exit__` has done nothing, and the with statement does
    not call it again. A handler that is due runs after the first call instead, which has ended the region.

    Dynamo, which knows this RESUME only elsewhere, traces the function as it was written.

    Source: Python/bytecodes.c, RESUME (CPython 3.11 to 3.14).
    """
    code: Any = function.__code__  # type: ignore[attr-defined]
    resume = next((at for at in dis.get_instructions(code) if at.opname == "RESUME"), None)
    if resume is not None and resume.arg == _AT_START:
        bytecode = bytearray(code.co_code)
        bytecode[resume.offset + 1] = _AFTER_AWAIT
        as_written = FunctionType(code, function.__globals__, function.__name__)  # type: ignore[attr-defined]
        function._torchdynamo_inline = as_written  # type: ignore[attr-defined]
        function.__code__ = code.replace(co_code=bytes(bytecode))  # type: ignore[attr-defined]
    return function
