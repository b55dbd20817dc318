"""The text for a call: its arguments, and the line of Python that made it."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torch_promote.reference.strides import contiguous_strides

__all__ = ["calling_line", "describe_arguments", "describe_value", "is_between", "is_ours"]

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
#: Files that call ops on behalf of other code.
_BETWEEN = (
    f"{Path(torch.__file__).parent}{os.sep}",  # with the separator: not torchvision/
    _PACKAGE,
    contextlib.__file__,
    f"{Path(asyncio.__file__).parent}{os.sep}",  # which runs the steps of tasks
    "<frozen",
)


def is_between(file: str) -> bool:
    """Whether a file calls ops on behalf of other code: PyTorch's, asyncio's and this package's files.

    Example:
        >>> is_between(torch.nn.functional.__file__)
        True
    """
    return file.startswith(_BETWEEN)


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs code of this package."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


def describe_arguments(args: Sequence[Any]) -> str:
    """Returns the arguments of a call as text.

    Example:
        >>> describe_arguments([torch.ones(2, 3), torch.ones(3, 2).t(), 0.5, None])
        'float32[2, 3], float32[2, 3] strides (1, 2), 0.5, None'
    """
    return ", ".join(map(describe_value, args))


def describe_value(value: Any) -> str:
    """Returns one argument as text: a tensor as `dtype[shape]`, then layout, strides or device if not the usual ones.

    Example:
        >>> describe_value([torch.ones(2, dtype=torch.int8), torch.ones((), device="meta")])
        '[int8[2], float32[] on meta]'
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {describe_value(item)}' for key, item in value.items())}}}"
    if not isinstance(value, torch.Tensor):
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)
    # Nested tensors have no shape.
    text = str(value.dtype).removeprefix("torch.") + (" nested" if value.is_nested else str(list(value.shape)))
    if value.layout is not torch.strided:
        text += f" {str(value.layout).removeprefix('torch.')}"
    elif not value.is_nested and value.stride() != contiguous_strides(tuple(value.shape)):
        text += f" strides {value.stride()}"
    return text if value.device.type == "cpu" else f"{text} on {value.device}"


def calling_line() -> str:
    """Returns the innermost line of Python outside PyTorch and this package, as `file:line in function: text`.

    Example:
        >>> print(calling_line().partition(" in ")[2])
        <module>: print(calling_line().partition(" in ")[2])
    """
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None and is_between(frame.f_code.co_filename):
        outermost, frame = frame, frame.f_back
    frame = frame or outermost
    assert frame is not None
    if is_ours(frame):  # pragma: no cover: coverage.py does not trace threads that Python's threading did not start
        return "a thread that runs no Python, such as one of autograd's"
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{file}:{line} in {frame.f_code.co_name}" + (f": {text}" if text else "")
