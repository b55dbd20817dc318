"""Handles interrupts (Ctrl-C, or any signal handler that raises) during the end of a region."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

__all__ = ["without_interrupt_at_start"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Arguments of RESUME, which tell what has just happened. After an await, CPython does not check for signals.
_AT_START, _AFTER_AWAIT = 0, 3


def without_interrupt_at_start(function: _Function) -> _Function:
    """Decorates `__exit__` so that no signal handler runs between its start and its first call of another function.

    CPython runs signal handlers when a Python function starts (the instruction RESUME), and after calls of C functions.
    If a handler raised at the start of `__exit__`, the region would stay open: the with statement does not call
    `__exit__` again. With this decorator, a pending handler runs after the first call, which has ended the region.

    Dynamo does not support this RESUME at the start of a function, and traces the original function.

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
