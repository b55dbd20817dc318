"""What a function that PyTorch has written in Python was given, of the function that makes the current call of an op.

See NOTE [ Composite calls ] in csrc/promotion/call.h. Nothing is recorded beforehand: the frames of the stack tell.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["FOLDERS", "arguments_of_caller"]

_TORCH = str(Path(torch.__file__).parent) + os.sep

#: PyTorch's files and this package's. A frame of any other file is the user's.
FOLDERS = (_TORCH, str(Path(__file__).parents[1]) + os.sep)

#: The files whose functions compute with what they were given, and with nothing else. A method of a module also
#: computes with the module's weights.
_COMPUTE = tuple(
    _TORCH + path.replace("/", os.sep)
    for path in ("functional.py", "masked/", "nn/", "_linalg_utils.py", "_lobpcg.py", "_lowrank.py")
)

#: Optimizers and GradScaler: PyTorch chose the dtypes of states and scales, with which the user mixes nothing.
_STEPS = (_TORCH + "optim" + os.sep, _TORCH + "amp" + os.sep)


def arguments_of_caller() -> list[Any] | None:
    """Returns the tensors and numbers that the outermost such function was given; None if the user calls the op.

    Example:
        >>> print(arguments_of_caller())
        None
    """
    found = None
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        frame.f_code.co_filename.startswith(FOLDERS) or frame.f_code.co_name == "__torch_function__"
    ):
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_filename.startswith(_STEPS):
            found = []
        elif code.co_filename.startswith(_COMPUTE):
            if names[:1] == ("self",):
                break
            given = tree_leaves([frame.f_locals.get(name) for name in names])
            if any(isinstance(value, torch.Tensor) for value in given):
                found = [value for value in given if isinstance(value, torch.Tensor | int | float | complex)]
        frame = frame.f_back
    return found
