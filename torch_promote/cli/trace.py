"""The command `torch-promote trace`: runs a program and reports which op ran in which dtype, and why."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from torch_promote.cli.child_process import end_as
from torch_promote.cli.terminal import say, width_of_output
from torch_promote.cli.traced_program import (
    add_options,
    check_file,
    name_records,
    parse_steps,
    path_for,
    run_program,
    spell_tag,
    why_nothing,
)
from torch_promote.errors import MissingPackageError, OptionError, TorchPromoteError
from torch_promote.numerics.traced_process import Record, Request
from torch_promote.observe.trace_report import TraceReport

__all__ = ["add_parser"]

_DESCRIPTION = """\
Runs a Python program as `torch-promote run` does, and reports which op ran in
which dtype and why: the policy of each call, who set it, and the casts with
their lines. A summary goes to stderr, stdout is the program's.

PROGRAM is what python takes: a script, a folder or zip file with __main__.py,
-m MODULE, -c CODE, or - for stdin. All arguments after it are the program's.
"""

_EPILOG = """\
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


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "trace",
        help="run a program and report which op ran in which dtype, and why",
        usage="torch-promote trace [options] PROGRAM [arguments of the program]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    for option, suffix in _FILES.items():
        check_file(f"--{option}", getattr(arguments, option), suffix)
    if arguments.html is not None and importlib.util.find_spec("jinja2") is None:
        raise MissingPackageError(
            "--html needs jinja2: pip install jinja2. --json, --csv and --perfetto work without it."
        )
    if arguments.max_calls < 0:
        raise OptionError(f"--max-calls {arguments.max_calls}: the number of calls to keep is 0 or more.")
    first, end = parse_steps(arguments.steps)
    options = {"values": arguments.values, "max_calls": arguments.max_calls}
    request = Request("", options, first=first, end=end)
    status, program, records = run_program(arguments, "trace", request)
    named = name_records(records, program)
    reports = {tag: record.report for tag, record in named.items() if record.report}
    for report in list(reports.values())[:1]:
        report.not_seen += _left_out([one for one in records.values() if one not in named.values()])
    failed = False
    for tag, report in reports.items():
        if tag or len(reports) > 1:
            say(f"torch-promote: {spell_tag(tag)}")
        say(_summary(report), as_is=True)
        failed |= not _write(report, arguments, tag)
    missing = why_nothing(records, program, arguments.steps)
    if missing is not None and not reports:
        say(f"torch-promote: {missing}")
    if status == 0 and (failed or not reports):
        return 1
    return end_as(status, arguments.is_process)


def _summary(report: TraceReport) -> str:
    """Returns the summary, as wide as the terminal if stderr is one; otherwise not wrapped."""
    return str(report) if sys.stderr is None else report.text(width_of_output(sys.stderr))


def _left_out(records: Sequence[Record]) -> list[str]:
    counts = [record.report.total.calls for record in records if record.report is not None]
    calls, processes = sum(counts), sum(count > 0 for count in counts)
    if not calls:
        return []
    who = "1 other process" if processes == 1 else f"{processes} other processes"
    return [f"{who} of the program, such as a worker that loads data: autocast had no policy for its {calls:,} calls."]


def _write(report: TraceReport, arguments: argparse.Namespace, tag: str) -> bool:
    """Writes the files, and returns whether that worked."""
    written, worked = [], True
    for option, suffix in _FILES.items():
        asked = getattr(arguments, option)
        if asked is None:
            continue
        path = path_for(asked, suffix, tag)
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
