"""Text output of the commands: tables, the colours of the cast policies, and writing to a terminal or a pipe.

torch_promote/text_layout.py lays out tables and sentences. rich adds the colours, and knows whether the terminal has
any. It is imported when something is drawn, so that `import torch_promote` and `--json` do not pay for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from torch_promote.errors import TorchPromoteError
from torch_promote.policy.op_table import CastPolicy
from torch_promote.text_layout import lay_out, wrapped

if TYPE_CHECKING:
    from rich.text import Text

__all__ = [
    "Drawing",
    "DrawingError",
    "ShellCommand",
    "Table",
    "check_rich",
    "fold",
    "paint",
    "redirect_to_null",
    "render",
    "say",
    "show",
    "width_of_output",
    "write",
]

_STYLES = {
    CastPolicy.lower_precision_fp: "cyan",
    CastPolicy.fp32: "yellow",
    CastPolicy.fp32_set_opt_dtype: "yellow",
    CastPolicy.fp32_append_dtype: "yellow",
    CastPolicy.promote: "magenta",
    CastPolicy.match_self: "green",
    CastPolicy.fallthrough: "dim",
    CastPolicy.keep: "blue",
    CastPolicy.banned: "bold red",
}

_DTYPE_STYLE = "yellow"
_WIDTH_OF_AN_UNKNOWN_TERMINAL = 80


class DrawingError(TorchPromoteError):
    """The text output cannot be drawn or written."""


def check_rich() -> None:
    """Raises if text cannot be drawn.

    Raises:
        DrawingError: rich is not installed.
    """
    try:
        import rich  # noqa: F401 (to see whether it is installed)
    except ModuleNotFoundError as error:
        raise DrawingError("text output needs rich: pip install rich. --json works without it.") from error


class Table:
    """A table without borders, which fits into any terminal. See NOTE [ Tables on a narrow terminal ].

    Args:
        columns: The headers. The first column has the labels of the rows.
        prose: The headers of columns that may wrap.
        note: The header of a column that may wrap, and that moves below the rows of a narrow terminal.
        show_header: Whether to print the headers.
    """

    def __init__(
        self, *columns: str, prose: Collection[str] = (), note: str | None = None, show_header: bool = True
    ) -> None:
        self.columns = columns
        self.rows: list[tuple[str | Text, ...]] = []
        self._options: dict[str, Any] = {"prose": prose, "note": note, "show_header": show_header}

    def add_row(self, *cells: str | Text) -> None:
        """Adds a row. A single cell is a line across all columns."""
        self.rows.append(cells)

    def lines(self, width: int | None) -> Iterator[Text]:
        """Returns the lines.

        Args:
            width: The width of a line, in characters. None: as wide as the table needs.
        """
        from rich.text import Text

        plain = [[cell if isinstance(cell, str) else cell.plain for cell in row] for row in self.rows]
        for line in lay_out(self.columns, plain, width, **self._options):
            drawn = Text()
            for piece in line:
                cell = self.rows[piece.row][piece.column] if piece.row >= 0 else None
                drawn.append(piece.text, style="bold" if cell is None else "" if isinstance(cell, str) else cell.style)
            yield drawn


class ShellCommand:
    """A command line to copy. Where it is wrapped, a backslash ends the line, so that a shell takes the copy.

    Args:
        title: What stands in front of it, indented.
        command: The command line.
    """

    def __init__(self, title: str, command: str) -> None:
        self.title = title
        self.command = command

    def lines(self, width: int | None) -> Iterator[str]:
        """Returns the lines for a terminal."""
        indent = self.title[: len(self.title) - len(self.title.lstrip())]
        text = f"{self.title.lstrip()}{self.command}"
        *lines, last = wrapped(text, width, indent, f"{indent}  ")
        if lines:  # again, with room for the backslashes
            *lines, last = wrapped(text, max(1, (width or 0) - 2), indent, f"{indent}  ")
        yield from (f"{line} \\" for line in lines)
        yield last


#: What a command draws: a table, or text, of which each line is a sentence.
Drawing = Table | ShellCommand | str


def paint(policy: str) -> Text:
    """Returns the name of a policy or dtype, in its colour."""
    from rich.text import Text

    is_policy = policy in CastPolicy.__members__
    return Text(policy, style=_STYLES[CastPolicy(policy)] if is_policy else _DTYPE_STYLE)


def render(drawings: Sequence[Any], stream: TextIO | None = None) -> str:
    """Renders drawings for a stream: in colour and as wide as the terminal, if the stream is a terminal.

    Nothing is wrapped for a pipe, so that grep gets each row and each sentence as one line. COLUMNS in the environment
    sets the width of both.

    Args:
        drawings: What to draw: texts, tables, other objects with a method `lines`, and lines of rich.
        stream: The stream; None: stdout. Nothing is written.
    """
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    is_terminal = stream is not None and stream.isatty()
    # Not stdout: if the reader of a pipe exits, rich exits with 1; if a disk is full, it prints a traceback.
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=is_terminal or None, highlight=False, markup=False, emoji=False)
    width = width_of_output(stream)
    for drawing in drawings:
        for line in _lines_of(drawing, width):
            console.print(line, soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines())


def width_of_output(stream: TextIO | None = None) -> int | None:
    """Returns the width of a line for a stream, in characters; None if lines are not to be wrapped, as in a pipe.

    Args:
        stream: The stream; None: stdout.
    """
    stream = sys.stdout if stream is None else stream
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if stream is None or not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH_OF_AN_UNKNOWN_TERMINAL
    except (AttributeError, OSError, ValueError):
        return _WIDTH_OF_AN_UNKNOWN_TERMINAL


def _lines_of(drawing: Any, width: int | None) -> Iterable[Any]:
    if isinstance(drawing, str):
        return fold(drawing, width)
    lines = getattr(drawing, "lines", None)
    return [drawing] if lines is None else lines(width)


def fold(text: str, width: int | None) -> Iterator[str]:
    r"""Yields the lines of a text for a terminal. Lines break at blanks, and keep their indentation.

    Args:
        text: The text.
        width: The width of a line, in characters. None: lines are not wrapped.

    Example:
        >>> list(fold("a title\n  one two three", 11))
        ['a title', '  one two', '    three']
    """
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        yield from wrapped(line[len(indent) :], width, indent, f"{indent}  ")


def show(
    data: Mapping[str, Any],
    draw: Callable[[Mapping[str, Any]], Sequence[Drawing]],
    as_json: bool,
    status: int = 0,
) -> int:
    """Prints a command's data, as JSON or as text.

    Args:
        data: Plain data.
        draw: Returns the drawings for the data.
        as_json: Whether to print JSON.
        status: The exit status of the command.

    Returns:
        `status`.

    Raises:
        DrawingError: Text output needs rich, which is not installed.
    """
    if as_json:
        write(json.dumps(data, indent=2) + "\n")
    else:
        check_rich()
        write(render(draw(data)))
    return status


def write(text: str) -> None:
    """Writes text to stdout. It is not an error if the reader of a pipe (head, less) has exited.

    Raises:
        DrawingError: stdout is closed, or its disk is full.
    """
    if sys.stdout is None:
        raise DrawingError("cannot write: stdout is closed.")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        redirect_to_null(sys.stdout)
    except OSError as error:
        redirect_to_null(sys.stdout)
        raise DrawingError(f"cannot write to stdout: {error.strerror}.") from error


def say(*texts: str, is_report: bool = False, as_is: bool = False) -> None:
    """Prints texts to stderr, as wide as the terminal. stdout is for the command's result, or the program's.

    Args:
        texts: The texts.
        is_report: Whether they are a report, for which COLUMNS sets the width, rather than messages of one line each.
        as_is: Whether their lines are laid out already.
    """
    if sys.stderr is not None:
        folds = not as_is and (is_report or sys.stderr.isatty())
        width = width_of_output(sys.stderr) if folds else None
        lines = (line for text in texts for line in fold(text, width))
        with contextlib.suppress(BrokenPipeError):
            print(*lines, sep="\n", file=sys.stderr, flush=True)


def redirect_to_null(stream: TextIO) -> None:
    """Redirects stdout or stderr to the null device, so that Python's flush at exit does not fail again."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return  # a Python object without a file descriptor, as in tests
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)
