"""What `torch-promote compare` and `tune` share: the target, its tolerance, and where the report goes.

NOTE [ Loading a target ]
A target is a function that returns a model and a step of it. Its file is loaded as `python file.py` would: with its
folder first on sys.path and itself alone in sys.argv. Only its `__name__` is that of a module, so that code under
`if __name__ == "__main__":` does not run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch_promote
from torch_promote.cli.output import STDOUT, closest_files, file, natural, say, show
from torch_promote.errors import OptionError, TorchPromoteError, did_you_mean

if TYPE_CHECKING:
    from torch_promote.report.base import Report

_OURS = os.path.dirname(torch_promote.__file__)
_LIBRARIES = ("torch", "importlib", "functools", "contextlib", "runpy")


class TargetError(TorchPromoteError):
    """The code of a target raised an error. The text has its traceback."""


#: What a target returns: the model, the step, what else the step changes, and for `tune` alone, what it judges by (by
#: default what the step returns) and what else has to hold.
_KEYS = ("model", "step", "restore", "metric", "check")


# Options


def add_arguments(parser: argparse.ArgumentParser, tolerance: str, required: bool) -> None:
    """Adds the target, how it is run and judged, and where the report goes. `tolerance` is the help of --tolerance."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function or package.module:function; the function returns (model, step)",
    )
    parser.add_argument(
        "--batches", metavar="N", type=natural, default=1, help="how many times a run calls the step (default: 1)"
    )
    parser.add_argument("--html", metavar="F.html", type=file(".html"), help="write a page, which needs no network")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="F.json",
        type=file(".json", or_stdout=True),
        help="write JSON to a file, or to stdout in place of the text",
    )
    parser.add_argument(
        "--tolerance",
        metavar="T",
        action="append",
        default=None if required else [],
        required=required,
        type=_tolerance,
        help=tolerance,
    )


def _tolerance(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if 0 <= float(value) < math.inf and bool(name) == bool(equals):
            return name, float(value)
    raise argparse.ArgumentTypeError(
        f"{text}: expected a number, 0 or more, or NAME=NUMBER, such as 1e-3 or loss=1e-3. It is relative to the "
        "reference"
    )


def tolerance_of(arguments: argparse.Namespace) -> float | dict[str, float]:
    """Returns the tolerance for every metric, or one for each name."""
    found: dict[str, float] = dict(arguments.tolerance)
    if "" in found and len(found) > 1:
        raise OptionError("--tolerance: give one number for all metrics, or NAME=NUMBER for each, not both.")
    return found.get("", found)


# Output


def put_out(report: Report, arguments: argparse.Namespace, *more: str | None) -> None:
    """Prints a report and writes its files, and those of `more`; None is none."""
    show(report.to_dict(), [report], arguments.json == STDOUT)
    files = [path for path in (*more, arguments.html, arguments.json) if path not in (None, STDOUT)]
    for path in files:
        report.save(path)
    if files:
        say(f"torch-promote: wrote {', '.join(map(str, files))}")


def say_next(arguments: argparse.Namespace, command: str, *options: str, policy: str | None = None) -> None:
    """Says which command to type next, with options and a policy, for this one's target or what is in its file."""
    program = _program_of(arguments.target)
    if not program and arguments.command == "tune":
        command = "compare"  # with what was found
    words, variable, then = ["torch-promote", command], "", "next"
    if command in ("compare", "tune"):
        words += [arguments.target, *options]
        if policy is not None and command == "tune":
            variable = f"TORCH_PROMOTE_POLICY={shlex.quote(policy)} "
        elif policy is not None:
            words += ["--candidate", policy]
    else:
        then = "next" if program else "then, for your training script"
        words += [*([] if policy is None else ["--policy", policy]), *options, *(program or ["SCRIPT"])]
    say(f"torch-promote: {then}: {variable}{shlex.join(words)}")


def _program_of(target: str) -> list[str]:
    """The program in the file of a target, as `python` takes it; none if that file only has functions."""
    place = target.rpartition(":")[0]
    module = sys.modules.get(place)
    path = Path(place if module is None or module.__file__ is None else module.__file__)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if "__main__" in path.read_text(encoding="utf-8"):
            return [place] if module is None else ["-m", place]
    return []


# Loading


def check(arguments: argparse.Namespace) -> None:
    """Raises OptionError if the target is none, or its file does not exist."""
    _place_of(arguments.target)


def _place_of(text: str) -> tuple[str, str]:
    """Returns the file or module of a target, and the function in it."""
    place, _, name = text.rpartition(":")
    if not place or place.endswith(":") or not name.isidentifier():
        example = text.removesuffix("()").replace("::", ":")
        if ":" not in example:
            example = f"{example if example.endswith('.py') or example.isidentifier() else 'train.py'}:make"
        raise OptionError(
            f"TARGET {text!r}: name a file or module and a function in it that returns (model, step), such as "
            f"{example}{', with one colon' * ('::' in text)}. `torch-promote compare --help` shows such a function."
        )
    if os.path.isdir(place):
        raise OptionError(f"TARGET: {place!r} is a folder. Name a file in it, such as {place}/train.py:{name}.")
    if _is_file(place) and not os.path.isfile(place):
        raise OptionError(f"TARGET: there is no file {place!r}.{closest_files(place, '.py')}")
    if place.endswith(".py"):
        _check_name(place, name)
    return place, name


def _check_name(place: str, name: str) -> None:
    """Raises OptionError if a file nowhere names the function, before anything in it runs."""
    try:
        tree = ast.parse(Path(place).read_bytes())
    except (SyntaxError, ValueError):  # which loading it raises, with the line
        return
    keys = ("name", "asname", "id", "value")  # of definitions, imports, variables and texts
    words = {getattr(node, key) for node in ast.walk(tree) for key in keys if hasattr(node, key)}
    if words.isdisjoint((name, "*", "exec", "globals", "setattr", "vars", "__getattr__")):
        raise _no_function(place, name, [one.name for one in tree.body if isinstance(one, ast.FunctionDef)])


def _no_function(place: str, name: str, functions: Iterable[str]) -> OptionError:
    own = [one for one in functions if not one.startswith("_")]
    there = f"Its functions: {', '.join(own[:8])}{', ...' * (len(own) > 8)}." if own else "It has no function at all."
    return OptionError(f"TARGET: {place} has no function {name!r}.{did_you_mean(name, own)} {there}")


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.path.sep in place or os.path.exists(place)


@contextlib.contextmanager
def open_target(arguments: argparse.Namespace) -> Iterator[SimpleNamespace]:
    """Loads the target for a block: its folder is on sys.path, and errors of the step become a `TargetError`."""
    text = what = arguments.target
    place, name = _place_of(text)
    path, argv = list(sys.path), list(sys.argv)
    silent = arguments.json == STDOUT and sys.stderr is not None
    with contextlib.redirect_stdout(sys.stderr) if silent else contextlib.nullcontext():
        try:
            sys.argv[:] = [place]
            module = _load_file(place) if _is_file(place) else _load_module(place)
            function = getattr(module, name, None)
            if function is None:
                raise _no_function(place, name, [key for key, one in vars(module).items() if inspect.isfunction(one)])
            if not callable(function):
                kind = type(function).__name__
                raise OptionError(f"TARGET: {name} of {place} is a value of type {kind}, not a function.")
            try:
                inspect.signature(function).bind()
            except TypeError as error:
                raise OptionError(f"TARGET: {name} of {place} gets no arguments: {error}. Give it a default.") from None
            target = _read(function(), text)
            what = f"the step of {text}"
            yield target
        except (Exception, SystemExit) as error:
            frames = [  # of the user's code, with their lines
                (frame, line)
                for frame, line in traceback.walk_tb(error.__traceback__)
                if not frame.f_code.co_filename.startswith((_OURS, "<frozen"))
                and frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES
            ]
            if not frames and (isinstance(error, TorchPromoteError) or what != text):
                raise  # ours, of the target's name or of what it returned
            lines = [f"{what} raised {type(error).__name__}: {error}".rstrip(": ")]
            lines += traceback.StackSummary.extract(iter(frames)).format()
            lines += getattr(error, "__notes__", [])
            if isinstance(error, SyntaxError):
                lines += traceback.format_exception_only(error)[:-1]  # the place; the last line is the message
            if isinstance(error, ImportError) and "relative import" in str(error) and _is_file(place):
                lines.append(f"It is a part of a package. Name the module: {_module_of(Path(place).resolve())}:{name}")
            raise TargetError("\n".join(line.rstrip() for line in lines)) from error
        finally:
            sys.path[:], sys.argv[:] = path, argv


def _module_of(path: Path) -> str:
    """Returns the module of a file in a package, and the folder from which Python finds it if that is another one."""
    root = path.parent.parent
    while (root / "__init__.py").exists():
        root = root.parent
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    return module if root == Path.cwd() else f"(cd {shlex.quote(str(root))}) {module}"


def _load_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    name = f"target_{path.stem}" if path.stem in sys.modules else path.stem  # of a library, or of an earlier target
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"TARGET: {place!r} is not a Python file: its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # pickle and dataclasses look there
    spec.loader.exec_module(module)
    return module


def _load_module(place: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # of a module that it imports
        raise OptionError(
            f"TARGET: there is no module {place!r}. Python looks in {os.getcwd()!r} and in sys.path. For a file, write "
            f"{place.replace('.', '/')}.py."
        ) from error


def _read(returned: Any, text: str) -> SimpleNamespace:
    """Checks what a target returned."""
    from torch import nn

    if isinstance(returned, tuple | list) and len(returned) in (2, 3):
        returned = dict(zip(_KEYS, returned, strict=False))
    is_legal = isinstance(returned, Mapping) and {"model", "step"} <= returned.keys() <= set(_KEYS)
    target = SimpleNamespace(**{**dict.fromkeys(_KEYS), "restore": (), **returned}) if is_legal else None
    if target is None or not isinstance(target.model, nn.Module) or not callable(target.step):
        got = type(returned).__name__
        if isinstance(returned, Mapping):
            got = ", ".join(f"{key}: {type(value).__name__}" for key, value in returned.items())
        raise OptionError(
            f"TARGET: {text} returned {got}. Legal: (model, step), (model, step, restore), or a dict with model and "
            "step, and restore, metric, check. The model is an nn.Module, and the step a function."
        )
    several = isinstance(target.restore, Iterable) and not isinstance(target.restore, str | Mapping | nn.Module)
    target.restore = tuple(target.restore) if several else (target.restore,)
    return target
