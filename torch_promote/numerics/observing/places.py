"""Where in the program a call was made, and whether in a backward or in a checkpoint's recomputation."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

import torch
from torch.utils import checkpoint

from torch_promote.checking.call_site import is_between, is_ours
from torch_promote.numerics.observing.running_modules import MODULE_CALL
from torch_promote.numerics.records.calls import Phase

__all__ = ["Place", "innermost_line", "is_parameter_made", "place"]

_CHECKPOINT = checkpoint.__file__
_ENGINE = torch.autograd.graph.__file__
#: In the names of the files that torch.compile writes, and of code of torch.fx.
_GENERATED = (f"{os.sep}torchinductor_", "<eval_with_key>")
_PARAMETER = torch.nn.parameter.__file__
_PRINTING = torch._tensor_str.__file__
#: Functions of torch/utils/checkpoint.py that run a forward again: of the non-reentrant kind, and of the reentrant one.
_RECOMPUTING = ("recompute_fn", "backward")


class Place(NamedTuple):
    """Where a call was made.

    Attributes:
        line: "path:number" of the innermost line that is neither PyTorch's nor this package's; "" if it is not known,
            which is so in a backward outside of the program's own functions.
        phase: The phase.
        module: The frame of the innermost module that runs; None if none does.
        called_backward: Whether this thread called the backward that runs. Autograd's own threads do so where a
            checkpoint in a backward runs one.
    """

    line: str
    phase: Phase
    module: FrameType | None
    called_backward: bool = False


def place() -> Place | None:
    """Returns where the running call was made; None if PyTorch prints a tensor, which computes nothing.

    In a backward, of its thread's frames those count that are inside of the engine.
    """
    frame: FrameType | None = sys._getframe(1)
    backward = torch._C._current_graph_task_id() != -1
    phase: Phase = "backward" if backward else "forward"
    line, module = "", None
    while frame is not None:
        code = frame.f_code
        if code is MODULE_CALL:
            if module is None:
                module = frame
        else:
            file = code.co_filename
            if not (_between[file] if file in _between else _is_between(file)):
                line = line or f"{file}:{frame.f_lineno}"
            elif file == _PRINTING:
                return None
            elif backward:
                if file == _CHECKPOINT and code.co_name in _RECOMPUTING:
                    phase = "recompute"
                    break
                if file == _ENGINE and code.co_name == "_engine_run_backward":
                    return Place(line, phase, module, True)
        if line and module is not None and not backward:
            break
        frame = frame.f_back
    return Place(line, phase, module)


def is_parameter_made() -> bool:
    """Whether the calling op is the detach with which PyTorch makes a Parameter of a tensor."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _PARAMETER and frame.f_code.co_name == "__new__"


def innermost_line() -> str:
    """Returns the innermost line that is neither PyTorch's nor this package's, "path:number"; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


_between: dict[str, bool] = {}


def _is_between(file: str) -> bool:
    known = _between.get(file)
    if known is None:
        known = _between[file] = is_between(file) or any(part in file for part in _GENERATED)
    return known


def shorten(line: str, *, folders: bool = True) -> str:
    """Returns a line with its path relative to the working directory, if it is below it.

    Args:
        line: "path:number".
        folders: Whether to keep the folders; otherwise the file's name is left.

    Example:
        >>> shorten(os.path.join(os.getcwd(), "a", "train.py:41")), shorten("/home/a/train.py:41", folders=False)
        ('a/train.py:41', 'train.py:41')
    """
    if not folders:
        return line.replace("\\", "/").rpartition("/")[2]
    return line.removeprefix(os.getcwd() + os.sep)
