"""The command `torch-promote trace`: reports which op ran in which dtype and why, in a program or a saved trace."""

from __future__ import annotations

import argparse
import os

from torch_promote.cli.output import closest_files, file, natural, say, show
from torch_promote.cli.user_program import PROGRAM, add_record_options, end_as, report_each, run_recorded
from torch_promote.cli.user_program import check as check_program
from torch_promote.errors import OptionError
from torch_promote.recording import SUFFIX

DESCRIPTION = f"""\
Runs a Python program as `torch-promote run` does, and reports which op ran in
which dtype and why: the policy of each call, who set it, and the casts with
their lines. A summary goes to stderr, stdout is the program's.

{PROGRAM}
--read runs nothing: it shows what --record wrote. PATTERN explains the
calls of a module, an op or a line in it: in which dtypes they came, ran and
returned, by which policy and who set it, what was cast, what you can change.
"""

EPILOG = """\
examples:
  torch-promote trace --html run.html train.py --lr 0.1
                                                 a page to open in a browser
  torch-promote trace --steps 10:12 --record run.jsonl.gz train.py
                                                 steps 10 and 11 alone
  torch-promote trace --read run.jsonl.gz        then: the report of the file
  torch-promote trace --read run.jsonl.gz --html run.html
  torch-promote trace --read run.jsonl.gz blocks.3.attn
                                                 what happened in a module;
  torch-promote trace --read run.jsonl.gz softmax.int
                                                 to an op (module=softmax is a
                                                 module of that name); or
  torch-promote trace --read run.jsonl.gz train.py:41
                                                 at a line
  torch-promote trace --values --html run.html -m package.train
                                                 and the range of each result
  torch-promote trace --record a.jsonl.gz --steps 0:3 train.py
  torch-promote diff a.jsonl.gz b.jsonl.gz       two such runs: where do their
                                                 numbers begin to differ?
  torch-promote trace --stock train.py           PyTorch's own autocast

The thread that imports PyTorch first is traced, with its backward passes.
Ctrl-C and errors of the program keep what there is: the report is written.
Each rank writes a file of its own, such as run.rank1.html, and so does another
process in which autocast had a policy for a call: run.pid1234.html.

exit status: the program's. 2 if the command line is invalid: nothing has run
then. 1 if the program succeeded and left no report. With --read: 0, or 2 if the
file is no recording, or nothing or several things in it match the pattern.
"""

#: The options that name a file, and how its name ends.
_SUFFIXES = {"html": ".html", "json": ".json"}
#: The options that show a recording.
_OF_READ = ("read", *_SUFFIXES, "max-calls")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    files = {
        "html": "write a page, which needs no network",
        "json": "write all that is known as JSON, for other programs",
    }
    for name, text in files.items():
        suffix = _SUFFIXES[name]
        parser.add_argument(f"--{name}", metavar=f"F{suffix}", type=file(suffix), help=text)
    parser.add_argument(
        "--record",
        metavar=f"F{SUFFIX}",
        type=file(SUFFIX),
        help="record what is computed, while the program runs, for `torch-promote diff` and --read",
    )
    parser.add_argument(
        "--read",
        metavar=f"F{SUFFIX}",
        help="run no program: show a recording, or explain what it says of a module, an op or the end of a line, which "
        "stands in the place of the program",
    )
    parser.add_argument("--values", action="store_true", help="record the ranges of results, too; slower")
    parser.add_argument(
        "--max-calls",
        metavar="N",
        type=natural,
        default=50_000,
        help="how many calls are kept one by one (default: 50000); sums include all",
    )
    add_record_options(parser)


def check(arguments: argparse.Namespace) -> None:
    """Raises OptionError if there is no such program, or no such recording."""
    if arguments.read is None:
        check_program(arguments)
        return
    behind = len(arguments.words) - len(arguments.program)
    given = [(place, word.partition("=")[0]) for place, word in enumerate(arguments.words)]
    options = [(place, word) for place, word in given if word in arguments.options]
    late = [word for place, word in options if word.lstrip("-") in _OF_READ and place >= behind]
    unused = [word for _, word in options if word.lstrip("-") not in _OF_READ] or late
    if unused or len(arguments.program) > 1:
        what = (
            ", ".join(unused) + " behind the pattern" * (unused == late)
            if unused
            else f"{len(arguments.program)} patterns"
        )
        raise OptionError(
            f"--read shows a recording, of one PATTERN or of all: it runs no program. Got {what}. Legal before the "
            f"pattern: {', '.join(f'--{name}' for name in _OF_READ[1:])}."
        )
    if not os.path.exists(arguments.read):
        record = f"`torch-promote trace --record F{SUFFIX} train.py` writes one."
        raise OptionError(f"there is no recording {arguments.read!r}.{closest_files(arguments.read, SUFFIX)} {record}")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    if arguments.read is not None:
        return _read(arguments)
    from torch_promote.numerics.traced_process import Request, named_after
    from torch_promote.observe.call import Unseen

    record = None if arguments.record is None else os.path.abspath(arguments.record)
    options = {"values": arguments.values, "max_calls": arguments.max_calls, "record": record}
    outcome = run_recorded(arguments, Request("", options))
    named = list(outcome.named().values())
    others = [one.report.total.calls for one in outcome.records.values() if one not in named and one.report]
    if named and named[0].report is not None and any(others):
        named[0].report.not_seen.append(
            Unseen(
                "other processes",
                sum(others),
                f"Calls of other processes, such as workers that load data: {sum(others):,}, none with a policy.",
            )
        )
    if record is not None:
        tags = [tag for tag in outcome.named() or [""] if os.path.exists(named_after(record, SUFFIX, tag))]
        if tags:  # none if the program ended before the first step to record
            say(f"torch-promote: recorded {', '.join(named_after(arguments.record, SUFFIX, tag) for tag in tags)}")
    files = {suffix: getattr(arguments, name) for name, suffix in _SUFFIXES.items()}
    return end_as(report_each(arguments, outcome, files), arguments.is_process)


def _read(arguments: argparse.Namespace) -> int:
    """Shows a recording, or explains what it says of something."""
    from torch_promote.reading.trace_report import TraceReport

    report = TraceReport.load(arguments.read, arguments.max_calls)
    shown = report.explain(*arguments.program) if arguments.program else report
    show({}, [shown], False)
    for name in _SUFFIXES:
        path = getattr(arguments, name)
        if path is not None:
            shown.save(path)
            say(f"torch-promote: wrote {path}")
    return 0
