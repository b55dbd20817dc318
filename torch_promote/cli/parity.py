"""The command `torch-promote parity`: PyTorch's own samples under stock autocast and ours, against the reference."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_promote.cli import parity_text as cli_parity_text
from torch_promote.cli.progress import progress
from torch_promote.cli.terminal import check_rich, render, write
from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.parity.jobs import run_entries
from torch_promote.parity.junit import junit
from torch_promote.parity.model import Entry, EntryResult, Options
from torch_promote.parity.report import Report, about, merged

__all__ = ["add_parser"]

_STDOUT = "-"
#: Worker processes that a GPU gets unless more are asked for: each takes half a gigabyte of it for itself.
_MOST_ON_A_GPU = 4

_DESCRIPTION = """\
Runs PyTorch's own samples under torch.autocast and under my_autocast, forward
and backward, and checks three things: ours gives what stock gives, bit for bit;
what each dispatched op returned under stock is what the reference says (dtype,
and for elementwise ops shape and strides; the casts that autocast inserts); and
the same under ours.

The entries are the rows of the op table, the entries of PyTorch's own autocast
test lists, and the ops of its op database (op_db). A sample has a label, such
as float32/3/mixed: the dtype of its inputs, a number, and plain, mixed (the
inputs are float32 and the autocast dtype by turns) or lower (float32 inputs
cast to the autocast dtype).

devices:
  cpu        every bit is compared
  cuda       the same, on a GPU
  fake-cuda  CUDA's policies without a GPU, on fake tensors: dtypes, shapes and
             strides

--stock-only leaves ours out and holds this build of PyTorch against the
reference: its promotion, strides and autocast casts. It measures what each
autocast kernel does, where `policies --diff` sees only that there is one.
"""

_EPILOG = """\
examples:
  torch-promote parity --quick                     a choice of the samples
  torch-promote parity                             all of them
  torch-promote parity --ops 'linalg.*' aten::mm   some entries
  torch-promote parity --device fake-cuda --dtypes float32
  torch-promote parity --shard 1/4 --json 1.json --junit 1.xml
  torch-promote parity --merge 1.json 2.json 3.json 4.json
  torch-promote parity --ops mm --sample float32/0/mixed --jobs 0
                                                   one sample, in a debugger
  torch-promote parity --list --ops '*softmax*'    the names to choose from

exit status: 0 nothing mismatches and no known gap is stale; 1 something does,
or is; 2 wrong command line, or nothing was checked; 130 interrupted.
docs/parity.md tells more.
"""


class SamplesError(TorchPromoteError):
    """PyTorch's samples cannot be had in this installation."""


def add_parser(commands: Any) -> None:
    """Adds the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "parity",
        help="PyTorch's samples under stock and ours, against the reference",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chosen = parser.add_argument_group("what runs")
    chosen.add_argument("--device", default="cpu", help="cpu (the default), cuda or fake-cuda")
    chosen.add_argument("--ops", nargs="+", action="extend", metavar="GLOB", help="only entries of these names")
    chosen.add_argument("--dtypes", nargs="+", action="extend", metavar="DTYPE", help="only samples of these dtypes")
    chosen.add_argument("--sample", metavar="LABEL", help="only this sample of one entry")
    chosen.add_argument("--quick", action="store_true", help="the first three samples of each op, in two dtypes")
    chosen.add_argument("--stock-only", action="store_true", help="PyTorch against the reference, without ours")
    chosen.add_argument("--autocast-dtype", metavar="DTYPE", help="the regions' dtype (default: the device's)")
    chosen.add_argument("--shard", default="1/1", metavar="I/N", help="only every N-th entry, from the I-th on")
    chosen.add_argument("--merge", nargs="+", metavar="FILE", help="run nothing; add up the JSON of all shards")
    chosen.add_argument("--list", action="store_true", help="run nothing; print the entries")
    told = parser.add_argument_group("how it runs, and what is told")
    told.add_argument(
        "--jobs", metavar="N", help="worker processes (default: one for each core, on cuda at most 4); 0: none"
    )
    told.add_argument("--json", nargs="?", const=_STDOUT, metavar="FILE", help="JSON into a file, or to stdout")
    told.add_argument("--junit", metavar="FILE", help="JUnit XML into a file")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json != _STDOUT:
        check_rich()
    for name in (arguments.json, arguments.junit):
        if name not in (None, _STDOUT):
            _check_writable(Path(name))
    if arguments.json is not None and arguments.json == arguments.junit:
        raise OptionError(f"--json and --junit both name {arguments.json}. Give each a file of its own.")
    if arguments.merge:
        return _tell(_merge(arguments), arguments)
    options = _options(arguments)
    if options.sample is not None and (options.quick or options.dtypes):
        raise OptionError("--sample names the one sample to run. Leave out --quick and --dtypes.")
    index, count = _shard(arguments.shard)
    jobs = _jobs(arguments.jobs, options)
    entries, positions = _chosen(options, index, count)
    if arguments.list:
        return _list([entries[position] for position in positions], arguments)
    report = _checked(options, entries, positions, jobs, quiet=arguments.json == _STDOUT)
    return _tell(dataclasses.replace(report, shards=(f"{index}/{count}",)), arguments)


# --- the command line, read


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        device=arguments.device,
        ops=tuple(arguments.ops or ()),
        dtypes=tuple(arguments.dtypes or ()),
        sample=arguments.sample,
        quick=arguments.quick,
        stock_only=arguments.stock_only,
        autocast_dtype=arguments.autocast_dtype,
    )


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        raise OptionError(f"--shard {text!r} is no shard. Expected I/N with I from 1 to N, such as 1/4.")
    return index, count


def _jobs(text: str | None, options: Options) -> int:
    if text is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, _MOST_ON_A_GPU) if options.device == "cuda" else cores
    if not text.isdecimal():
        raise OptionError(f"--jobs {text!r} is no number of processes. Expected 0 or more.")
    return int(text)


def _chosen(options: Options, index: int, count: int) -> tuple[list[Entry], range]:
    """Returns all entries that the options choose, and the positions of those in the shard."""
    try:
        from torch_promote.parity import runner  # takes seconds: it imports PyTorch's op database

        entries = runner.entries(options)
    except ModuleNotFoundError as error:
        raise SamplesError(
            f"PyTorch's samples need {error.name}, which is not installed: pip install numpy expecttest."
        ) from error
    positions = range(index - 1, len(entries), count)
    if not positions:
        raise OptionError(f"--shard {index}/{count} is empty: there are {len(entries)} entries.")
    return entries, positions


def _merge(arguments: argparse.Namespace) -> Report:
    if _options(arguments) != Options() or arguments.shard != "1/1" or arguments.list or arguments.jobs:
        raise OptionError("--merge runs nothing. It takes --json and --junit, and no other option.")
    return merged([Report.from_json(_read_file(name), name) for name in arguments.merge])


# --- the run


def _checked(options: Options, entries: Sequence[Entry], positions: range, jobs: int, *, quiet: bool) -> Report:
    from torch_promote.parity import runner

    results: dict[int, EntryResult] = {}
    interrupted = False
    mismatches = 0
    started = time.perf_counter()
    shard = [entries[position] for position in positions]
    with contextlib.closing(run_entries(shard, options, jobs, runner.run_entry, runner.entries)) as run:
        try:
            with progress("parity", len(shard), quiet=quiet) as step:
                for place, result in run:
                    results[positions[place]] = result
                    mismatches += len(result.mismatches)
                    step(f"mismatches: {mismatches}")
        except KeyboardInterrupt:
            interrupted = True
    seconds = time.perf_counter() - started
    return Report(about(options.device), options, len(entries), results, seconds=seconds, interrupted=interrupted)


# --- what is told


def _tell(report: Report, arguments: argparse.Namespace) -> int:
    as_json = json.dumps(report.to_dict(), indent=2) + "\n"
    files = {arguments.json: as_json, arguments.junit: junit(report)}
    failed = [
        error for name, text in files.items() if name not in (None, _STDOUT) and (error := _write_file(name, text))
    ]
    write(as_json if arguments.json == _STDOUT else render(cli_parity_text.draw(report)))
    if failed:
        raise OptionError(" ".join(failed))
    if report.status == 2:
        raise OptionError("nothing was checked: PyTorch has no sample of what was asked for that it can run.")
    return report.status


def _list(entries: Sequence[Entry], arguments: argparse.Namespace) -> int:
    if arguments.json is None:
        write(render(cli_parity_text.draw_entries(entries)))
        return 0
    text = json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2) + "\n"
    if arguments.json == _STDOUT:
        write(text)
    elif error := _write_file(arguments.json, text):
        raise OptionError(error)
    return 0


def _check_writable(path: Path) -> None:
    """A run of an hour should not end with a file that cannot be written."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise OptionError(f"cannot write {path}: it is a folder, or its folder is not there or not writable.")


def _write_file(name: str, text: str) -> str | None:
    """Writes a file. Returns what is to be said if it cannot be, after the rest of what a long run has found."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        return f"cannot write {name}: {error.strerror}."
    return None


def _read_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {name}: {error}.") from error
