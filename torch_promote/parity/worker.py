"""A worker process of a parity run: what its parent sees of it, and what it does."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import shlex
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.parity.model import Entry, EntryResult, Options, SampleMismatch

__all__ = ["Prepare", "RunEntry", "Worker", "WorkerError", "attempt", "first_ready"]

#: Runs one entry, and what goes before the first, so that the first does not pay for it. A worker imports both by name.
RunEntry = Callable[[Entry, Options], EntryResult]
Prepare = Callable[[Options], object]
#: What a worker says: that it has started, what came of an entry, or why that cannot be asked for.
Message = str | EntryResult | OptionError

_STARTED = "started"
_SECONDS_TO_STOP = 5
#: How much is shown of what a dead process wrote, or of a traceback.
_LAST_LINES = 16


class WorkerError(TorchPromoteError):
    """A worker process that died before it was given anything."""


# --- the parent's side


class Worker:
    """A worker process, as its parent sees it.

    Args:
        run_entry: What runs an entry.
        prepare: What is called once before.
        options: What was asked for.
        folder: Where the process may write what goes to its stdout and stderr.

    Attributes:
        position: Which entry it has in hand; None before the first.
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
        """Starts a worker like this one."""
        return Worker(*self._arguments)

    def take(self, position: int, entry: Entry) -> None:
        """Gives it an entry."""
        self.position = position
        self._given_at = time.perf_counter()
        with contextlib.suppress(OSError):  # it is dead, which is noticed where its messages are waited for
            self._connection.send(entry)

    def receive(self) -> Message | None:
        """Returns what it says; None if it is dead."""
        try:
            message: Message | None = self._connection.recv() if self._connection.poll() else None
        except (EOFError, OSError):
            return None
        return message

    def crash(self, entry: Entry) -> EntryResult:
        """Returns what is said of an entry in whose midst the process died."""
        died = f"the process that ran it died: {self.last_words()}"
        return _crash(entry, self._arguments[2], died, time.perf_counter() - self._given_at)

    def last_words(self) -> str:
        """Says how the process ended, and what it wrote last."""
        self._process.join(_SECONDS_TO_STOP)
        code = self._process.exitcode
        how = f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name
        written = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return "\n".join([how, *written.splitlines()[-_LAST_LINES:]])

    def stop(self) -> None:
        """Ends the process. What it has in hand is lost."""
        self._connection.close()
        self._process.terminate()
        self._process.join(_SECONDS_TO_STOP)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def awaited(self) -> tuple[Connection, int]:
        """What becomes ready when it has said something, or is dead."""
        return self._connection, self._process.sentinel


def first_ready(workers: Sequence[Worker]) -> Worker:
    """Waits until a worker has said something or is dead, and returns it."""
    by_object = {awaited: worker for worker in workers for awaited in worker.awaited}
    return by_object[wait(by_object)[0]]  # type: ignore[index]


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C reaches a whole process group. A process started in here never sees it: its parent is who stops it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- the process's side


def _work(connection: Connection, run_entry: RunEntry, prepare: Prepare, options: Options, log: str) -> None:
    """Runs what it is given, until the other end of the connection is closed."""
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
    """Sends stdout and stderr into a file: ops print, and stdout may be where the JSON goes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def attempt(run_entry: RunEntry, entry: Entry, options: Options) -> EntryResult | OptionError:
    """Runs an entry. An OptionError is returned; any other error is a crash of the entry."""
    started = time.perf_counter()
    try:
        return run_entry(entry, options)
    except OptionError as error:
        return error
    except Exception:
        lines = traceback.format_exc().splitlines()
        text = "\n".join(["what ran it raised:", *lines[-_LAST_LINES:]])
        return _crash(entry, options, text, time.perf_counter() - started)


def _crash(entry: Entry, options: Options, text: str, seconds: float) -> EntryResult:
    mismatch = SampleMismatch(
        entry=entry.name,
        sample="",
        kind="crash",
        what="the entry's process",
        text=text,
        reproduce=_command(entry, options),
    )
    return EntryResult(entry, mismatches=(mismatch,), seconds=seconds)


def _command(entry: Entry, options: Options) -> str:
    """The command that runs an entry alone, as it was run."""
    words = ["torch-promote", "parity", "--device", options.device, "--ops", entry.name]
    words += ["--dtypes", *options.dtypes] if options.dtypes else []
    words += ["--sample", options.sample] if options.sample else []
    words += ["--autocast-dtype", options.autocast_dtype] if options.autocast_dtype else []
    return shlex.join(words + ["--quick"] * options.quick + ["--stock-only"] * options.stock_only)
