"""How the commands draw text: tables, the colours of the cast policies, and what goes to a terminal or into a pipe.

This is the one module that imports rich, and does so when something is drawn: rich is an optional extra.
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

__all__ = ["DrawingError", "check_rich", "let_go_of", "paint", "render", "show", "table", "write"]

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

# A row of a table stays one line where grep reads it.
_WIDTH_OF_A_PIPE = 160


class DrawingError(TorchPromoteError):
    """Text cannot be drawn in this installation."""


def check_rich() -> None:
    """Makes sure that the functions below can work.

    Raises:
        DrawingError: rich is not installed.
    """
    try:
        import rich  # noqa: F401 (asked for its presence)
    except ModuleNotFoundError as error:
        raise DrawingError(
            "text output needs rich: pip install torch-promote[cli]. --json works without it."
        ) from error


def table(
    *columns: str, unbroken: Sequence[str] = (), show_header: bool = True, first_width: int | None = None
) -> Table:
    """Makes an empty table without lines.

    Args:
        columns: The headers.
        unbroken: Those of them whose cells are never wrapped.
        show_header: False: the columns appear with the first row.
        first_width: What the first column keeps, in characters, where the terminal is narrow.
    """
    from rich.table import Table

    result = Table(box=None, show_header=show_header, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        min_width = first_width if index == 0 else None
        result.add_column(column, overflow="fold", no_wrap=column in unbroken, min_width=min_width)
    return result


def paint(policy: str) -> Text:
    """Returns the name of a policy, or of a dtype to run in, in its colour."""
    from rich.text import Text

    is_policy = policy in CastPolicy.__members__
    return Text(policy, style=_STYLES[CastPolicy(policy)] if is_policy else _DTYPE_STYLE)


def render(drawings: Sequence[RenderableType]) -> str:
    """Returns drawings as text for stdout: as wide as the terminal, and in colour if it is one."""
    from rich.console import Console

    fits_a_terminal = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ
    # Not to stdout: rich exits with 1 when the reader of a pipe goes away, and with a traceback when a disk is full.
    drawn = io.StringIO()
    console = Console(
        file=drawn,
        force_terminal=(sys.stdout is not None and sys.stdout.isatty()) or None,
        width=None if fits_a_terminal else _WIDTH_OF_A_PIPE,
        highlight=False,
        markup=False,
    )
    for drawing in drawings:
        # A sentence is left to the terminal to wrap, and whole to grep.
        console.print(drawing, soft_wrap=isinstance(drawing, str))
    return "".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines())


def show(
    data: Mapping[str, Any],
    draw: Callable[[Mapping[str, Any]], Sequence[RenderableType]],
    as_json: bool,
    status: int = 0,
) -> int:
    """Prints a command's data, as JSON or as the text that is drawn from it.

    Args:
        data: Plain data.
        draw: Makes drawings of it.
        as_json: Whether to print JSON.
        status: The exit status that the command comes to.

    Returns:
        `status`.

    Raises:
        DrawingError: Text is wanted, and rich is not installed.
    """
    if as_json:
        write(json.dumps(data, indent=2) + "\n")
    else:
        check_rich()
        write(render(draw(data)))
    return status


def write(text: str) -> None:
    """Writes text to stdout. A reader that has read enough (head, less) is no error.

    Raises:
        DrawingError: stdout is closed, or what it leads to is full.
    """
    if sys.stdout is None:
        raise DrawingError("cannot write: stdout is closed.")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        let_go_of(sys.stdout)
    except OSError as error:
        let_go_of(sys.stdout)
        raise DrawingError(f"cannot write to stdout: {error.strerror}.") from error


def let_go_of(stream: TextIO) -> None:
    """Points stdout or stderr at nothing. Python flushes it once more at exit, which must not fail again."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return  # a stream of Python's alone, as tests put in its place
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)
