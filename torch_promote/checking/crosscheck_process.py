"""Crosschecks a whole process, for `torch-promote run --crosscheck`, and hands its report to the command.

The command sets the environment variable `VARIABLE` for the program. The processes that the program starts inherit it,
and leave a report each.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import pickle
from pathlib import Path
from typing import Any, cast

from torch_promote.checking.checker import Level
from torch_promote.checking.crosscheck import crosscheck
from torch_promote.checking.report import CrosscheckReport
from torch_promote.observe.dispatch import DispatchObserverError

__all__ = ["VARIABLE", "read_reports", "use_environment"]

#: Set by the command alone: the level and the folder for the reports, such as "bits:/tmp/folder".
VARIABLE = "TORCH_PROMOTE_CROSSCHECK_REPORTS"


def use_environment() -> None:
    """Opens a crosscheck in this thread, which lasts until the process ends."""
    level, _, folder = os.environ[VARIABLE].partition(":")
    _Process(cast(Level, level), Path(folder))


def read_reports(folder: Path) -> dict[int, CrosscheckReport]:
    """Returns the reports that processes have left in a folder, by process id."""
    return {int(file.stem): pickle.loads(file.read_bytes()) for file in folder.glob("*.report")}


class _Process:
    """The crosscheck of this process, and after a fork that of the child."""

    def __init__(self, level: Level, folder: Path) -> None:
        self._folder = folder
        self._block = crosscheck(level=level)
        self._report = self._block.__enter__()
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._forget)
        multiprocessing.util.register_after_fork(self, _Process._write_at_end)

    def _forget(self) -> None:
        vars(self._report).update(vars(CrosscheckReport()))  # what is there is the parent's to report

    def _write_at_end(self) -> None:
        # A process that multiprocessing has forked ends without atexit.
        finalize: Any = multiprocessing.util.Finalize
        finalize(None, self._write, exitpriority=-100)

    def _end(self) -> None:
        with contextlib.suppress(DispatchObserverError):  # another thread imported PyTorch first
            self._block.__exit__(None, None, None)
        self._write()

    def _write(self) -> None:
        whole = self._folder / f"{os.getpid()}.report"
        part = whole.with_suffix(".part")
        with contextlib.suppress(OSError):  # the command has ended before this process
            part.write_bytes(pickle.dumps(self._report))
            part.rename(whole)
