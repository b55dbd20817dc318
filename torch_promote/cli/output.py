"""What the commands share: files that options name; results on stdout, messages and progress on stderr.

rich draws tables and bars. It is imported when something is drawn, so that `--json` does not pay for it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from torch_promote import errors
from torch_promote.errors import TorchPromoteError, printable

if TYPE_CHECKING:
    from torch_promote.report.base import Report

#: What is drawn: a text, a report, a table with a header (a mapping for each row), or one of names and values.
Part: TypeAlias = "str | Report | Sequence[Mapping[str, Any]] | Mapping[str, Any]"

#: The value of --json without a file.
STDOUT = "-"
_STYLES = {
    "lower_precision_fp": "cyan",
    "fp32": "yellow",
    "fp32_set_opt_dtype": "yellow",
    "fp32_append_dtype": "yellow",
    "promote": "magenta",
    "match_self": "green",
    "fallthrough": "dim",
    "keep": "blue",
    "banned": "bold red",
}
_UNLIMITED = 100_000  # characters in a line
_SECONDS_BETWEEN_LINES = 30.0


# Types of options


def natural(text: str) -> int:
    """The type of an option whose value is 0 or more."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not an integer, 0 or more")


def file(suffix: str = "", *, or_stdout: bool = False) -> Callable[[str], str]:
    """Returns the type of an option that names a file to write, whose name ends in the suffix."""
    # So nothing runs if the file cannot be written, or the page of a report cannot be made.

    def check(path: str) -> str:
        problem = ""
        if path == STDOUT and or_stdout:
            return path
        if not path.endswith(suffix):
            problem = f"the file's name has to end in {suffix}"
        elif os.path.isdir(path):
            problem = "this is a folder. Name a file in it"
        elif not os.path.isdir(folder := os.path.dirname(path) or "."):
            problem = f"there is no folder {folder!r}. Create it first"
        elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
            problem = "it cannot be written (permission denied)"
        if problem:
            raise argparse.ArgumentTypeError(f"{path}: {problem}")
        if suffix == ".html":
            from torch_promote.report.base import load_renderer

            load_renderer("page")
        return path

    return check


def closest_files(path: str, suffix: str) -> str:
    """Returns a hint with the files of the folder whose names are closest to one that does not exist, or ""."""
    place = Path(path)
    stems = [one.name.removesuffix(suffix) for one in place.parent.glob(f"*{suffix}")]
    close = difflib.get_close_matches(place.name.removesuffix(suffix), stems, n=1)
    return "".join(f" Closest: {place.with_name(stem + suffix)}." for stem in close)


# Results


def show(data: Any, parts: Iterable[Part], as_json: bool, status: int = 0) -> int:
    """Prints a command's result, as JSON or as texts and tables, and returns the exit status."""
    write(json.dumps(data, indent=2) + "\n" if as_json else render(parts))
    return status


def render(parts: Iterable[Part], stream: TextIO | None = None) -> str:
    """Renders parts for a stream, stdout if None: in colour and as wide as the terminal, if it is one."""
    # Nothing is wrapped for a pipe, so that grep gets each row as one line. COLUMNS in the environment sets the width
    # of both.
    from rich.console import Console

    from torch_promote.report.base import Report

    stream = sys.stdout if stream is None else stream
    is_terminal = stream is not None and stream.isatty()
    width = width_of_output(stream)
    # Not stdout: if the reader of a pipe exits, rich exits with 1; if a disk is full, it prints a traceback.
    drawn = io.StringIO()
    options: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    console = Console(file=drawn, force_terminal=is_terminal or None, width=width or _UNLIMITED, **options)
    for part in parts:
        if not part and not isinstance(part, Report):  # a report may be false, such as the difference of equal runs
            continue
        if drawn.tell():
            console.print()
        if isinstance(part, Report) and not is_terminal:
            drawn.write(f"{part.text(width)}\n")
        else:
            console.print(_drawn(part))
    return "".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines())


def _drawn(part: Part) -> Any:
    from torch_promote.report.base import Report

    return printable(part) if isinstance(part, str) else part if isinstance(part, Report) else _table(part)


def _table(rows: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> Any:
    """Returns a table without borders, whose cells have the colours of policies."""
    from torch_promote.report.terminal import Grid

    names = ("", "") if isinstance(rows, Mapping) else tuple(rows[0])
    values = rows.items() if isinstance(rows, Mapping) else [tuple(row.values()) for row in rows]
    texts = [["-" if value is None else printable(str(value)) for value in row] for row in values]
    styles = [[_STYLES.get(text, "") for text in row] for row in texts]
    return Grid(names, texts, styles, [False] * len(names))


def width_of_output(stream: TextIO | None = None) -> int | None:
    """Returns the width of a line for a stream, in characters; None if lines are not to be wrapped, as in a pipe."""
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    asked = os.environ.get("COLUMNS", "")
    if (asked.isdecimal() and int(asked) > 0) or (stream is not None and stream.isatty()):
        return Console(file=io.StringIO()).width  # rich reads COLUMNS, and asks the terminal
    return None


def write(text: str) -> None:
    """Writes text to stdout. Raises TorchPromoteError if it is closed, or its disk is full."""
    # It is not an error if the reader of a pipe (head, less) has exited.
    if sys.stdout is None:
        raise TorchPromoteError("cannot write: stdout is closed.")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a Python object without a file descriptor
            # Python's flush at exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise TorchPromoteError(f"cannot write to stdout: {error.strerror}.") from error


# Messages and progress


def say(part: str | Report) -> None:
    """Prints a message or a report to stderr. stdout is for the command's result, or the program's."""
    if isinstance(part, str):
        errors.say(part)
    elif sys.stderr is not None:
        with contextlib.suppress(BrokenPipeError):
            print(render([part], sys.stderr), end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows progress on stderr while the block runs; yields what to call after each step, with a remark."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    remarks = TextColumn("{task.fields[remark]}", markup=False)
    said = time.monotonic()

    def step(remark: str) -> None:
        nonlocal said
        bar.update(task, advance=1, remark=remark)
        if not (quiet or is_terminal) and time.monotonic() - said >= _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            say(f"{what}: {bar.tasks[0].completed} of {total}, {remark}")

    # Steps take from milliseconds to a minute, so the speed is averaged over many.
    options: dict[str, Any] = {"speed_estimate_period": 600, "disable": not is_terminal}
    with Progress(*columns, remarks, console=Console(stderr=True), **options) as bar:
        task = bar.add_task(what, total=total, remark="")
        yield step
