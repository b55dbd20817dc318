"""Progress of a long command, on stderr: a bar with the time left on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from torch_promote.cli.terminal import redirect_to_null

__all__ = ["Step", "follow", "progress"]

#: Call it after each step, with a remark to show.
Step = Callable[[str], None]

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BEFORE_FIRST_LINE = 10.0


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool, still: bool = False) -> Iterator[Step]:
    """Shows progress while the block runs.

    Args:
        what: The name of the work, which starts each line.
        total: The number of steps.
        quiet: Print no lines if stderr is not a terminal.
        still: Draw only at the steps, so that drawing does not disturb timings between them.

    Yields:
        A function to call after each step.

    Example:
        >>> with progress("counting", 2, quiet=True) as step:
        ...     step("one"), step("two")
        (None, None)
    """
    if sys.stderr is not None and sys.stderr.isatty() and _has_rich():
        with _bar(what, total, still) as step:
            yield step
    elif quiet or sys.stderr is None:
        yield lambda remark: None
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
    # Steps take from milliseconds to a minute, so the speed is averaged over many.
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
        except OSError:  # the reader has exited; go on with the work
            redirect_to_null(sys.stderr)

    return step


@contextlib.contextmanager
def follow(describe: Callable[[], str], *, quiet: bool) -> Iterator[None]:
    """Prints a line about a program that runs during the block: after 10 s, then every 30 s.

    The lines are whole ones, since the program may draw on the same terminal.

    Args:
        describe: Returns the line, "" if there is nothing to say. It is called in another thread.
        quiet: Print nothing.
    """
    if quiet:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        seconds = _SECONDS_BEFORE_FIRST_LINE
        while not done.wait(seconds):
            seconds = _SECONDS_BETWEEN_LINES
            line = describe()
            if line:
                with contextlib.suppress(OSError):
                    print(line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
