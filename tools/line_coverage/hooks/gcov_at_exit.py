"""A plugin of coverage.py: processes that end by os._exit or replace themselves write the counts of C++ lines too.

coverage.py imports it in each process that it measures, and its setting `patch` does the same for lines of Python.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from typing import Any


def coverage_init(*_: Any) -> None:
    """Called by coverage.py when it starts in a process, which may be a fork of one that it measured before."""
    if not _written_before:
        for name in ("_exit", "execv", "execve"):
            _written_before[name] = getattr(os, name)
            setattr(os, name, functools.partial(_write_counts_before, _written_before[name]))


_written_before: dict[str, Callable[..., Any]] = {}


def _write_counts_before(function: Callable[..., Any], *arguments: Any) -> Any:
    extension = sys.modules.get("torch_promote._C")
    if extension is not None:
        ctypes.CDLL(extension.__file__).torch_promote_write_counts()
    return function(*arguments)
