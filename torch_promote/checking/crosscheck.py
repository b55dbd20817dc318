"""`crosscheck`: compares every op that runs in a block with the reference, and with stock autocast if asked.

    with tp.crosscheck() as report:
        train_step()
    print(report)

`torch-promote run --crosscheck` checks a whole process: it sets the environment variable `VARIABLE` for the program.
The processes that the program starts inherit it, and leave a report each.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import pickle
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, cast, get_args

from torch_promote.checking.checker import Checker, Level
from torch_promote.checking.report import CrosscheckError, CrosscheckReport, Mismatch
from torch_promote.errors import DecoratorError, OptionError
from torch_promote.observe.dispatch import DispatchObserverError, observe_dispatch

__all__ = [
    "VARIABLE",
    "CrosscheckError",
    "CrosscheckReport",
    "Level",
    "Mismatch",
    "crosscheck",
    "read_reports",
    "use_environment",
]

#: Set by the command alone: the level and the folder for the reports, such as "bits:/tmp/folder".
VARIABLE = "TORCH_PROMOTE_CROSSCHECK_REPORTS"


class _Open(threading.local):
    """The open blocks of a thread, each with its report and its observer."""

    def __init__(self) -> None:
        self.blocks: list[tuple[crosscheck, CrosscheckReport, AbstractContextManager[None]]] = []


_open = _Open()


class crosscheck:  # noqa: N801 (what people write after `with`)
    """Checks every op that is dispatched in the block, forward and backward.

    Crosscheck compares the dtypes of each result, and the shape and strides of elementwise results, with the reference.
    Under `my_autocast` or `torch.autocast`, it compares the casts of the arguments with the autocast plan. It lists the
    ops that no rule covers. Blocks can be nested: the innermost block checks, and passes its report on to the
    outer ones. `with` gives the report, which fills while the block runs.

    Args:
        level: "dtype": the comparisons above. "bits": also runs each call to which a policy applies a second time,
            under stock autocast, on the same inputs and from the same random state, and compares the results bit for
            bit.
        raise_on_mismatch: Raise at the first mismatch, from the line that called the op.

    Raises:
        OptionError: `level` is not a level.
        CrosscheckError: The first mismatch, under `raise_on_mismatch`.
        DispatchObserverError: Another library uses the dispatch key that crosscheck needs, or the block ends in another
            thread than it began in.
        DecoratorError: `crosscheck` is used as a decorator: the caller could not read the report.

    Example:
        >>> import torch, torch_promote as tp
        >>> with tp.crosscheck() as report, tp.my_autocast("cpu"):
        ...     _ = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)).sum()
        >>> report.ok, report.with_policy["aten.linear.default"], report.no_rule.total()
        (True, 1, 0)
    """

    __slots__ = ("level", "raise_on_mismatch")

    def __init__(self, *, level: Level = "dtype", raise_on_mismatch: bool = False) -> None:
        if level not in get_args(Level):
            raise OptionError(
                f"{level!r} is not a level of crosscheck. Legal: {', '.join(map(repr, get_args(Level)))}."
            )
        self.level: Level = level
        self.raise_on_mismatch = raise_on_mismatch

    def __enter__(self) -> CrosscheckReport:
        report = CrosscheckReport()
        observing = observe_dispatch(Checker(report, self.level, self.raise_on_mismatch))
        observing.__enter__()
        _open.blocks.append((self, report, observing))
        return report

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # asyncio tasks may end in any order: the block around this one may have ended already.
        position = max((i for i, (block, _, _) in enumerate(_open.blocks) if block is self), default=None)
        if position is None:
            raise DispatchObserverError(
                "this crosscheck was not entered in this thread, so it cannot end here. It is still open in the thread "
                "that entered it: end it there. Each thread needs a block of its own."
            )
        _, report, observing = _open.blocks.pop(position)
        observing.__exit__(None, None, None)
        if position > 0:
            _open.blocks[position - 1][1].add(report)

    def __call__(self, function: object) -> NoReturn:
        """Raises; see the class."""
        raise DecoratorError(
            "crosscheck is not a decorator: the caller could not read its report. Write `with crosscheck() as report:` "
            "around the call, or inside the function."
        )


def use_environment() -> None:
    """Opens a crosscheck in this thread, which lasts until the process ends, as `VARIABLE` says."""
    level, _, folder = os.environ[VARIABLE].partition(":")
    block = crosscheck(level=cast(Level, level))
    report = block.__enter__()

    def write() -> None:
        file = Path(folder, f"{os.getpid()}.report")
        with contextlib.suppress(OSError):  # the command has ended before this process
            file.with_suffix(".part").write_bytes(pickle.dumps(report))
            file.with_suffix(".part").rename(file)

    def end() -> None:
        with contextlib.suppress(DispatchObserverError):  # another thread imported PyTorch first
            block.__exit__(None, None, None)
        write()

    atexit.register(end)
    # What the report has before a fork is the parent's to report.
    os.register_at_fork(after_in_child=lambda: vars(report).update(vars(CrosscheckReport())))
    # A process that multiprocessing has forked ends without atexit.
    finalize: Any = multiprocessing.util.Finalize
    multiprocessing.util.register_after_fork(report, lambda _: finalize(None, write, exitpriority=-100))


def read_reports(folder: Path) -> dict[int, CrosscheckReport]:
    """Returns the reports that processes have left in a folder, by process id."""
    return {int(file.stem): pickle.loads(file.read_bytes()) for file in folder.glob("*.report")}
