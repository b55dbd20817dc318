"""How far a long command is: a bar with the time left on a terminal, a line now and then elsewhere. Both on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from torch_promote.cli.terminal import let_go_of

__all__ = ["Step", "progress"]

#: Says that one more is done, and what there is to say about it.
Step = Callable[[str], None]

_SECONDS_BETWEEN_LINES = 30.0


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool, still: bool = False) -> Iterator[Step]:
    """Shows how far something is while the block runs.

    Args:
        what: What is being done, for the beginning of a line.
        total: How many steps there are.
        quiet: Show nothing.
        still: Draw at the steps only, so that nothing else happens while something is timed.

    Yields:
        A function to call after each step, with a remark.

    Example:
        >>> with progress("counting", 2, quiet=True) as step:
        ...     step("one"), step("two")
        (None, None)
    """
    if quiet:
        yield lambda remark: None
    elif sys.stderr.isatty() and _has_rich():
        with _bar(what, total, still) as step:
            yield step
    else:
        yield _lines(what, total)


def _has_rich() -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        import rich  # noqa: F401 (asked for its presence)

        return True
    return False


@contextlib.contextmanager
def _bar(what: str, total: int, still: bool) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # An entry may take a minute and the next no time: the speed is that of many.
    shown = Progress(
        *columns,
        TextColumn("{task.fields[remark]}"),
        console=Console(stderr=True),
        speed_estimate_period=600,
        auto_refresh=not still,
    )
    with shown:
        task = shown.add_task(what, total=total, remark="")
        yield lambda remark: shown.update(task, advance=1, remark=remark, refresh=still)


def _lines(what: str, total: int) -> Step:
    started = said = time.monotonic()
    done = 0

    def step(remark: str) -> None:
        nonlocal said, done
        done += 1
        now = time.monotonic()
        if now - said < _SECONDS_BETWEEN_LINES:
            return
        said = now
        left = (now - started) / done * (total - done)
        line = f"{what}: {done} of {total}, {remark}, {now - started:.0f} s, about {left:.0f} s left"
        try:
            print(line, file=sys.stderr)
        except OSError:  # nobody reads it any more, which is no reason to stop
            let_go_of(sys.stderr)

    return step
