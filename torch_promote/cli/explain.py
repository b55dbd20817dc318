"""The command `torch-promote explain`: what a trace says of a module, an op or a line."""

from __future__ import annotations

import argparse
import os

from torch_promote.cli.output import show
from torch_promote.errors import OptionError
from torch_promote.observe.trace_report import TraceReport

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Explains what happened to the calls of a module, an op or a line in a trace: in
which dtypes they came, ran and returned, by which policy and who set it, what
was cast, and what you can change.
"""

EPILOG = """\
examples:
  torch-promote trace --json run.json train.py   first: record a program
  torch-promote explain run.json blocks.3.attn   a module, with those inside it
  torch-promote explain run.json softmax         an op, in all modules
  torch-promote explain run.json softmax.int     one of its overloads
  torch-promote explain run.json train.py:41     a line
  torch-promote explain run.json module=softmax  a module named as an op is

exit status: 0. 2 if the file is not a trace, or nothing in it, or several
things, match the pattern.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("file", metavar="FILE.json", help="what `torch-promote trace --json` or report.save(...) wrote")
    parser.add_argument(
        "pattern",
        metavar="PATTERN",
        help='a module\'s path ("blocks.3.attn"), an op ("softmax", "aten::softmax.int") or the end of a line '
        '("train.py:41")',
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    if not os.path.isfile(arguments.file):
        raise OptionError(
            f"there is no file {arguments.file!r}. `torch-promote trace --json F.json train.py` writes one."
        )
    explanation = TraceReport.load(arguments.file).explain(arguments.pattern)
    return show(explanation.to_dict(), [explanation], arguments.json)
