"""The target of `torch-promote compare` and `tune`: a function that returns a model and a step of it.

NOTE [ Loading a target ]
A file is loaded as `python file.py` would: with its folder first on sys.path and itself alone in sys.argv. Only its
`__name__` is that of a module, so that code under `if __name__ == "__main__":` does not run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

from torch import nn

import torch_promote
from torch_promote.errors import OptionError, TorchPromoteError, did_you_mean
from torch_promote.numerics import step_runs

__all__ = ["Target", "TargetError", "open_target", "report_errors_of_step"]

_LEGAL = "Legal: (model, step), (model, step, restore), or a dict with model and step, and restore, metric, check."
_KEYS = ("model", "step", "restore", "metric", "check")
_OURS = os.path.dirname(torch_promote.__file__)
_LIBRARIES = ("torch", "importlib", "functools", "contextlib", "runpy")


class TargetError(TorchPromoteError):
    """The code of a target raised an error. The text has its traceback."""


@dataclass(frozen=True)
class Target:
    """What a target returned.

    Attributes:
        model: The model.
        step: The step.
        restore: What else the step changes.
        metric: What `tune` judges by; None: what the step returns.
        check: What else has to hold, for `tune`.
    """

    model: nn.Module
    step: Callable[..., Any]
    restore: tuple[Any, ...] = ()
    metric: Any = None
    check: Any = None


@contextlib.contextmanager
def open_target(text: str) -> Iterator[Target]:
    """Loads a target, whose folder is on sys.path to the end of the block.

    Args:
        text: "file.py:function" or "package.module:function".

    Raises:
        OptionError: There is no such file, module or function, or it returns something else.
        TargetError: The file, or the function, raised an error.
    """
    place, name = _split(text)
    path, arguments, before = list(sys.path), list(sys.argv), set(sys.modules)
    added: set[str] = set()
    try:
        with _reported(text):
            module = _load_file(place, added) if _is_file(place) else _load_module(place)
        function = _function_of(module, name, place)
        with _reported(text):
            returned = function()
        yield _read(returned, text)
    finally:
        sys.path[:], sys.argv[:] = path, arguments
        for one in added - before:
            sys.modules.pop(one, None)


@contextlib.contextmanager
def report_errors_of_step(text: str) -> Iterator[None]:
    """Turns an error that the step raises into a `TargetError`.

    Args:
        text: The target.
    """
    try:
        yield
    except (TorchPromoteError, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = _inside_step(error.__traceback__)
        if trace is None or not _users(trace):
            raise
        raise TargetError(_spell(error, f"the step of {text}", trace)) from error


# --- loading


def _split(text: str) -> tuple[str, str]:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        example = f"{text}:make" if text.endswith(".py") else "train.py:make"
        raise OptionError(
            f"TARGET {text!r}: name a file or module and a function in it that returns (model, step), such as "
            f"{example}."
        )
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.path.sep in place or os.path.exists(place)


def _load_file(place: str, added: set[str]) -> ModuleType:
    path = Path(place).resolve()
    if path.is_dir():
        raise OptionError(f"TARGET: {place!r} is a folder. Name a Python file in it.")
    if not path.exists():
        near = [str(one) for one in Path(place).parent.glob("*.py")] if Path(place).parent.is_dir() else []
        raise OptionError(f"TARGET: there is no file {place!r}.{did_you_mean(place, near)}")
    name = path.stem
    if name in sys.modules:  # of a library, or of an earlier target
        name = f"target_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"TARGET: {place!r} is no Python file: its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.argv[:] = [place]
    sys.modules[name] = module  # pickle and dataclasses look there
    added.add(name)
    spec.loader.exec_module(module)
    return module


def _load_module(place: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # as python -m does
    top = place.partition(".")[0]
    try:
        found = place in sys.modules or importlib.util.find_spec(place) is not None
    except (ModuleNotFoundError, ValueError):
        found = False
    if not found:
        file = place.replace(".", "/") + ".py"
        hint = f" For a file, write {file}." if os.path.exists(file) or top == place else ""
        raise OptionError(
            f"TARGET: there is no module {place!r}. Python looks in {os.getcwd()!r} and in sys.path.{hint}"
        )
    sys.argv[:] = [place]
    return importlib.import_module(place)


def _function_of(module: ModuleType, name: str, place: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if function is not None:
        raise OptionError(f"TARGET: {name} in {place} is {function!r}, not a function that returns (model, step).")
    raise OptionError(f"TARGET: there is no function {name!r} in {place}.{did_you_mean(name, own)}")


def _read(returned: Any, text: str) -> Target:
    if isinstance(returned, Mapping):
        unknown = [str(key) for key in returned if key not in _KEYS]
        missing = [key for key in ("model", "step") if key not in returned]
        if unknown or missing:
            what = f"unknown keys: {', '.join(unknown)}" if unknown else f"no key {' and '.join(missing)}"
            raise OptionError(f"TARGET: {text} returned a dict with {what}. {_LEGAL}")
        parts = dict(returned)
    elif isinstance(returned, tuple | list) and len(returned) in (2, 3):
        parts = dict(zip(_KEYS, returned, strict=False))
    else:
        raise OptionError(f"TARGET: {text} returned {_kind(returned)}. {_LEGAL}")
    model, step = parts["model"], parts["step"]
    if not isinstance(model, nn.Module):
        swapped = " They are the other way round." if isinstance(step, nn.Module) and callable(model) else ""
        raise OptionError(
            f"TARGET: {text} returned {_kind(model)} as the model, which is no nn.Module.{swapped} {_LEGAL}"
        )
    if not callable(step):
        raise OptionError(f"TARGET: {text} returned {_kind(step)} as the step, which is no function. {_LEGAL}")
    restore = parts.get("restore", ())
    if not isinstance(restore, Iterable) or isinstance(restore, str | Mapping | nn.Module):
        restore = (restore,)
    return Target(model, step, tuple(restore), parts.get("metric"), parts.get("check"))


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


# --- errors of the target's code


@contextlib.contextmanager
def _reported(text: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, OptionError) and not _users(error.__traceback__):
            raise  # ours, of the target's name
        raise TargetError(_spell(error, text, error.__traceback__)) from error


def _spell(error: BaseException, what: str, trace: TracebackType | None) -> str:
    """Returns the error with the frames of its traceback that are the user's."""
    frames = _users(trace)
    lines = [f"{what} raised {type(error).__name__}: {error}".rstrip(": ")]
    lines += traceback.StackSummary.extract(iter(frames)).format()
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(error)[:-1]  # the place; the last line is the message
    return "\n".join(line.rstrip() for line in lines)


def _users(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    return [
        (frame, line)
        for frame, line in traceback.walk_tb(trace)
        if not _is_library(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))
    ]


def _is_library(file: str, module: str) -> bool:
    return file.startswith((_OURS, "<frozen")) or module.partition(".")[0] in _LIBRARIES


def _inside_step(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback inside of `StepRuns`, which calls the step; None if it was not there."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == step_runs.__file__:
            found = trace
        trace = trace.tb_next
    return found
