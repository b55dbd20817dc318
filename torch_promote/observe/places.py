"""Where a call comes from: its source line, its module, its phase, and in a backward, the call of the forward.

NOTE [ The frames say which module runs ]
A module runs if a frame of `nn.Module._call_impl` is on the stack. PyTorch's global module hooks would show it too, but
they change the program: torch.compile warns about them and recompiles modules, and modules check for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint

from torch_promote.errors import OptionError
from torch_promote.observe.events import Phase
from torch_promote.reference.strides import contiguous_strides

__all__ = [
    "MODULE_CALL",
    "NodeOrigins",
    "Origin",
    "Place",
    "RunningModules",
    "calling_line",
    "describe_arguments",
    "describe_value",
    "innermost_line",
    "is_between",
    "is_ours",
    "is_parameter_made",
    "place",
]


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


#: The code object of frames that run a module.
MODULE_CALL: CodeType = nn.Module._call_impl.__code__


class RunningModules:
    """The paths of the modules that run.

    Args:
        model: The module that paths start from. None: the first module that is called outside of other modules. Modules
            of other models are named after their class.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise OptionError(f"model must be an nn.Module or None, got {model!r}.")
        self._given = model is not None
        self._model_reference = None if model is None else weakref.ref(model)
        self._names: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of other models, if one was given
        self._was_called = False
        self._owners: dict[int, tuple[weakref.ref[Any], str | None]] = {}
        if model is not None:
            self._name(model, "")

    @property
    def missed(self) -> bool:
        """Whether a model was given, and none of its modules has run."""
        return self._given and not self._was_called

    @property
    def _model(self) -> nn.Module | None:
        return None if self._model_reference is None else self._model_reference()

    @property
    def path(self) -> str:
        """The path of the innermost module of this thread; "" if none runs."""
        return self.path_at(sys._getframe(1))

    def path_at(self, frame: FrameType | None) -> str:
        """The path of the innermost module that runs in a frame or around it; "" if none does."""
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                return self._path(frame)
            frame = frame.f_back
        return ""

    @property
    def innermost(self) -> tuple[nn.Module | None, str]:
        """The innermost module of this thread, and its path; None if none runs."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not MODULE_CALL:
            frame = frame.f_back
        return (None, "") if frame is None else (frame.f_locals["self"], self._path(frame))

    def named(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules of the model, each with its first path."""
        model = self._model
        return iter(()) if model is None else ((module, path) for path, module in model.named_modules())

    def path_of_parameter(self, parameter: Any) -> str | None:
        """The path of the module that has a parameter; None if it does not belong to the model."""
        model = self._model
        known = self._owners.get(id(parameter))
        if known is None or known[0]() is not parameter:
            # Keep parameters of other models: otherwise each lookup of one would search the whole model.
            others = {key: one for key, one in self._owners.items() if one[1] is None and one[0]() is not None}
            self._owners = others | {
                id(one): (weakref.ref(one), path)
                for path, module in reversed(list(model.named_modules() if model is not None else ()))
                for one in module._parameters.values()
                if one is not None
            }
            known = self._owners.setdefault(id(parameter), (weakref.ref(parameter), None))
        return known[1]

    def _path(self, frame: FrameType) -> str:
        module: nn.Module = frame.f_locals["self"]
        names = self._names.get(module)
        if names is None:
            names = self._look_for(module, frame)
        if not self._was_called and module not in self._others:
            self._was_called = True
        if len(names) > 1:  # a shared module: use the path below the module that calls it
            parent = self.path_at(frame.f_back)
            return next((name for name in names if parent and name.startswith(f"{parent}.")), names[0])
        return names[0]

    def _look_for(self, module: nn.Module, frame: FrameType) -> tuple[str, ...]:
        outer = frame.f_back
        if self._model_reference is None:
            self._model_reference = weakref.ref(_outermost(frame))
        model = self._model
        if model is not None:
            self._name(model, "")  # the model may have received new modules
        if module not in self._names:
            parent = self.path_at(outer)
            if self._given:
                self._names[module] = (parent,)
                self._others.add(module)
            elif module not in self._names:  # its parent, which was named just now, has named it
                self._name(module, f"{parent}.{type(module).__name__}" if parent else type(module).__name__)
        return self._names[module]

    def _name(self, root: nn.Module, prefix: str) -> None:
        found: dict[nn.Module, list[str]] = {}
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            found.setdefault(module, []).append(path)
        for module, names in found.items():
            self._names[module] = tuple(names)


def _outermost(frame: FrameType | None) -> nn.Module:
    found: nn.Module | None = None
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            found = frame.f_locals["self"]
        frame = frame.f_back
    assert found is not None
    return found


_CHECKPOINT = checkpoint.__file__
_ENGINE = torch.autograd.graph.__file__
#: Occur in the file names of code generated by torch.compile and torch.fx.
_GENERATED = (f"{os.sep}torchinductor_", "<eval_with_key>")
_PARAMETER = torch.nn.parameter.__file__
_PRINTING = torch._tensor_str.__file__
#: Functions of torch/utils/checkpoint.py that recompute a forward: non-reentrant, and reentrant.
_RECOMPUTING = ("recompute_fn", "backward")


class Place(NamedTuple):
    """The place at which a call was made.

    Attributes:
        line: "path:number" of the innermost line that belongs neither to PyTorch nor to this package; "" if unknown, as
            in a backward outside of the program's own functions.
        phase: The phase.
        module: The frame of the innermost running module, or None.
        called_backward: Whether this thread called the running backward. An autograd thread does so if a checkpoint
            runs a backward inside a backward.
    """

    line: str
    phase: Phase
    module: FrameType | None
    called_backward: bool = False


def place() -> Place | None:
    """Returns the place of the running call; None while PyTorch prints a tensor.

    In a backward, only the frames inside of the engine count.
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
            if not _is_between(file):
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
    """Whether the calling op is the detach with which PyTorch turns a tensor into a Parameter."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _PARAMETER and frame.f_code.co_name == "__new__"


def innermost_line() -> str:
    """Returns the innermost line of the program (not of PyTorch or this package) as "path:number", or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.lru_cache(4096)
def _is_between(file: str) -> bool:
    return is_between(file) or any(part in file for part in _GENERATED)


def shorten(line: str, *, folders: bool = True) -> str:
    """Returns a line with its path relative to the working directory, if it is below it.

    Args:
        line: "path:number".
        folders: Whether to keep the folders; otherwise only the file name remains.

    Example:
        >>> shorten(os.path.join(os.getcwd(), "a", "train.py:41")), shorten("/home/a/train.py:41", folders=False)
        ('a/train.py:41', 'train.py:41')
    """
    if not folders:
        return line.replace("\\", "/").rpartition("/")[2]
    return line.removeprefix(os.getcwd() + os.sep)


#: The number of nodes remembered per thread. The oldest are dropped.
_MOST = 200_000
#: A node that no op recorded, such as that of an autograd.Function, gets its predecessor's origin within this distance.
_NEAR = 64


class Origin(NamedTuple):
    """The origin of a node.

    Attributes:
        module: The path of the module.
        line: "path:number".
    """

    module: str
    line: str


class NodeOrigins:
    """The origins of the nodes that were recorded since the trace began.

    PyTorch counts sequence numbers per thread, and a node does not store its thread. In a backward that this thread
    called, they are assumed to be the thread's own; in autograd's threads, those of the first thread.
    """

    def __init__(self, modules: RunningModules) -> None:
        self._modules = modules
        self._first: dict[int, Origin] = {}
        self._by_thread = {threading.get_ident(): self._first}
        self._next = threading.local()

    @staticmethod
    def next_number() -> int:
        """The sequence number of the next node of this thread."""
        return torch._C._autograd._get_sequence_nr()

    def add_between(self, first: int, origin: Origin) -> None:
        """Remembers the nodes recorded between two calls: they belong to the autograd.Function that makes the second.

        Args:
            first: The next number at the start of the second call.
            origin: The origin of that call.
        """
        before = getattr(self._next, "number", first)
        if before < first:
            self._add(before, first, origin)
        self._next.number = first

    def add(self, first: int, origin: Origin) -> None:
        """Remembers the nodes recorded since the next number was `first`, unless an inner call did so."""
        last = self.next_number()
        if first != last:
            self._add(first, last, origin)
            self._next.number = last

    def _add(self, first: int, last: int, origin: Origin) -> None:
        known = self._by_thread.setdefault(threading.get_ident(), {})
        for number in range(first, last):
            known.setdefault(number, origin)
        if len(known) > _MOST:
            for number in list(known)[: _MOST // 2]:
                del known[number]

    def of_running_node(self, called_here: bool = True) -> Origin | None:
        """The origin of the node whose backward runs in this thread; None if it is unknown.

        Args:
            called_here: Whether this thread has called the backward.
        """
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        if hasattr(node, "variable"):  # AccumulateGrad
            path = self._modules.path_of_parameter(node.variable)
            return None if path is None else Origin(path, "")
        number = node._sequence_nr()
        own = self._by_thread.get(threading.get_ident(), {})
        # Other autograd threads may add and drop nodes meanwhile.
        others = [known for known in list(self._by_thread.values()) if known is not own]
        threads = [own, *others] if called_here else [*others, own]
        for known in threads:
            origin = known.get(number)
            if origin is not None:
                return origin
        near = (self._first.get(one) for one in range(number - 1, number - _NEAR, -1))
        return next((origin for origin in near if origin is not None), None)
