"""Text output of the commands: tables, the colours of the cast policies, and writing to a terminal or a pipe.

rich is an optional dependency. Only this module and progress import it, and only when they draw.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from torch_promote.errors import TorchPromoteError
from torch_promote.policy.cast_policy import CastPolicy

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["DrawingError", "check_rich", "paint", "redirect_to_null", "render", "show", "table", "write"]

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

# Wide enough that each row of a table is one line, for grep.
_WIDTH_OF_A_PIPE = 160


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
        raise DrawingError(
            "text output needs rich: pip install torch-promote[cli]. --json works without it."
        ) from error


def table(
    *columns: str, unbroken: Sequence[str] = (), show_header: bool = True, first_width: int | None = None
) -> Table:
    """Returns an empty table without borders.

    Args:
        columns: The headers.
        unbroken: The headers of columns whose cells are never wrapped.
        show_header: Whether to print the headers.
        first_width: The minimum width of the first column, in characters.
    """
    from rich.table import Table

    result = Table(box=None, show_header=show_header, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        min_width = first_width if index == 0 else None
        result.add_column(column, overflow="fold", no_wrap=column in unbroken, min_width=min_width)
    return result


def paint(policy: str) -> Text:
    """Returns the name of a policy or dtype, in its colour."""
    from rich.text import Text

    is_policy = policy in CastPolicy.__members__
    return Text(policy, style=_STYLES[CastPolicy(policy)] if is_policy else _DTYPE_STYLE)


def render(drawings: Sequence[RenderableType], stream: TextIO | None = None) -> str:
    """Renders drawings for a stream: as wide as the terminal, and in colour if the stream is a terminal.

    Args:
        drawings: What to draw.
        stream: The stream; None: stdout. Nothing is written.
    """
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    is_terminal = stream is not None and stream.isatty()
    fits_a_terminal = is_terminal or "COLUMNS" in os.environ
    # Not stdout: if the reader of a pipe exits, rich exits with 1; if a disk is full, it prints a traceback.
    drawn = io.StringIO()
    console = Console(
        file=drawn,
        force_terminal=is_terminal or None,
        width=None if fits_a_terminal else _WIDTH_OF_A_PIPE,
        highlight=False,
        markup=False,
    )
    for drawing in drawings:
        # The terminal wraps sentences; grep gets them as one line.
        console.print(drawing, soft_wrap=isinstance(drawing, str))
    return "".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines())


def show(
    data: Mapping[str, Any],
    draw: Callable[[Mapping[str, Any]], Sequence[RenderableType]],
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


def redirect_to_null(stream: TextIO) -> None:
    """Redirects stdout or stderr to the null device, so that Python's flush at exit does not fail again."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return  # a Python object without a file descriptor, as in tests
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)
