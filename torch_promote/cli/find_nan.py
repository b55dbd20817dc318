"""The command `torch-promote find-nan`: runs a program and reports where the first inf or NaN came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from torch_promote.cli.child_process import end_as
from torch_promote.cli.terminal import say
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
from torch_promote.numerics.traced_process import Record, Request

__all__ = ["add_parser"]

_DESCRIPTION = """\
Runs a Python program as `torch-promote run` does, and reports the first call
with finite inputs and an inf or NaN in its result, forward or backward: the op,
the module, the line, the ranges of its inputs, and whether the dtype is to
blame or the mathematics. The report goes to stderr, stdout is the program's.

PROGRAM is what python takes: a script, a folder or zip file with __main__.py,
-m MODULE, -c CODE, or - for stdin. All arguments after it are the program's.
"""

_EPILOG = """\
examples:
  torch-promote find-nan train.py --lr 0.1       where did the NaN come from?
  torch-promote find-nan --steps 100: train.py   after a hundred good steps
  torch-promote find-nan --raise-at-first train.py
                                                 stop there, with a traceback
  torch-promote find-nan --override softmax=fp32 train.py
                                                 does this override cure it?
  torch-promote find-nan --json nan.json -m package.train

Masks with -inf are no alarm, and neither are steps that GradScaler skips: they
are listed as benign. Skipped steps do not count as steps.

Of a program with several ranks, each rank writes a file of its own with --json:
nan.rank0.json, nan.rank1.json.

exit status: the program's, if it is not 0. 1 if an origin was found, or the
program left no report. 2 if the command line is invalid: nothing has run then.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "find-nan",
        help="run a program and report where the first inf or NaN came from",
        usage="torch-promote find-nan [options] PROGRAM [arguments of the program]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="F.json", help="write the report as JSON")
    parser.add_argument(
        "--raise-at-first", action="store_true", help="raise an error at the first origin, from the line that made it"
    )
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_file("--json", arguments.json, ".json")
    first, end = parse_steps(arguments.steps)
    options = {"raise_at_first": arguments.raise_at_first}
    request = Request("", options, finds_nonfinite=True, first=first, end=end)
    status, program, records = run_program(arguments, "find-nan", request)
    reports = {tag: record for tag, record in name_records(records, program).items() if record.found is not None}
    failed = False
    for tag, record in reports.items():
        if tag or len(reports) > 1:
            say(f"torch-promote: {spell_tag(tag)}")
        say(record.text, is_report=True)
        _say_next(record, arguments.override or [])
        failed |= not _write(record, arguments.json, tag)
    missing = why_nothing(records, program, arguments.steps)
    if missing is not None and not reports:
        say(f"torch-promote: {missing}")
    if status == 0 and (failed or not reports or any(record.found for record in reports.values())):
        return 1
    return end_as(status, arguments.is_process)


def _say_next(record: Record, tried: Sequence[str]) -> None:
    """Names the override to try, unless the command line has one for the op."""
    if record.override is None:
        return
    op = record.override.removeprefix("aten::")
    known = {one.partition("=")[0].strip().removeprefix("aten::") for text in tried for one in text.split(",")}
    if known.isdisjoint((op, op.partition(".")[0])):
        say(f"torch-promote: to see whether float32 cures it, run it again with --override {op}=fp32")


def _write(record: Record, asked: str | None, tag: str) -> bool:
    """Writes the file, and returns whether that worked."""
    if asked is None:
        return True
    path = path_for(asked, ".json", tag)
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(record.data, file, indent=2)
            file.write("\n")
    except OSError as error:
        say(f"torch-promote: error: {path} cannot be written: {error.strerror or error}.")
        return False
    say(f"torch-promote: wrote {path}")
    return True
