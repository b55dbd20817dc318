"""The command `torch-promote trace`: runs a program and reports which op ran in which dtype, and why."""

from __future__ import annotations

import argparse

from torch_promote.cli.output import check_file
from torch_promote.cli.user_program import PROGRAM, add_record_options, report_each, run_recorded
from torch_promote.errors import OptionError
from torch_promote.numerics.traced_process import Record, Request

__all__ = ["DESCRIPTION", "EPILOG", "USAGE", "add_arguments", "run"]

USAGE = "torch-promote trace [options] PROGRAM [arguments of the program]"

DESCRIPTION = f"""\
Runs a Python program as `torch-promote run` does, and reports which op ran in
which dtype and why: the policy of each call, who set it, and the casts with
their lines. A summary goes to stderr, stdout is the program's.

{PROGRAM}"""

EPILOG = """\
examples:
  torch-promote trace --html run.html train.py --lr 0.1
                                                 a page to open in a browser
  torch-promote trace --steps 10:12 --json run.json train.py
                                                 steps 10 and 11 alone
  torch-promote explain run.json blocks.3.attn   then: what happened there?
  torch-promote trace --values --html run.html -m package.train
                                                 and the range of each result
  torch-promote trace --stock --perfetto run.trace.json train.py
                                                 PyTorch's own autocast

The thread that imports PyTorch first is traced, with its backward passes.
Ctrl-C and errors of the program keep what there is: the report is written.
A step that GradScaler skips is no optimizer step; if there are several
optimizers, the steps of each count.

Each rank writes a file of its own, such as run.rank1.html, and so does another
process in which autocast had a policy for a call: run.pid1234.html.

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
    add_record_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    files = {suffix: getattr(arguments, option) for option, suffix in _FILES.items()}
    for option, suffix in _FILES.items():
        check_file(f"--{option}", files[suffix], suffix)
    if arguments.max_calls < 0:
        raise OptionError(f"--max-calls {arguments.max_calls}: the number of calls to keep is 0 or more.")
    options = {"values": arguments.values, "max_calls": arguments.max_calls}
    outcome = run_recorded(arguments, "trace", Request("", options))
    named = list(outcome.named().values())
    others = [one.report.total.calls for one in outcome.records.values() if one not in named and one.report]
    if named and named[0].report is not None and any(others):
        named[0].report.not_seen.append(
            f"other processes, such as workers that load data: {sum(others):,} calls, none with a policy."
        )
    return report_each(arguments, outcome, files, _save)


def _save(record: Record, path: str) -> None:
    assert record.report is not None
    record.report.save(path)
