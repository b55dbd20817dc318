"""Traces a whole process, or some of its optimizer steps, for `torch-promote trace` and `torch-promote find-nan`.

The command sets the environment variable `VARIABLE` for the program, and the processes that the program starts inherit
it. Each process writes a record to a folder, which the command reads when the program has ended: a JSON file, beside a
recording of its trace.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_promote.errors import DispatchObserverError, NonfiniteError, say
from torch_promote.observe.places import RunningModules
from torch_promote.observe.surroundings import watch_steps
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.file import SUFFIX, RecordingFile
from torch_promote.regions.installation import unused_overrides
from torch_promote.report.codec import encode

if TYPE_CHECKING:
    from torch_promote.reading.trace import Tracer

#: Set only by the commands: a `Request` as JSON.
VARIABLE = "TORCH_PROMOTE_TRACED"
#: A program that runs for longer after its origin of NaN is known is told of it at a step.
_SECONDS = 5.0


@dataclass(frozen=True)
class Request:
    """The settings that a command passes to the processes of a program."""

    folder: str  # for records
    options: dict[str, Any]  # the arguments of `trace` or `find_nonfinite`
    finds_nonfinite: bool = False
    first: int = 0  # the first optimizer step to observe; 0 for the start of the program
    end: int | None = None  # the step before which to stop; None for the end of the program
    # Set by a rank whose trace has begun, for the processes that it starts: they inherit RANK.
    rank: int | None = None

    def to_text(self) -> str:
        """Returns the value of the variable."""
        return json.dumps(asdict(self))


@dataclass(eq=False)
class Record:
    """The record that a process writes."""

    process: int
    parent: int  # that started it
    rank: int | None  # if a launcher set one
    recording: str = ""  # the file of its trace; "" if there is none
    steps: int = 0  # the number of optimizer steps that ended in it
    report: Any = None  # a `TraceReport`, or in find-nan a `NonfiniteReport`; None if it did not reach the steps
    # In find-nan, whether there is an origin, or GradScaler skipped all steps; None if it did not reach the steps.
    found: bool | None = None
    data: dict[str, Any] | None = None  # in find-nan, the report
    unused: tuple[str, ...] = ()  # in find-nan, the overrides of the command line that never acted


def named_after(path: str, suffix: str, tag: str) -> str:
    """Returns the name of the file of a process, such as run.rank1.json."""
    return f"{path.removesuffix(suffix)}.{tag}{suffix}" if tag else path


def use_environment() -> None:
    """Starts to trace this process, or waits for the requested steps."""
    _Process(Request(**json.loads(os.environ[VARIABLE])))


def read_records(folder: Path, max_calls: int) -> dict[int, Record]:
    """Returns the records in a folder, by process id. Of each trace, `max_calls` calls are kept one by one."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        record = Record(**json.loads(file.read_text(encoding="utf-8")))
        if record.recording:
            record.report = TraceReport.load(record.recording, max_calls)
        elif record.data is not None:
            from torch_promote.numerics.find_nonfinite import NonfiniteReport

            record.report = NonfiniteReport.from_dict(record.data)
        found[record.process] = record
    return found


class _Process:
    """Observes this process and, after a fork, the child."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._steps = 0
        self._block: contextlib.AbstractContextManager[Any] | None = None
        self._report: Any = None
        self._tracer: Tracer | None = None
        self._file = ""
        self._inherited: Any = None  # the origin that the parent found
        self._origin_at = math.inf  # when it was known, in seconds
        self._rank_before = _rank()  # at the start, or at the fork
        self._modules = RunningModules()
        self._watching = watch_steps(self._stepped)
        self._watching.__enter__()
        if request.first == 0:
            self._begin()
        elif not request.finds_nonfinite:
            self._modules.watch_for_the_first()  # as a run that is observed from its start names modules
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)
        # A process forked by multiprocessing ends without running atexit handlers.
        multiprocessing.util.register_after_fork(self, _Process._finalize)

    def _finalize(self) -> None:
        self._mark().unlink(missing_ok=True)
        finalize: Any = multiprocessing.util.Finalize
        finalize(None, self._at_exit, exitpriority=-100)

    def _mark(self) -> Path:
        """The file that says that this process was forked, until it is known to be one of multiprocessing."""
        return Path(self._request.folder, f"{os.getpid()}.forked")

    def _begin(self) -> None:
        if self._request.finds_nonfinite:
            from torch_promote.numerics.find_nonfinite import find_nonfinite

            self._block = find_nonfinite(**self._request.options)
        else:
            from torch_promote.reading.trace import Tracer

            self._file = self._name_file()
            options = self._request.options
            values = options["values"] or options["record"] is not None
            first, end = self._request.first, self._request.end
            steps = f"{first}:{'' if end is None else end}" if first or end is not None else ""
            self._block = self._tracer = Tracer(
                *(None, values, False, options["max_calls"], RecordingFile(self._file), steps), modules=self._modules
            )
        self._report = self._block.__enter__()
        if self._request.finds_nonfinite:
            self._report.begin_at(self._request.first, self._note_origin)

    def _name_file(self) -> str:
        """The file of this process: the one that was asked for, or one in the folder for a worker, say."""
        record, rank = self._request.options["record"], _rank()
        if record is not None and rank is None:  # the first process is the program
            with contextlib.suppress(OSError):
                Path(self._request.folder, "first").touch(exist_ok=False)
                return str(record)
        elif record is not None and rank != self._request.rank:
            os.environ[VARIABLE] = replace(self._request, rank=rank).to_text()
            return named_after(record, SUFFIX, f"rank{rank}")
        return self._own_file()

    def _own_file(self) -> str:
        return str(Path(self._request.folder, f"{os.getpid()}{SUFFIX}"))

    def _end(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            # Not the thread in which it started; or the report says it, and no call is left to raise it.
            with contextlib.suppress(DispatchObserverError, NonfiniteError):
                error = getattr(sys, "last_value", None) if self._tracer is not None else None
                block.__exit__(None if error is None else type(error), error, None)

    def _note_origin(self) -> None:
        """Called when the origin is known, which the end of the program may keep for hours, or lose with a signal."""
        self._write()
        self._origin_at = time.monotonic()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps += 1
        if time.monotonic() - self._origin_at > _SECONDS and self._report.origin is not None:
            self._origin_at = math.inf
            origin = self._report.origin
            say(
                f"torch-promote: {origin.kind}: {origin.where}, step {origin.step:,}. No more calls are checked; the "
                "report follows when the program has ended, also by a signal."
            )
        if self._block is not None and self._steps == self._request.end:
            self._end()
        elif self._report is None and self._steps == self._request.first:
            self._begin()

    def _forget(self) -> None:
        with contextlib.suppress(OSError):  # the command has ended before this process
            self._mark().touch()
        # The parent reports the existing records.
        self._steps, self._origin_at = 0, math.inf
        self._rank_before = _rank()
        if self._tracer is not None:
            self._file = self._own_file()
            self._tracer.forget(self._file)
        elif self._report is not None:
            self._inherited = self._report.to_dict()["origin"]

    def _at_exit(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()  # a second Ctrl-C would end the report
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
        self._end()
        self._write()
        if before is not None:
            signal.signal(signal.SIGINT, before)

    def _write(self) -> None:
        record = Record(os.getpid(), os.getppid(), _rank(), steps=self._steps)
        if self._tracer is not None:
            if os.path.exists(self._file):
                record.recording = self._file
                if record.rank != self._rank_before and self._file == self._own_file():
                    record.recording = self._name_file()  # a launcher that forks says the rank afterwards
                    shutil.move(self._file, record.recording)
        elif self._report is not None:
            data = self._report.to_dict()
            # A forked process inherits the origin that its parent found.
            found = bool(self._report.found) and data["origin"] != self._inherited
            record.found = found or self._report.scaler.never_stepped
            record.data, record.unused = data, tuple(unused_overrides()[0])
        whole = Path(self._request.folder, f"{os.getpid()}.json")
        part = whole.with_suffix(".json-part")
        with contextlib.suppress(OSError):  # the command has ended before this process
            part.write_text(json.dumps(encode(record)), encoding="utf-8")
            part.rename(whole)


def _rank() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and os.environ.get("WORLD_SIZE", "1") != "1" else None
