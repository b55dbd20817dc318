"""The progress of `compare` and `tune` on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["show_progress"]

#: Call it with the number of runs so far, and a remark.
Show = Callable[[int, str], None]


@contextlib.contextmanager
def show_progress(what: str, total: int, wanted: bool) -> Iterator[Show]:
    """Shows a bar on stderr while the block runs, if that is a terminal and rich is installed.

    Args:
        what: What runs.
        total: How many runs there may be. If there are more, the total grows.
        wanted: False: show nothing.

    Example:
        >>> with show_progress("tune", 60, wanted=False) as show:
        ...     show(1, "gate")
    """
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, remark: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield lambda done, remark: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[remark]}"), console=Console(stderr=True)) as shown:
        task = shown.add_task(what, total=total, remark="")
        yield lambda done, remark: shown.update(task, total=max(total, done), completed=done, remark=remark)
