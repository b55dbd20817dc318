"""torch_promote/parity/jobs.py: entries in worker processes, and workers that die."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
import signal
import time
from pathlib import Path

import pytest

from helpers import stand_in_runner
from torch_promote.errors import OptionError
from torch_promote.parity import worker
from torch_promote.parity.jobs import run_entries
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.worker import Prepare, WorkerError

CPU = Options("cpu")


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of one process that has imported torch, which takes two seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


def run(
    jobs: int, *names: str, options: Options = CPU, prepare: Prepare = stand_in_runner.entries
) -> list[EntryResult]:
    """The results by name, as they are in the order of the entries."""
    entries = stand_in_runner.entries(dataclasses.replace(options, ops=names))
    done = dict(run_entries(entries, options, jobs, stand_in_runner.run_entry, prepare))
    assert sorted(done) == list(range(len(entries)))
    assert [done[position].entry for position in sorted(done)] == entries
    return [done[position] for position in sorted(done)]


@pytest.mark.usefixtures("quick_starts")
def test_results_do_not_depend_on_the_number_of_processes() -> None:
    names = ("good*", "mismatching", "stale", "refused", "gap")
    here = run(0, *names)
    assert len(here) == 6
    assert run(1, *names) == run(2, *names) == here
    # A worker starts with a thread for each core, and has to change that.
    assert {result.checked["threads"] for result in here} == {1}


@pytest.mark.usefixtures("quick_starts")
def test_a_dead_worker_costs_its_entry_and_no_other() -> None:
    options = Options("cpu", quick=True, stock_only=True, autocast_dtype="float16")
    results = run(2, "good*", "segfault", "abort", "exit", "raising", "mismatching", options=options)
    by_name = {result.entry.name: result for result in results}
    assert {name: [mismatch.kind for mismatch in result.mismatches] for name, result in by_name.items()} == {
        "good": [],
        "mismatching": ["dtype"],
        **{name: ["crash"] for name in ("segfault", "abort", "exit", "raising")},
        "good.again": [],
    }
    crashes = {name: by_name[name].mismatches[0] for name in ("segfault", "abort", "exit", "raising")}
    for name, crash in crashes.items():
        assert crash.reproduce == (
            f"torch-promote parity --device cpu --ops {name} --autocast-dtype float16 --quick --stock-only"
        )
    assert re.search("^the process that ran it died: SIGSEGV\nFatal Python error: Segm.*", crashes["segfault"].text)
    assert "died: SIGABRT\nterminate called without an active exception\n" in crashes["abort"].text
    assert crashes["exit"].text == "the process that ran it died: exit status 3"
    assert crashes["raising"].text.startswith("its run raised an error:\nTraceback (most recent call last):\n")
    assert crashes["raising"].text.endswith("\nZeroDivisionError: the harness is wrong")


def test_an_error_of_an_entry_is_a_crash_without_workers_too() -> None:
    (result,) = run(0, "raising")
    (crash,) = result.mismatches
    assert (crash.kind, crash.reproduce) == ("crash", "torch-promote parity --device cpu --ops raising")
    assert crash.text.startswith("its run raised an error:\nTraceback (most recent call last):\n")
    assert crash.text.endswith("\nZeroDivisionError: the harness is wrong")


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marker = tmp_path / "started"
    monkeypatch.setenv(stand_in_runner.MARKER, str(marker))
    monkeypatch.setattr(worker, "_SECONDS_TO_STOP", 0.2)
    stubborn = worker.Worker(stand_in_runner.run_entry, stand_in_runner.entries, CPU, tmp_path)
    stubborn.take(0, Entry("stubborn", "op_db"))
    deadline = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    stubborn.stop()
    assert stubborn._process.exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("jobs", [0, 1])
def test_what_cannot_be_asked_for_ends_the_run(jobs: int) -> None:
    with pytest.raises(OptionError, match=r"^wrong has no sample 'x'.$"):
        run(jobs, "wrong")
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("quick_starts")
def test_a_worker_that_cannot_start_ends_the_run() -> None:
    with pytest.raises(WorkerError) as caught:
        run(1, "good", prepare=stand_in_runner.cannot_start)
    assert str(caught.value) == "a worker process died while starting: exit status 7\nno such library"
    assert multiprocessing.active_children() == []


def test_closing_the_run_stops_the_workers() -> None:
    entries = stand_in_runner.entries(Options(ops=("good*", "mismatching", "gap")))
    running = run_entries(entries, CPU, 1, stand_in_runner.run_entry, stand_in_runner.entries)
    next(running)
    assert len(multiprocessing.active_children()) == 1
    running.close()
    assert multiprocessing.active_children() == []
