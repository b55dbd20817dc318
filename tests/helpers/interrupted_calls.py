"""Interrupts an operation at each point at which CPython would run a signal handler, one run for each point.

CPython looks for signals after an instruction that calls a C function, at the start of a Python function, and at the
backward jump of a loop; not between other instructions, and not when a Python function returns to another.
`sys.settrace` reports each instruction, so that a run can raise KeyboardInterrupt at the n-th of these points.
Only points in this package count. The trace function raises at the instruction after the one at which CPython would:
points whose next instruction has another error handler, such as the last call in a `with`, are left out.

Source: Python/ceval.c, CHECK_EVAL_BREAKER (CPython 3.11). Later versions look at the same instructions.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch_promote

__all__ = ["count_points", "interrupt_at"]

_PACKAGE = str(Path(torch_promote.__file__).parent)
_CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "CALL_INTRINSIC_1", "JUMP_BACKWARD"}


class _Interrupter:
    """Counts points, and raises at one of them."""

    def __init__(self, point: int | None) -> None:
        self.point = point
        self.count = 0
        self.where = ""
        self._checks: dict[CodeType, dict[int, bool]] = {}
        self._handlers: dict[CodeType, list[tuple[int, int, int]]] = {}
        self._last: dict[FrameType, int] = {}  # the offset of the instruction that a frame runs

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
            if frame.f_back is not None:
                self._last.pop(frame.f_back, None)  # Python does not look for signals after this call
        elif event == "opcode":
            before = self._last.get(frame)
            self._last[frame] = frame.f_lasti
            if before is not None and self._is_point(frame.f_code, before, frame.f_lasti):
                self.count += 1
                if self.count == self.point:
                    self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                    self._last.clear()
                    raise KeyboardInterrupt
        return self._in_frame

    def _is_point(self, code: CodeType, before: int, now: int) -> bool:
        """Whether CPython looks for signals after an instruction, and handles errors of it like those of the next."""
        handlers = self._handlers.get(code)
        if handlers is None:
            table: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]
            handlers = self._handlers[code] = [(one.start, one.end, one.target) for one in table]
        of_both = [[target for start, end, target in handlers if start <= at < end] for at in (before, now)]
        return self._looks(code).get(before, False) and of_both[0] == of_both[1]

    def _looks(self, code: CodeType) -> dict[int, bool]:
        """For each instruction, whether CPython looks for signals after it."""
        known = self._checks.get(code)
        if known is None:
            known = self._checks[code] = {
                one.offset: one.opname in _CALLS or (one.opname == "RESUME" and (one.arg or 0) < 2)
                for one in dis.get_instructions(code)
            }
        return known


def _run(operation: Callable[[], object], interrupter: _Interrupter) -> bool:
    """Whether it was interrupted, and did not swallow that."""
    try:
        sys.settrace(interrupter)
        operation()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def count_points(operation: Callable[[], object]) -> int:
    """Returns the number of points of an operation."""
    interrupter = _Interrupter(None)
    _run(operation, interrupter)
    return interrupter.count


def interrupt_at(operation: Callable[[], object], point: int) -> tuple[bool, str]:
    """Runs an operation and interrupts it.

    Returns:
        Whether KeyboardInterrupt came out of it, and the line at which it was raised; "" if there is no such point.
    """
    interrupter = _Interrupter(point)
    interrupted = _run(operation, interrupter)
    return interrupted, interrupter.where
