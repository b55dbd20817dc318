"""The command `torch-promote find-nan`: runs a program and reports where the first inf or NaN came from."""

from __future__ import annotations

import argparse
import json

from torch_promote.cli.output import check_file
from torch_promote.cli.user_program import PROGRAM, add_record_options, report_each, run_recorded
from torch_promote.numerics.traced_process import Record, Request
from torch_promote.policy.files import write_atomically

__all__ = ["DESCRIPTION", "EPILOG", "USAGE", "add_arguments", "run"]

USAGE = "torch-promote find-nan [options] PROGRAM [arguments of the program]"

DESCRIPTION = f"""\
Runs a Python program as `torch-promote run` does, and reports the first call
with finite inputs and an inf or NaN in its result, forward or backward: the op,
the module, the line, the ranges of its inputs, and whether the dtype is to
blame or the mathematics. The report goes to stderr, stdout is the program's.

{PROGRAM}"""

EPILOG = """\
examples:
  torch-promote find-nan train.py --lr 0.1       where did the NaN come from?
  torch-promote find-nan --steps 100: train.py   after a hundred good steps
  torch-promote find-nan --raise-at-first train.py
                                                 stop there, with a traceback
  torch-promote find-nan --override softmax=fp32 train.py
                                                 does this override cure it?

Masks with -inf are no alarm, and neither are steps that GradScaler skips: they
are listed as benign. Skipped steps do not count as steps.

Each rank writes a file of its own with --json, such as nan.rank1.json.

exit status: the program's, if it is not 0. 1 if an origin was found, or the
program left no report. 2 if the command line is invalid: nothing has run then.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", metavar="F.json", help="write the report as JSON")
    parser.add_argument(
        "--raise-at-first", action="store_true", help="raise an error at the first origin, from the line that made it"
    )
    add_record_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    check_file("--json", arguments.json, ".json")
    request = Request("", {"raise_at_first": arguments.raise_at_first}, finds_nonfinite=True)
    outcome = run_recorded(arguments, "find-nan", request)
    tried = {one.partition("=")[0].strip().removeprefix("aten::") for one in ",".join(arguments.override).split(",")}
    for record in outcome.records.values():
        op = (record.override or "").removeprefix("aten::")
        if op and tried.isdisjoint((op, op.partition(".")[0])):
            record.text += f"\ntorch-promote: to see whether float32 cures it, run it again with --override {op}=fp32"
    return report_each(arguments, outcome, {".json": arguments.json}, _save)


def _save(record: Record, path: str) -> None:
    write_atomically(path, json.dumps(record.data, indent=2) + "\n")
