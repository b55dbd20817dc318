"""The command `torch-promote trace`: runs a program and reports which op ran in which dtype, and why."""

from __future__ import annotations

import argparse

from torch_promote.cli.output import check_file, say
from torch_promote.cli.recorded_program import add_options, parse_steps, path_for, run_program, tell_each
from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.numerics.traced_process import Record, Request

__all__ = ["DESCRIPTION", "EPILOG", "USAGE", "add_arguments", "run"]

USAGE = "torch-promote trace [options] PROGRAM [arguments of the program]"

DESCRIPTION = """\
Runs a Python program as `torch-promote run` does, and reports which op ran in
which dtype and why: the policy of each call, who set it, and the casts with
their lines. A summary goes to stderr, stdout is the program's.

PROGRAM is what python takes: a script, a folder or zip file with __main__.py,
-m MODULE, -c CODE, or - for stdin. All arguments after it are the program's.
"""

EPILOG = """\
examples:
  torch-promote trace --html run.html train.py --lr 0.1
                                                 a page to open in a browser
  torch-promote trace --steps 10:12 --json run.json train.py
                                                 steps 10 and 11 alone
  torch-promote explain run.json blocks.3.attn   then: what happened there?
  torch-promote trace --values --html run.html -m package.train
                                                 and the range of each result
  torch-promote trace --override softmax=lower --json after.json train.py
  torch-promote trace --stock --perfetto run.trace.json train.py
                                                 PyTorch's own autocast

The thread that imports PyTorch first is traced, with its backward passes.
Ctrl-C and errors of the program keep what there is: the report is written.
A step that GradScaler skips is no optimizer step; if there are several
optimizers, the steps of each count.

Of a program with several ranks, each writes a file of its own: run.rank0.html,
run.rank1.html. Other processes in which autocast had a policy for a call write
run.pid1234.html; workers that only load data write none.

exit status: the program's. 2 if the command line is invalid: nothing has run
then. 1 if the program succeeded and left no report. An unused override is
shown in the summary, and is no error.
"""

#: The options that name a file, and how its name ends.
_FILES = {"html": ".html", "json": ".json", "csv": ".csv", "perfetto": ".trace.json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--html", metavar="F.html", help="write a page, which needs no network")
    parser.add_argument("--json", metavar="F.json", help="write all that was recorded, for `torch-promote explain`")
    parser.add_argument("--csv", metavar="F.csv", help="write a table with a row for each call")
    parser.add_argument(
        "--perfetto", metavar="F.trace.json", help="write a trace for Perfetto, beside one of torch.profiler"
    )
    parser.add_argument("--values", action="store_true", help="record the ranges of results, too; slower")
    parser.add_argument(
        "--max-calls",
        metavar="N",
        type=int,
        default=50_000,
        help="how many calls are kept one by one (default: 50000); sums include all",
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    for option, suffix in _FILES.items():
        check_file(f"--{option}", getattr(arguments, option), suffix)
    if arguments.max_calls < 0:
        raise OptionError(f"--max-calls {arguments.max_calls}: the number of calls to keep is 0 or more.")
    first, end = parse_steps(arguments.steps)
    options = {"values": arguments.values, "max_calls": arguments.max_calls}
    outcome = run_program(arguments, "trace", Request("", options, first=first, end=end))
    named = outcome.named()
    records = {tag: record for tag, record in named.items() if record.report is not None}
    left_out = [one.report.total.calls for one in outcome.records.values() if one not in named.values() and one.report]
    for record in list(records.values())[:1]:
        if any(left_out) and record.report is not None:
            record.report.not_seen.append(
                f"other processes, such as workers that load data: {sum(left_out):,} calls, none with a policy."
            )
    return tell_each(arguments, outcome, records, lambda tag, record: _tell(arguments, tag, record))


def _tell(arguments: argparse.Namespace, tag: str, record: Record) -> bool:
    """Prints the summary, writes the files, and returns whether that worked."""
    report = record.report
    assert report is not None
    say(report)
    written, worked = [], True
    for option, suffix in _FILES.items():
        if getattr(arguments, option) is None:
            continue
        path = path_for(getattr(arguments, option), suffix, tag)
        try:
            report.save(path)
        except (OSError, TorchPromoteError) as error:
            say(f"torch-promote: error: {error}")
            worked = False
        else:
            written.append(path)
    if written:
        say(f"torch-promote: wrote {', '.join(written)}")
    return worked
