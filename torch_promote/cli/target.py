"""What `torch-promote compare` and `tune` share: the target, its tolerance, and where the report goes.

NOTE [ Loading a target ]
A target is a function that returns a model and a step of it. Its file is loaded as `python file.py` would: with its
folder first on sys.path and itself alone in sys.argv. Only its `__name__` is that of a module, so that code under
`if __name__ == "__main__":` does not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

import torch_promote
from torch_promote.cli.output import check_file, render, say, write
from torch_promote.errors import OptionError, TorchPromoteError, did_you_mean
from torch_promote.report.base import Report

__all__ = ["Target", "TargetError", "add_arguments", "check_outputs", "open_target", "parse_tolerance", "put_out"]

STDOUT = "-"
_LEGAL = "Legal: (model, step), (model, step, restore), or a dict with model and step, and restore, metric, check."
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
    restore: Any = ()
    metric: Any = None
    check: Any = None


_KEYS = tuple(Target.__dataclass_fields__)


# Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the target, how it is run, and where the report goes besides stdout."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function or package.module:function; the function returns (model, step)",
    )
    parser.add_argument(
        "--batches", metavar="N", type=int, default=1, help="how many times a run calls the step (default: 1)"
    )
    parser.add_argument("--html", metavar="F.html", help="write a page, which needs no network")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="F.json",
        help="write JSON to a file, or to stdout in place of the text",
    )


def parse_tolerance(texts: Sequence[str], zero: bool = True) -> float | dict[str, float]:
    """Returns a tolerance for every metric, or one for each name.

    Args:
        texts: "1e-3", or "loss=1e-3" for each metric.
        zero: Whether it may be 0.

    Raises:
        OptionError: A text is not a tolerance, or they cannot hold together.

    Example:
        >>> parse_tolerance(["1e-3"]), parse_tolerance(["loss=1e-3", "accuracy=0.01"])
        (0.001, {'loss': 0.001, 'accuracy': 0.01})
    """
    found: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf or not (number or zero) or (equals and not name):
            legal = "a number, 0 or more," if zero else "a number above 0"
            raise OptionError(
                f"--tolerance {text}: expected {legal} or NAME=NUMBER, such as 1e-3 or loss=1e-3. It is "
                f"relative to the reference."
            )
        if name in found:
            raise OptionError(f"--tolerance {text}: {name or 'all metrics'} already has {found[name]:g}. Name it once.")
        found[name] = number
    if "" in found and len(found) > 1:
        raise OptionError("--tolerance: give one number for all metrics, or NAME=NUMBER for each, not both.")
    return found.get("", found)


# Output


def check_outputs(arguments: argparse.Namespace) -> None:
    """Checks before anything runs that the files can be written.

    Raises:
        OptionError: One of them cannot.
        MissingPackageError: A package that pages need is not installed.
    """
    check_file("--html", arguments.html, ".html")
    check_file("--json", None if arguments.json == STDOUT else arguments.json, ".json")


def put_out(report: Report, arguments: argparse.Namespace, *more: str | None) -> None:
    """Prints a report and writes its files.

    Args:
        report: A `Comparison` or `Tuning`.
        arguments: The parsed command line.
        more: More files to save it to; None is none.

    Raises:
        OptionError: A file cannot be written any more. The report was printed.
    """
    if arguments.json == STDOUT:
        write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        write(render([report]))
    files = [path for path in (*more, arguments.html, arguments.json) if path not in (None, STDOUT)]
    for path in files:
        report.save(path)
    if files:
        say(f"torch-promote: wrote {', '.join(map(str, files))}")


# Loading


@contextlib.contextmanager
def open_target(arguments: argparse.Namespace) -> Iterator[Target]:
    """Loads the target for a block, whose errors from the step become a `TargetError`.

    The target's folder is on sys.path to the end of the block. What the target prints goes to stderr if stdout is for
    JSON alone.

    Args:
        arguments: The parsed command line. Its target is "file.py:function" or "package.module:function".

    Raises:
        OptionError: There is no such file, module or function, or it returns something else.
        TargetError: The file, the function or the step raised an error.
    """
    text = arguments.target
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise OptionError(
            f"TARGET {text!r}: name a file or module and a function in it that returns (model, step), such as "
            f"{text if text.endswith('.py') else 'train.py'}:make."
        )
    path, argv, before = list(sys.path), list(sys.argv), set(sys.modules)
    added: set[str] = set()
    silent = arguments.json == STDOUT and sys.stderr is not None
    with contextlib.redirect_stdout(sys.stderr) if silent else contextlib.nullcontext():
        try:
            with _reported(text):
                is_file = place.endswith(".py") or os.path.sep in place or os.path.exists(place)
                module = _load_file(place, added) if is_file else _load_module(place)
            function = _function_of(module, name, place)
            with _reported(text):
                returned = function()
            target = _read(returned, text)
            with _errors_of_step(text):
                yield target
        finally:
            sys.path[:], sys.argv[:] = path, argv
            for one in added - before:
                sys.modules.pop(one, None)


def _load_file(place: str, added: set[str]) -> ModuleType:
    path = Path(place).resolve()
    if path.is_dir():
        raise OptionError(f"TARGET: {place!r} is a folder. Name a Python file in it.")
    if not path.exists():
        near = [str(one) for one in Path(place).parent.glob("*.py")]
        raise OptionError(f"TARGET: there is no file {place!r}.{did_you_mean(place, near)}")
    name = f"target_{path.stem}" if path.stem in sys.modules else path.stem  # of a library, or of an earlier target
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"TARGET: {place!r} is not a Python file: its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.argv[:] = [place]
    sys.modules[name] = module  # pickle and dataclasses look there
    added.add(name)
    spec.loader.exec_module(module)
    return module


def _load_module(place: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        found = place in sys.modules or importlib.util.find_spec(place) is not None
    except (ModuleNotFoundError, ValueError):
        found = False
    if not found:
        raise OptionError(
            f"TARGET: there is no module {place!r}. Python looks in {os.getcwd()!r} and in sys.path. For a file, write "
            f"{place.replace('.', '/')}.py."
        )
    sys.argv[:] = [place]
    return importlib.import_module(place)


def _function_of(module: ModuleType, name: str, place: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    if function is not None:
        raise OptionError(f"TARGET: {name} in {place} is {function!r}, not a function that returns (model, step).")
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise OptionError(f"TARGET: there is no function {name!r} in {place}.{did_you_mean(name, own)}")


def _read(returned: Any, text: str) -> Target:
    if isinstance(returned, tuple | list) and len(returned) in (2, 3):
        returned = dict(zip(_KEYS, returned, strict=False))
    if not isinstance(returned, Mapping):
        raise OptionError(f"TARGET: {text} returned {_kind(returned)}. {_LEGAL}")
    if not {"model", "step"} <= returned.keys() <= set(_KEYS):
        keys = ", ".join(map(str, returned)) or "none"
        raise OptionError(f"TARGET: {text} returned a dict with the keys {keys}. {_LEGAL}")
    target = Target(**returned)
    if not isinstance(target.model, nn.Module):
        swapped = " They are the other way round." if isinstance(target.step, nn.Module) else ""
        raise OptionError(
            f"TARGET: {text} returned {_kind(target.model)} as the model, which is not an nn.Module.{swapped} {_LEGAL}"
        )
    if not callable(target.step):
        raise OptionError(
            f"TARGET: {text} returned {_kind(target.step)} as the step, which is not a function. {_LEGAL}"
        )
    several = isinstance(target.restore, Iterable) and not isinstance(target.restore, str | Mapping | nn.Module)
    restore = tuple(target.restore) if several else (target.restore,)
    return Target(target.model, target.step, restore, target.metric, target.check)


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


# Errors of the target's code


@contextlib.contextmanager
def _reported(text: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, OptionError) and not _users(error.__traceback__):
            raise  # ours, of the target's name
        raise TargetError(_spell(error, text, error.__traceback__)) from error


@contextlib.contextmanager
def _errors_of_step(text: str) -> Iterator[None]:
    try:
        yield
    except (TorchPromoteError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not _users(error.__traceback__):
            raise
        raise TargetError(_spell(error, f"the step of {text}", error.__traceback__)) from error


def _spell(error: BaseException, what: str, trace: TracebackType | None) -> str:
    """Returns the error with the frames of its traceback that are the user's."""
    lines = [f"{what} raised {type(error).__name__}: {error}".rstrip(": ")]
    lines += traceback.StackSummary.extract(iter(_users(trace))).format()
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(error)[:-1]  # the place; the last line is the message
    return "\n".join(line.rstrip() for line in lines)


def _users(trace: TracebackType | None) -> list[Any]:
    """Returns the frames of the user's code, with their lines."""
    return [
        (frame, line)
        for frame, line in traceback.walk_tb(trace)
        if not frame.f_code.co_filename.startswith((_OURS, "<frozen"))
        and frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES
    ]
