"""The entries of a parity run, the run of one entry, and of many in worker processes.

NOTE [ Parity has its own workers ]
A crash report needs the entry, the signal or exit status, and the last output of the process; closing the run has to
end processes in the middle of an entry. ProcessPoolExecutor fails all pending futures when one process dies, and does
not say which entry crashed. pytest-xdist reports neither signal nor output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fnmatch
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from torch_promote.errors import OptionError, TorchPromoteError, did_you_mean
from torch_promote.parity.entry_run import EntryRun
from torch_promote.parity.model import (
    Entry,
    EntryResult,
    Options,
    SampleMismatch,
    check_device,
    command_for,
    named_dtype,
    on_device,
)
from torch_promote.parity.samples import (
    LISTED,
    PAIRS,
    NotGenerated,
    autocast_lists,
    listed_entries,
    op_database,
    sample_dtypes,
    samples,
)
from torch_promote.policy.op_table import op_table, schema_of

__all__ = ["Prepare", "RunEntry", "Worker", "WorkerError", "entries", "run_entries", "run_entry"]

#: `RunEntry` runs one entry. `Prepare` runs before the first entry, so that its time is not counted. A worker imports
#: both by name.
RunEntry = Callable[[Entry, Options], EntryResult]
Prepare = Callable[[Options], object]
#: A worker's message: that it has started, the result of an entry, or an error in the options.
Message = str | EntryResult | OptionError

#: Other dtypes disable a region on the CPU, stock's and ours.
_CPU_DTYPES = (torch.bfloat16, torch.float16)
_SECONDS_TO_STOP = 5
#: The number of last lines that a crash shows of a dead process's output, or of a traceback.
_LAST_LINES = 16


class WorkerError(TorchPromoteError):
    """A worker process died before its first entry."""


# --- entries


def entries(options: Options) -> list[Entry]:
    """Returns the entries that the options select: rows, pairs of dtypes, autocast lists, the op database.

    Args:
        options: The options of the run.

    Returns:
        The entries, always in the same order.

    Raises:
        OptionError: An op glob, dtype or device matches nothing, or `sample` is given for several entries.

    Example:
        >>> [entry.name for entry in entries(Options("cpu", ops=("aten::mm", "mm")))]
        ['aten::mm', 'mm']
    """
    check_device(options.device, stock_only=options.stock_only)
    everything = _all_entries(options.device)
    names = [entry.name for entry in everything]
    for glob in options.ops:
        if not fnmatch.filter(names, glob):
            raise OptionError(f"no entry is called {glob!r}.{did_you_mean(glob, names)}")
    chosen = [e for e in everything if not options.ops or any(fnmatch.fnmatchcase(e.name, g) for g in options.ops)]
    _check_dtypes(chosen, options)
    if options.sample is not None and len(chosen) != 1:
        raise OptionError(f"--sample {options.sample!r} needs one entry, but {len(chosen)} are selected. Name one op.")
    if options.dtypes:
        chosen = [entry for entry in chosen if not set(options.dtypes).isdisjoint(sample_dtypes(entry, options))]
        for glob in options.ops:
            if not fnmatch.filter([entry.name for entry in chosen], glob):
                raise OptionError(f"no sample of {glob!r} has one of the dtypes {', '.join(options.dtypes)}.")
    return chosen


def _check_dtypes(chosen: list[Entry], options: Options) -> None:
    if options.autocast_dtype is not None and not named_dtype(options.autocast_dtype).is_floating_point:
        raise OptionError(f"the autocast dtype {options.autocast_dtype!r} is not a floating dtype.")
    if options.device == "cpu" and options.lower not in _CPU_DTYPES:
        raise OptionError(
            f"autocast on the CPU does not support {options.autocast_dtype!r}: regions would be disabled. Legal: "
            f"bfloat16, float16."
        )
    known = {dtype for entry in chosen for dtype in sample_dtypes(entry, options)} if options.dtypes else set()
    for name in options.dtypes:
        if name != LISTED:
            named_dtype(name)
        if name not in known:
            raise OptionError(
                f"no sample of the selected entries has dtype {name!r}. Legal: {', '.join(sorted(known))}."
            )


@functools.cache
def _all_entries(device: str) -> tuple[Entry, ...]:
    pairs = tuple(Entry(name, "promotion") for name in PAIRS)
    from_database = tuple(Entry(name, "op_db") for name in op_database())
    options = Options(device)
    if not options.has_policies:
        return (*pairs, *from_database)
    rows = [Entry(row.name, "row") for row in op_table() if schema_of(row) is not None]
    with on_device(options):
        listed = [Entry(name, "autocast_lists") for name in listed_entries(autocast_lists(options.device_type))]
    return (*rows, *pairs, *listed, *from_database)


def run_entry(entry: Entry, options: Options) -> EntryResult:
    """Runs the samples of one entry.

    Args:
        entry: One of `entries(options)`.
        options: The options of the run.

    Returns:
        The result.

    Raises:
        OptionError: The entry has no sample with the label in the options.

    Example:
        >>> result = run_entry(Entry("aten::mm", "row"), Options("cpu", dtypes=("float32",)))
        >>> result.samples, result.mismatches, result.rows
        (6, (), ('aten::mm',))
    """
    started = time.perf_counter()
    run = EntryRun(entry, options)
    with on_device(options):
        for sample in samples(entry, options):
            if isinstance(sample, NotGenerated):
                run.add_not_generated(sample)
            else:
                run.add(sample)
        if options.sample is not None and not run.samples and not run.not_generated:
            every = samples(entry, Options(options.device, autocast_dtype=options.autocast_dtype))
            known = [sample.label for sample in every if not isinstance(sample, NotGenerated)]
            raise OptionError(f"{entry.name} has no sample {options.sample!r}.{did_you_mean(options.sample, known)}")
    return run.result(time.perf_counter() - started)


# --- many entries, in the parent process


def run_entries(
    entries: Sequence[Entry], options: Options, jobs: int, run_entry: RunEntry, prepare: Prepare
) -> Generator[tuple[int, EntryResult], None, None]:
    """Runs entries, and yields the result of each when it is done. Closing the iterator stops the workers.

    Workers get one entry at a time. If a worker dies, another one replaces it, and the entry gets a mismatch of kind
    "crash". An entry for which `run_entry` raises gets one too.

    Args:
        entries: The entries.
        options: The options of the run.
        jobs: The number of worker processes; 0 runs all entries in this process, for a debugger.
        run_entry: Runs an entry. Both functions are defined at the top level of a module.
        prepare: Called once in each worker before its first entry.

    Yields:
        The entry's position in `entries`, and its result.

    Raises:
        OptionError: `run_entry` raised it: the sample does not exist.
        WorkerError: A worker died before its first entry.
    """
    if jobs == 0:
        for position, entry in enumerate(entries):
            with contextlib.redirect_stdout(sys.stderr):
                outcome = _attempt(run_entry, entry, options)
            if isinstance(outcome, OptionError):
                raise outcome
            yield position, outcome
        return
    with tempfile.TemporaryDirectory(prefix="torch_promote_parity_") as folder:
        workers: list[Worker] = []
        try:
            workers += [Worker(run_entry, prepare, options, Path(folder)) for _ in range(min(jobs, len(entries)))]
            yield from _hand_out(entries, workers)
        finally:
            for worker in workers:
                worker.stop()


def _hand_out(entries: Sequence[Entry], workers: list[Worker]) -> Iterator[tuple[int, EntryResult]]:
    todo = deque(range(len(entries)))
    while workers:
        by_object = {awaited: worker for worker in workers for awaited in worker.awaited}
        worker = by_object[wait(by_object)[0]]  # type: ignore[index]
        message = worker.receive()
        position = worker.position
        if isinstance(message, OptionError):
            raise message
        if position is not None:
            yield position, message if isinstance(message, EntryResult) else worker.crash(entries[position])
        elif message is None:
            raise WorkerError(f"a worker process died while starting: {worker.last_words()}")
        if todo and message is None:
            worker.stop()
            workers[workers.index(worker)] = worker.another()
        elif todo:
            following = todo.popleft()
            worker.take(following, entries[following])
        else:
            worker.stop()
            workers.remove(worker)


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
        # Ctrl-C signals the whole group, but the parent stops the workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def another(self) -> Worker:
        """Starts a worker with the same arguments."""
        return Worker(*self._arguments)

    def take(self, position: int, entry: Entry) -> None:
        """Sends an entry to the worker."""
        self.position = position
        self._given_at = time.perf_counter()
        with contextlib.suppress(OSError):  # it died: the next `receive` returns None
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


# --- in a worker process


def _work(connection: Connection, run_entry: RunEntry, prepare: Prepare, options: Options, log: str) -> None:
    """Runs the entries that it receives, until the parent closes the connection."""
    # Ops print, and the parent may write JSON to stdout.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    faulthandler.enable()
    torch.set_num_threads(1)
    prepare(options)
    with contextlib.suppress(EOFError, BrokenPipeError):
        connection.send("started")
        while True:
            entry = connection.recv()
            os.truncate(log, 0)
            connection.send(_attempt(run_entry, entry, options))


def _attempt(run_entry: RunEntry, entry: Entry, options: Options) -> EntryResult | OptionError:
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
    command = command_for(entry, options)
    mismatch = SampleMismatch(entry.name, "", "crash", "the entry's process", text, command)
    return EntryResult(entry, mismatches=(mismatch,), seconds=seconds)
