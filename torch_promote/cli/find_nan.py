"""The command `torch-promote find-nan`: runs a program and reports where the first inf or NaN came from."""

from __future__ import annotations

import argparse
import json

from torch_promote.cli.output import check_file, say
from torch_promote.cli.recorded_program import add_options, parse_steps, path_for, run_program, tell_each
from torch_promote.numerics.traced_process import Record, Request

__all__ = ["DESCRIPTION", "EPILOG", "USAGE", "add_arguments", "run"]

USAGE = "torch-promote find-nan [options] PROGRAM [arguments of the program]"

DESCRIPTION = """\
Runs a Python program as `torch-promote run` does, and reports the first call
with finite inputs and an inf or NaN in its result, forward or backward: the op,
the module, the line, the ranges of its inputs, and whether the dtype is to
blame or the mathematics. The report goes to stderr, stdout is the program's.

PROGRAM is what python takes: a script, a folder or zip file with __main__.py,
-m MODULE, -c CODE, or - for stdin. All arguments after it are the program's.
"""

EPILOG = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", metavar="F.json", help="write the report as JSON")
    parser.add_argument(
        "--raise-at-first", action="store_true", help="raise an error at the first origin, from the line that made it"
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    check_file("--json", arguments.json, ".json")
    first, end = parse_steps(arguments.steps)
    options = {"raise_at_first": arguments.raise_at_first}
    request = Request("", options, finds_nonfinite=True, first=first, end=end)
    outcome = run_program(arguments, "find-nan", request)
    records = {tag: record for tag, record in outcome.named().items() if record.found is not None}
    return tell_each(arguments, outcome, records, lambda tag, record: _tell(arguments, tag, record))


def _tell(arguments: argparse.Namespace, tag: str, record: Record) -> bool:
    """Prints the report, writes its file, and returns whether that worked and there is no origin."""
    say(record.text)
    if record.override is not None:
        op = record.override.removeprefix("aten::")
        tried = ",".join(arguments.override).split(",")
        known = {one.partition("=")[0].strip().removeprefix("aten::") for one in tried}
        if known.isdisjoint((op, op.partition(".")[0])):
            say(f"torch-promote: to see whether float32 cures it, run it again with --override {op}=fp32")
    if arguments.json is not None:
        path = path_for(arguments.json, ".json", tag)
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(json.dumps(record.data, indent=2) + "\n")
        except OSError as error:
            say(f"torch-promote: error: {path} cannot be written: {error.strerror or error}.")
            return False
        say(f"torch-promote: wrote {path}")
    return not record.found
