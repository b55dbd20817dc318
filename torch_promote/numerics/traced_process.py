"""Traces a whole process, or some of its optimizer steps, for `torch-promote trace` and `torch-promote find-nan`.

The command sets the environment variable `VARIABLE` for the program, and the processes that the program starts inherit
it. Each process writes a record to a folder, which the command reads when the program has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_promote.errors import DispatchObserverError
from torch_promote.observe.recording_file import SUFFIX
from torch_promote.observe.surroundings import watch_steps
from torch_promote.observe.trace_report import TraceReport

if TYPE_CHECKING:
    from torch_promote.numerics.find_nonfinite import Attempt

__all__ = ["VARIABLE", "Record", "Request", "named_after", "read_records", "use_environment"]

#: Set only by the commands: a `Request` as JSON.
VARIABLE = "TORCH_PROMOTE_TRACED"


@dataclass(frozen=True)
class Request:
    """The settings that a command passes to the processes of a program.

    Attributes:
        folder: The folder for records.
        options: The arguments of `trace` or `find_nonfinite`.
        finds_nonfinite: Whether to run `find_nonfinite` instead of `trace`.
        first: The first optimizer step to observe; 0 for the start of the program.
        end: The step before which to stop; None for the end of the program.
        command: The process id of the command, which starts the program.
    """

    folder: str
    options: dict[str, Any]
    finds_nonfinite: bool = False
    first: int = 0
    end: int | None = None
    command: int = 0

    def to_text(self) -> str:
        """Returns the value of the variable."""
        return json.dumps(asdict(self))


@dataclass(eq=False)
class Record:
    """The record that a process writes.

    Attributes:
        process: Its id.
        parent: The id of the process that started it.
        rank: Its rank, if a launcher set one, or None.
        steps: The number of optimizer steps that ended in it.
        report: Its trace; None if it did not reach the steps, and in find-nan.
        found: In find-nan, whether there is an origin; None if it did not reach the steps.
        text: In find-nan, the report as text.
        data: In find-nan, the report as JSON-compatible values.
        attempts: In find-nan, remedies to try, the narrowest first.
    """

    process: int
    parent: int
    rank: int | None
    steps: int = 0
    report: TraceReport | None = None
    found: bool | None = None
    text: str = ""
    data: dict[str, Any] | None = None
    attempts: Sequence[Attempt] = ()


def named_after(path: str, suffix: str, tag: str) -> str:
    """Returns the name of the file of a process.

    Example:
        >>> named_after("run.json", ".json", "rank1"), named_after("run.json", ".json", "")
        ('run.rank1.json', 'run.json')
    """
    return f"{path.removesuffix(suffix)}.{tag}{suffix}" if tag else path


def use_environment() -> None:
    """Starts to trace this process, or waits for the requested steps."""
    _Process(Request(**json.loads(os.environ[VARIABLE])))


def read_records(folder: Path) -> dict[int, Record]:
    """Returns the records in a folder, by process id."""
    return {int(file.stem): pickle.loads(file.read_bytes()) for file in sorted(folder.glob("*.record"))}


class _Process:
    """Observes this process and, after a fork, the child."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._steps = 0
        self._block: contextlib.AbstractContextManager[Any] | None = None
        self._report: Any = None
        self._inherited: Any = None  # the origin that the parent found
        self._watching = watch_steps(self._stepped)
        self._watching.__enter__()
        if request.first == 0:
            self._begin()
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)
        # A process forked by multiprocessing ends without running atexit handlers.
        finalize: Any = multiprocessing.util.Finalize
        multiprocessing.util.register_after_fork(self, lambda own: finalize(None, own._at_exit, exitpriority=-100))

    def _begin(self) -> None:
        if self._request.finds_nonfinite:
            from torch_promote.numerics.find_nonfinite import find_nonfinite

            self._block = find_nonfinite(**self._request.options)
        else:
            from torch_promote.observe.trace import trace

            options = dict(self._request.options)
            rank = _rank()
            if options.get("record") and rank is not None:
                options["record"] = named_after(options["record"], SUFFIX, f"rank{rank}")
            elif os.getppid() != self._request.command:  # a worker, say, which must not write its parent's file
                options["record"] = None
            self._block = trace(**options)
        self._report = self._block.__enter__()

    def _end(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            with contextlib.suppress(DispatchObserverError):  # not the thread in which it started
                block.__exit__(None, None, None)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps += 1
        if self._block is not None and self._steps == self._request.end:
            self._end()
        elif self._report is None and self._steps == self._request.first:
            self._begin()

    def _forget(self) -> None:
        # The parent reports the existing records.
        self._steps = 0
        if isinstance(self._report, TraceReport):
            vars(self._report).update(vars(TraceReport(self._report._max_calls)))
        elif self._report is not None:
            self._inherited = self._report.to_dict()["origin"]

    def _at_exit(self) -> None:
        self._end()
        record = Record(os.getpid(), os.getppid(), _rank(), self._steps)
        if isinstance(self._report, TraceReport):
            record.report = self._report
        elif self._report is not None:
            from torch_promote.numerics.find_nonfinite import next_attempts

            data = self._report.to_dict()
            record.found = bool(self._report.found) and data["origin"] != self._inherited
            record.text, record.data = str(self._report), data
            record.attempts = next_attempts(self._report) if record.found or data["origin"] is None else ()
        whole = Path(self._request.folder, f"{os.getpid()}.record")
        part = whole.with_suffix(".record-part")
        with contextlib.suppress(OSError):  # the command has ended before this process
            part.write_bytes(pickle.dumps(record))
            part.rename(whole)


def _rank() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and os.environ.get("WORLD_SIZE", "1") != "1" else None
