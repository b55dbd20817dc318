"""What the commands print: results on stdout, messages and progress on stderr.

rich draws tables and bars. It is imported when something is drawn, so that `--json` does not pay for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.report.base import Report, load_renderer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "check_file",
    "paint",
    "progress",
    "render",
    "say",
    "show",
    "table",
    "width_of_output",
    "write",
]

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


# Tables and texts


def table(columns: Sequence[str], rows: Iterable[Sequence[Text | str]]) -> Table:
    """Returns a table without borders. Cells wrap if the terminal is too narrow, and nothing is cut.

    Args:
        columns: The headers. Empty: two columns without headers.
        rows: The cells.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(columns), header_style="bold")
    for name in columns or ("", ""):
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def paint(policy: str | None) -> Text | str:
    """Returns a name, in its colour if it is that of a policy; "-" for None."""
    from rich.text import Text

    return "-" if policy is None else Text(policy, style=_STYLES.get(policy, ""))


def render(parts: Iterable[RenderableType | Report], stream: TextIO | None = None) -> str:
    """Renders texts, tables and reports for a stream: in colour and as wide as the terminal, if the stream is one.

    Nothing is wrapped for a pipe, so that grep gets each row as one line. COLUMNS in the environment sets the width of
    both.

    Args:
        parts: What to draw.
        stream: The stream; None: stdout. Nothing is written.
    """
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    is_terminal = stream is not None and stream.isatty()
    width = width_of_output(stream)
    # Not stdout: if the reader of a pipe exits, rich exits with 1; if a disk is full, it prints a traceback.
    drawn = io.StringIO()
    options: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    console = Console(file=drawn, force_terminal=is_terminal or None, width=width or _UNLIMITED, **options)
    for part in parts:
        if isinstance(part, Report) and not is_terminal:
            drawn.write(f"{part.text(width)}\n")
        else:
            console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines())


def width_of_output(stream: TextIO | None = None) -> int | None:
    """Returns the width of a line for a stream, in characters; None if lines are not to be wrapped, as in a pipe."""
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    asked = os.environ.get("COLUMNS", "")
    if (asked.isdecimal() and int(asked) > 0) or (stream is not None and stream.isatty()):
        return Console(file=io.StringIO()).width  # rich reads COLUMNS, and asks the terminal
    return None


# Writing


def show(
    data: Mapping[str, Any],
    draw: Callable[[Mapping[str, Any]], Iterable[RenderableType | Report]],
    as_json: bool,
    status: int = 0,
) -> int:
    """Prints a command's data, as JSON or as the texts and tables that `draw` yields, and returns the status."""
    write(json.dumps(data, indent=2) + "\n" if as_json else render(draw(data)))
    return status


def write(text: str) -> None:
    """Writes text to stdout. It is not an error if the reader of a pipe (head, less) has exited.

    Raises:
        TorchPromoteError: stdout is closed, or its disk is full.
    """
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


def say(*parts: Any) -> None:
    """Prints messages and reports to stderr. stdout is for the command's result, or the program's.

    Args:
        parts: A text is printed as it is; anything else, such as a report, is rendered.
    """
    if sys.stderr is not None:
        texts = (f"{part}\n" if isinstance(part, str) else render([part], sys.stderr) for part in parts)
        with contextlib.suppress(BrokenPipeError):
            print("".join(texts), end="", file=sys.stderr, flush=True)


def check_file(option: str, path: str | None, suffix: str = "") -> None:
    """Checks before anything runs that a file can be written, and the page of a report be made.

    Args:
        option: The option that names it.
        path: The file; None: none.
        suffix: How its name has to end; "": as it likes.

    Raises:
        OptionError: The name does not end as it has to, or the file cannot be written.
        MissingPackageError: A package that pages need is not installed.
    """
    if path is None:
        return
    problem = ""
    if not path.endswith(suffix) or (suffix == ".json" and path.endswith(".trace.json")):
        problem = f"the file's name has to end in {suffix}."
        if path.endswith(".trace.json"):
            problem += " A file for Perfetto is an option of its own, --perfetto."
    elif os.path.isdir(path):
        problem = "this is a folder. Name a file in it."
    elif not os.path.isdir(folder := os.path.dirname(path) or "."):
        problem = f"there is no folder {folder!r}. Create it first."
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = "it cannot be written (permission denied)."
    if problem:
        raise OptionError(f"{option} {path}: {problem}")
    if suffix == ".html":
        load_renderer("page")


# Progress


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows progress on stderr while the block runs: a bar on a terminal, at most a line every 30 s elsewhere.

    Args:
        what: The name of the work.
        total: The number of steps.
        quiet: Print no lines if stderr is not a terminal.

    Yields:
        A function to call after each step, with a remark to show.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        remark = TextColumn("{task.fields[remark]}")
        # Steps take from milliseconds to a minute, so the speed is averaged over many.
        with Progress(*columns, remark, console=Console(stderr=True), speed_estimate_period=600) as bar:
            task = bar.add_task(what, total=total, remark="")
            yield lambda remark: bar.update(task, advance=1, remark=remark)
        return
    began = said = time.monotonic()
    done = 0

    def step(remark: str) -> None:
        nonlocal done, said
        done, now = done + 1, time.monotonic()
        if not quiet and now - said >= _SECONDS_BETWEEN_LINES:
            said = now
            say(f"{what}: {done} of {total}, {remark}, {now - began:.0f} s")

    yield step
