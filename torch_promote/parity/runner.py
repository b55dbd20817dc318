"""The entries of a parity run, the run of one entry, and of many in worker processes."""

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
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from torch_promote.checking.known_gaps import DEVICES
from torch_promote.errors import OptionError, TorchPromoteError, did_you_mean
from torch_promote.parity.entry_run import EntryRun
from torch_promote.parity.model import Entry, EntryResult, Options, SampleMismatch, command_for, on_device
from torch_promote.parity.samples import PAIRS, NotGenerated, op_database, sample_dtypes, samples
from torch_promote.policy.op_table import DEVICE_TYPES, op_table, schema_of
from torch_promote.reference.dtypes import LOWER_DTYPES

#: `RunEntry` runs one entry. `Prepare` runs before the first entry, so that its time is not counted. A worker imports
#: both by name.
RunEntry = Callable[[Entry, Options], EntryResult]
Prepare = Callable[[Options], object]

#: The number of last lines that a crash shows of a dead process's output, or of a traceback.
_LAST_LINES = 16


class WorkerError(TorchPromoteError):
    """A worker process died before its first entry."""


# --- entries


def entries(options: Options) -> list[Entry]:
    """Returns the entries that the options select, in order, or raises OptionError if one of these matches nothing."""
    _check_device(options.device, stock_only=options.stock_only)
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


def _check_device(device: str, *, stock_only: bool) -> None:
    if device in DEVICE_TYPES and not torch.get_device_module(device).is_available():
        raise OptionError(f"device {device!r} needs a GPU, but PyTorch finds none. Without a GPU, use fake-{device}.")
    if device in DEVICES:
        return
    if not stock_only:
        raise OptionError(
            f"{device!r} is not a device. Legal: {', '.join(DEVICES)}, and with --stock-only every device type of "
            f"this PyTorch.{did_you_mean(device, DEVICES) if len(device) > 3 else ''}"
        )
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        raise OptionError(f"this PyTorch cannot make a tensor on device {device!r}: {first_line}") from error


def _check_dtypes(chosen: list[Entry], options: Options) -> None:
    if not options.lower.is_floating_point:
        raise OptionError(
            f"the autocast dtype {options.autocast_dtype!r} is not a floating dtype. Use bfloat16 or float16."
        )
    if options.device_type != "cuda" and options.lower not in LOWER_DTYPES:
        raise OptionError(
            f"autocast on {options.device_type} does not support {options.autocast_dtype!r}: regions would be "
            f"disabled. Legal: bfloat16, float16."
        )
    known = {dtype for entry in chosen for dtype in sample_dtypes(entry, options)} if options.dtypes else set()
    for name in options.dtypes:
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
    return (*rows, *pairs, *from_database)


def run_entry(entry: Entry, options: Options) -> EntryResult:
    """Runs the samples of one of `entries(options)`, and returns its result. OptionError: it has no such sample."""
    started = time.perf_counter()
    run = EntryRun(entry, options)
    with on_device(options):
        for sample in samples(entry, options):
            if isinstance(sample, NotGenerated):
                run.add_not_generated(sample)
            else:
                run.add(sample)
        if options.sample is not None and not run.found.samples and not run.found.not_generated:
            every = samples(entry, Options(options.device, autocast_dtype=options.autocast_dtype))
            known = [sample.label for sample in every if not isinstance(sample, NotGenerated)]
            raise OptionError(f"{entry.name} has no sample {options.sample!r}.{did_you_mean(options.sample, known)}")
    return run.result(time.perf_counter() - started)


# --- many entries, in worker processes


def run_entries(
    entries: Sequence[Entry], options: Options, jobs: int, run_entry: RunEntry, prepare: Prepare
) -> Generator[tuple[int, EntryResult], None, None]:
    """Runs entries, and yields the position and the result of each when it is done. Closing it stops the workers.

    Workers get one entry at a time. If a worker dies, another one replaces it, and the entry gets a mismatch of kind
    "crash". An entry for which `run_entry` raises gets one too, but OptionError (the sample does not exist) is raised,
    and so is WorkerError if a worker dies before its first entry. With 0 jobs, all entries run in this process, for a
    debugger. `run_entry`, and `prepare` for the start of a worker, are defined at the top level of a module.
    """
    if jobs == 0:
        for position, entry in enumerate(entries):
            with contextlib.redirect_stdout(sys.stderr):
                result = _run(run_entry, entry, options)
            yield position, result
        return
    todo = deque(enumerate(entries))
    with tempfile.TemporaryDirectory(prefix="torch_promote_parity_") as folder:
        workers: list[_Worker] = []
        try:
            workers += [_Worker(folder, prepare, options) for _ in range(min(jobs, len(entries)))]
            while workers:
                wait([worker.future for worker in workers], return_when=FIRST_COMPLETED)
                worker = next(worker for worker in workers if worker.future.done())
                error = worker.future.exception()
                died = isinstance(error, BrokenProcessPool)
                if error is not None and not died:
                    raise error
                if worker.position is not None:
                    yield worker.position, worker.crash(entries[worker.position]) if died else worker.future.result()
                elif died:
                    raise WorkerError(f"a worker process died while starting: {worker.last_words()}")
                if died or not todo:
                    worker.stop()
                    workers.remove(worker)
                if todo and died:
                    workers.append(_Worker(folder, prepare, options))
                elif todo:
                    worker.take(*todo.popleft(), run_entry)
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """A process that runs one entry at a time. A pool of its own: if the process dies, only its entry is lost."""

    def __init__(self, folder: str, prepare: Prepare, options: Options) -> None:
        self.position: int | None = None  # of its current entry; None while it starts
        self._options = options
        self._log = Path(tempfile.mkdtemp(dir=folder), "log")
        self._given_at = time.perf_counter()
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        # Ctrl-C signals the whole group, but the parent stops the workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.future: Future[Any] = self._pool.submit(_start, prepare, options, str(self._log))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        (self._process,) = self._pool._processes.values()

    def take(self, position: int, entry: Entry, run_entry: RunEntry) -> None:
        """Gives the worker an entry."""
        self.position, self._given_at = position, time.perf_counter()
        try:
            self.future = self._pool.submit(_run, run_entry, entry, self._options, str(self._log))
        except BrokenProcessPool as error:  # it died after its last entry
            self.future = Future()
            self.future.set_exception(error)

    def crash(self, entry: Entry) -> EntryResult:
        """Returns the result of an entry during which the process died."""
        died = f"the process that ran it died: {self.last_words()}"
        return _crash(entry, self._options, died, time.perf_counter() - self._given_at)

    def last_words(self) -> str:
        """Returns the signal or exit status of the dead process, and its last lines of output."""
        self._pool.shutdown()
        code = self._process.exitcode
        how = f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name
        written = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return "\n".join([how, *written.splitlines()[-_LAST_LINES:]])

    def stop(self) -> None:
        """Ends the process, even in the middle of an entry."""
        if self._process.is_alive():
            self._process.kill()
        self._pool.shutdown()


def _start(prepare: Prepare, options: Options, log: str) -> None:
    """Prepares a worker process."""
    # Ops print, and the parent may write JSON to stdout.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    faulthandler.enable()
    torch.set_num_threads(1)
    prepare(options)


def _run(run_entry: RunEntry, entry: Entry, options: Options, log: str | None = None) -> EntryResult:
    """Runs an entry. An error becomes a mismatch of kind "crash", except for an OptionError."""
    if log is not None:
        os.truncate(log, 0)
    started = time.perf_counter()
    try:
        return run_entry(entry, options)
    except OptionError:
        raise
    except Exception:
        lines = traceback.format_exc().splitlines()
        text = "\n".join(["its run raised an error:", *lines[-_LAST_LINES:]])
        return _crash(entry, options, text, time.perf_counter() - started)


def _crash(entry: Entry, options: Options, text: str, seconds: float) -> EntryResult:
    mismatch = SampleMismatch(entry.name, "", "crash", "the entry's process", text, command_for(entry, options))
    return EntryResult(entry, mismatches=(mismatch,), seconds=seconds)
