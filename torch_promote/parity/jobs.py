"""Runs entries one after the other, or in worker processes, where an op that takes its process down costs one entry."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from torch_promote.errors import OptionError
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.worker import Prepare, RunEntry, Worker, WorkerError, attempt, first_ready

__all__ = ["run_entries"]


def run_entries(
    entries: Sequence[Entry], options: Options, jobs: int, run_entry: RunEntry, prepare: Prepare
) -> Generator[tuple[int, EntryResult], None, None]:
    """Runs entries, and yields what came of each when it is done. Closing the iterator stops the workers.

    Entries are handed out one at a time. A worker that dies is replaced, and its entry has a mismatch of kind "crash";
    so has one for which `run_entry` raises.

    Args:
        entries: What to run.
        options: What was asked for.
        jobs: How many worker processes there are; 0 runs all in this process, for a debugger.
        run_entry: What runs an entry. It is defined at the top level of a module, as is the next.
        prepare: What is called once in each worker before its first entry.

    Yields:
        The entry's position in `entries`, and its result.

    Raises:
        OptionError: `run_entry` raised it: there is no such sample.
        WorkerError: A worker died before it was given anything.
    """
    if jobs == 0:
        for position, entry in enumerate(entries):
            with contextlib.redirect_stdout(sys.stderr):
                outcome = attempt(run_entry, entry, options)
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
        worker = first_ready(workers)
        message = worker.receive()
        position = worker.position
        if isinstance(message, OptionError):
            raise message
        if position is not None:
            yield position, message if isinstance(message, EntryResult) else worker.crash(entries[position])
        elif message is None:
            raise WorkerError(f"a worker process died at its start: {worker.last_words()}")
        if todo and message is None:
            worker.stop()
            workers[workers.index(worker)] = worker.another()
        elif todo:
            following = todo.popleft()
            worker.take(following, entries[following])
        else:
            worker.stop()
            workers.remove(worker)
