"""The command `torch-promote parity`: runs PyTorch's samples under stock and ours, and checks both by the reference."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_promote.cli.output import STDOUT, Part, file, natural, progress, show
from torch_promote.errors import OptionError
from torch_promote.policy.cast_policy import DEVICE_TYPES

if TYPE_CHECKING:
    from torch_promote.parity.model import Entry, EntryResult, Options
    from torch_promote.parity.report import ParityReport

#: The default number of worker processes on a GPU. Each CUDA context takes half a gigabyte of its memory.
_MAX_ON_A_GPU = 4

DESCRIPTION = """\
Runs PyTorch's own samples under torch.autocast (stock) and my_autocast (ours),
forward and backward, and checks three things: ours gives the same bits as
stock; under stock, each dispatched op returns what the reference computes
(dtype, and for elementwise ops shape and strides) and autocast inserts the
casts that the reference computes; and the same under ours.

The entries are the rows of the op table, pairs of dtypes, and the ops of
PyTorch's op database (op_db). A sample has a label such as float32/3/mixed: the
dtype of its inputs, a number, and plain, mixed (the inputs alternate between
float32 and the autocast dtype) or lower (float32 inputs are cast to the
autocast dtype). docs/parity.md says more.

devices:
  cpu, cuda, xpu, mps            compares all bits
  fake-cuda, fake-xpu, fake-mps  the policies of this device type without a GPU,
                                 on fake tensors: compares dtypes, shapes and
                                 strides
"""

EPILOG = """\
examples:
  torch-promote parity --quick                     some of the samples
  torch-promote parity                             all samples
  torch-promote parity --ops 'linalg.*' aten::mm   some entries
  torch-promote parity --shard 1/4 --json 1.json
  torch-promote parity --merge 1.json 2.json 3.json 4.json
  torch-promote parity --ops mm --sample float32/0/mixed --jobs 0
                                                   one sample, for a debugger

exit status: 0 no mismatch and no stale known gap; 1 a mismatch or a stale known
gap; 2 invalid command line, or nothing was checked; 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    chosen = parser.add_argument_group("selection")
    chosen.add_argument("--device", default="cpu", help="cpu (default), cuda, xpu, mps, or fake-cuda, ...")
    chosen.add_argument(
        "--ops", nargs="+", action="extend", default=[], metavar="GLOB", help="only entries whose name matches"
    )
    chosen.add_argument(
        "--dtypes", nargs="+", action="extend", default=[], metavar="DTYPE", help="only samples of these dtypes"
    )
    chosen.add_argument("--sample", metavar="LABEL", help="only the sample with this label")
    chosen.add_argument("--quick", action="store_true", help="the first three samples of each op, in two dtypes")
    chosen.add_argument("--stock-only", action="store_true", help="compare stock with the reference; do not run ours")
    chosen.add_argument("--autocast-dtype", metavar="DTYPE", help="the autocast dtype (default: the device's)")
    chosen.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="only every N-th entry, starting with the I-th"
    )
    chosen.add_argument("--merge", nargs="+", metavar="FILE", help="run nothing; merge the JSON files of all shards")
    chosen.add_argument("--list", action="store_true", help="run nothing; print the entries")
    output = parser.add_argument_group("execution and output")
    output.add_argument(
        "--jobs",
        type=natural,
        metavar="N",
        help="worker processes (default: one per core, at most 4 on a GPU); 0: run in this process",
    )
    output.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=file(or_stdout=True),
        metavar="FILE",
        help="write JSON to FILE or to stdout",
    )


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard. Expected I/N with I from 1 to N, such as 1/4")
    return index, count


def check(arguments: argparse.Namespace) -> None:
    """Raises OptionError for files that do not exist."""
    for name in arguments.merge or ():
        if not os.path.exists(name):
            raise OptionError(f"cannot read {name}: there is no such file. `torch-promote parity --json F` writes one.")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    from torch_promote.parity import runner
    from torch_promote.parity.model import Options
    from torch_promote.parity.report import ParityReport, merged

    options = Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)})
    if arguments.merge:
        if options != Options() or arguments.shard != (1, 1) or arguments.list or arguments.jobs is not None:
            raise OptionError("--merge runs nothing, so the only other option that it accepts is --json.")
        return _report(merged(list(map(ParityReport.load, arguments.merge))), arguments)
    if options.sample is not None and (options.quick or options.dtypes):
        raise OptionError("--sample selects a single sample. Remove --quick and --dtypes.")
    try:
        entries = runner.entries(options)  # takes seconds: it imports PyTorch's op database
    except ModuleNotFoundError as error:
        raise OptionError(
            f"PyTorch's samples need {error.name}, which is not installed: pip install numpy expecttest."
        ) from error
    index, count = arguments.shard
    positions = range(index - 1, len(entries), count)
    if not positions:
        raise OptionError(f"--shard {index}/{count} is empty: the number of entries is {len(entries)}.")
    if arguments.list:
        return _list([entries[position] for position in positions], arguments)
    report = _checked(options, entries, positions, arguments)
    return _report(dataclasses.replace(report, shards=(f"{index}/{count}",)), arguments)


def _checked(
    options: Options, entries: Sequence[Entry], positions: range, arguments: argparse.Namespace
) -> ParityReport:
    from torch_promote.parity import runner
    from torch_promote.parity.report import ParityReport, about

    jobs = arguments.jobs
    if jobs is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        jobs = min(cores, _MAX_ON_A_GPU) if options.device in DEVICE_TYPES[1:] else cores
    results: dict[int, EntryResult] = {}
    interrupted = False
    mismatches = 0
    started = time.perf_counter()
    shard = [entries[position] for position in positions]
    with contextlib.closing(runner.run_entries(shard, options, jobs, runner.run_entry, runner.entries)) as run:
        try:
            with progress("parity", len(shard), quiet=arguments.json == STDOUT) as step:
                for place, result in run:
                    results[positions[place]] = result
                    mismatches += len(result.mismatches)
                    step(f"mismatches: {mismatches}")
        except KeyboardInterrupt:
            interrupted = True
    seconds = time.perf_counter() - started
    return ParityReport(about(options.device), options, len(entries), results, seconds=seconds, interrupted=interrupted)


# Output


def _report(report: ParityReport, arguments: argparse.Namespace) -> int:
    _put_out(report.to_dict(), [report], arguments)
    if report.status == 2:
        raise OptionError("nothing was checked: PyTorch has no sample for this selection that it can run.")
    return report.status


def _list(entries: Sequence[Entry], arguments: argparse.Namespace) -> int:
    sources = sorted(Counter(entry.source for entry in entries).items())
    counts = ", ".join(f"{name} {count:,}" for name, count in sources)
    listing = [{"entry": entry.name, "source": entry.source} for entry in entries]
    data = [dataclasses.asdict(entry) for entry in entries]
    _put_out(data, [listing, f"entries: {len(entries)} ({counts})"], arguments)
    return 0


def _put_out(data: Any, parts: Sequence[Part], arguments: argparse.Namespace) -> None:
    """Prints and writes the results; an error of the file comes last, so that it does not cost what is printed."""
    show(data, parts, arguments.json == STDOUT)
    if arguments.json not in (None, STDOUT):
        try:
            Path(arguments.json).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot write {arguments.json}: {error.strerror}.") from error
