"""Runs entries in this process, or in worker processes, where an op that crashes its process costs one entry.

NOTE [ Parity has its own workers ]
A crash report needs the entry, the signal or exit status, and the last output of the process; closing the run has to
end processes in the middle of an entry. The libraries that could replace jobs.py and worker.py do not give that:

- ProcessPoolExecutor fails all pending futures when one process dies, and does not say which entry crashed. A pool for
  each process would, but without the exit status, and it cannot end a process before Python 3.14.
- pytest-xdist names the entry and replaces the worker, but reports neither signal nor output ("worker 'gw0' crashed").
  Each result would travel as plain data on a test report, and `torch-promote parity` would need pytest and its
  configuration.
"""

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
