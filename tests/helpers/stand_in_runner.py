"""A replacement for torch_promote.parity.runner in tests of its surroundings: entries behave as their names say.

Worker processes import it by its name.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from torch_promote.errors import OptionError
from torch_promote.parity import report, runner
from torch_promote.parity.model import Entry, EntryResult, Options, SampleMismatch

#: Where the entry "slow" leaves the id of its process.
MARKER = "STAND_IN_MARKER"
NAMES = (
    *("good", "mismatching", "stale", "refused", "unruled", "gap", "noisy", "segfault", "abort", "exit", "raising"),
    *("slow", "good.again"),
)


def entries(options: Options) -> list[Entry]:
    """The entries that the globs select; without globs, only the good ones."""
    globs = options.ops or ("good*",)
    chosen = [name for name in NAMES if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    if not chosen:
        raise OptionError(f"no entry is called {globs[0]!r}.")
    return [Entry(name, "op_db") for name in chosen]


def run_entry(entry: Entry, options: Options) -> EntryResult:
    """The result of an entry with this name; the number of threads shows which process ran it."""
    _do(entry.name)
    mismatch = SampleMismatch(
        entry=entry.name,
        sample="float32/0/mixed",
        kind="dtype",
        what="ours against stock",
        text="aten.mm.default(float32[2, 3], float32[3, 2])\nexpected bfloat16\ngot      \x1b[31mfloat32",
        reproduce=f"torch-promote parity --device {options.device} --ops {entry.name} --sample float32/0/mixed",
    )
    return EntryResult(
        entry,
        samples=4,
        refused=4 if entry.name == "refused" else 1,
        not_generated={"float16": "RuntimeError: no such kernel"} if entry.name == "refused" else {},
        mismatches=(mismatch,) if entry.name == "mismatching" else (),
        gaps={"the kernel reads what it has not written": 2} if entry.name == "gap" else {},
        nondeterministic={"atomic additions": 3} if entry.name == "gap" else {},
        stale=("gap of stale",) if entry.name == "stale" else (),
        rows=("aten::exp", "aten::mm") if entry.name.startswith("good") else (),
        checked={"aten.mm.default": 7, "threads": torch.get_num_threads()},
        no_rule={"aten._strange.default": 5} if entry.name == "unruled" else {},
        seconds=0.25,
    )


def _do(name: str) -> None:
    if name == "noisy":
        print("printed by an op")
        os.write(1, b"written by an op\n")
    elif name == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif name == "abort":
        os.write(2, b"terminate called without an active exception\n")
        os.abort()
    elif name == "exit":
        os._exit(3)
    elif name == "raising":
        raise ZeroDivisionError("the harness is wrong")
    elif name == "slow":
        Path(os.environ[MARKER]).write_text(str(os.getpid()))
        time.sleep(120)


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the command's runner by the stand-in, with a table of three rows."""
    monkeypatch.setattr(runner, "entries", entries)
    monkeypatch.setattr(runner, "run_entry", run_entry)
    monkeypatch.setattr(report, "_rows_with_a_policy", lambda device_type: ["aten::bmm", "aten::exp", "aten::mm"])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture that lets a test run the stand-in's entries. Import it to use it."""
    put_in_place(monkeypatch)


def main(arguments: Sequence[str]) -> int:
    """Runs the command in a separate process, with the stand-in."""
    from torch_promote.cli.program import main as run_command

    with pytest.MonkeyPatch.context() as monkeypatch:
        put_in_place(monkeypatch)
        return run_command(arguments)
