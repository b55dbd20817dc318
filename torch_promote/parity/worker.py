"""A worker process of a parity run: the parent's handle for it, and its main loop."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.parity.model import Entry, EntryResult, Options, SampleMismatch, command_for

__all__ = ["Prepare", "RunEntry", "Worker", "WorkerError", "attempt", "first_ready"]

#: `RunEntry` runs one entry. `Prepare` runs before the first entry, so that its time is not counted. A worker imports
#: both by name.
RunEntry = Callable[[Entry, Options], EntryResult]
Prepare = Callable[[Options], object]
#: A worker's message: that it has started, the result of an entry, or an error in the options.
Message = str | EntryResult | OptionError

_STARTED = "started"
_SECONDS_TO_STOP = 5
#: The number of last lines that a crash shows of a dead process's output, or of a traceback.
_LAST_LINES = 16


class WorkerError(TorchPromoteError):
    """A worker process died before its first entry."""


# --- in the parent


class Worker:
    """The parent's handle for a worker process.

    Args:
        run_entry: Runs an entry.
        prepare: Called once before the first entry.
        options: The options of the run.
        folder: The folder for the log of the process's stdout and stderr.

    Attributes:
        position: The position of its current entry; None before the first.
    """

    def __init__(self, run_entry: RunEntry, prepare: Prepare, options: Options, folder: Path) -> None:
        self.position: int | None = None
        self._arguments = run_entry, prepare, options, folder
        self._log = Path(tempfile.mkdtemp(dir=folder), "log")
        self._given_at = time.perf_counter()
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        arguments = theirs, run_entry, prepare, options, str(self._log)
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        with _interrupts_held_back():
            self._process.start()
        theirs.close()

    def another(self) -> Worker:
        """Starts a worker with the same arguments."""
        return Worker(*self._arguments)

    def take(self, position: int, entry: Entry) -> None:
        """Sends an entry to the worker."""
        self.position = position
        self._given_at = time.perf_counter()
        with contextlib.suppress(OSError):  # it died; `first_ready` reports it
            self._connection.send(entry)

    def receive(self) -> Message | None:
        """Returns the worker's message; None if it died."""
        try:
            message: Message | None = self._connection.recv() if self._connection.poll() else None
        except (EOFError, OSError):
            return None
        return message

    def crash(self, entry: Entry) -> EntryResult:
        """Returns the result of an entry during which the process died."""
        died = f"the process that ran it died: {self.last_words()}"
        return _crash(entry, self._arguments[2], died, time.perf_counter() - self._given_at)

    def last_words(self) -> str:
        """Returns the signal or exit status of the process, and its last lines of output."""
        self._process.join(_SECONDS_TO_STOP)
        code = self._process.exitcode
        how = f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name
        written = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return "\n".join([how, *written.splitlines()[-_LAST_LINES:]])

    def stop(self) -> None:
        """Ends the process, even in the middle of an entry."""
        self._connection.close()
        self._process.terminate()
        self._process.join(_SECONDS_TO_STOP)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def awaited(self) -> tuple[Connection, int]:
        """The objects to wait for: one becomes ready when the worker sends a message or dies."""
        return self._connection, self._process.sentinel


def first_ready(workers: Sequence[Worker]) -> Worker:
    """Waits until a worker sends a message or dies, and returns that worker."""
    by_object = {awaited: worker for worker in workers for awaited in worker.awaited}
    return by_object[wait(by_object)[0]]  # type: ignore[index]


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Blocks SIGINT for processes started in the block. Ctrl-C signals the whole group, but the parent stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the worker process


def _work(connection: Connection, run_entry: RunEntry, prepare: Prepare, options: Options, log: str) -> None:
    """Runs the entries that it receives, until the parent closes the connection."""
    _write_into(log)
    faulthandler.enable()
    torch.set_num_threads(1)
    prepare(options)
    with contextlib.suppress(EOFError, BrokenPipeError):
        connection.send(_STARTED)
        while True:
            entry = connection.recv()
            os.truncate(log, 0)
            connection.send(attempt(run_entry, entry, options))


def _write_into(log: str) -> None:
    """Redirects stdout and stderr to a file: ops print, and the parent may write JSON to stdout."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def attempt(run_entry: RunEntry, entry: Entry, options: Options) -> EntryResult | OptionError:
    """Runs an entry. Returns an OptionError; any other error becomes a mismatch of kind "crash"."""
    started = time.perf_counter()
    try:
        return run_entry(entry, options)
    except OptionError as error:
        return error
    except Exception:
        lines = traceback.format_exc().splitlines()
        text = "\n".join(["its run raised an error:", *lines[-_LAST_LINES:]])
        return _crash(entry, options, text, time.perf_counter() - started)


def _crash(entry: Entry, options: Options, text: str, seconds: float) -> EntryResult:
    mismatch = SampleMismatch(
        entry=entry.name,
        sample="",
        kind="crash",
        what="the entry's process",
        text=text,
        reproduce=command_for(entry, options),
    )
    return EntryResult(entry, mismatches=(mismatch,), seconds=seconds)
