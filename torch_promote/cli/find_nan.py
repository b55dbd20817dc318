"""The command `torch-promote find-nan`: runs a program and reports where the first inf or NaN came from."""

from __future__ import annotations

import argparse

from torch_promote.cli.output import file
from torch_promote.cli.user_program import PROGRAM, add_record_options, report_each, run_recorded
from torch_promote.numerics.traced_process import Request

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

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

Masks with -inf and steps that GradScaler skips are no alarm, but listed as
benign, with the number of skipped steps and a scale that would do. Each rank
writes a file of its own, such as nan.rank1.json.

exit status: the program's, if it is not 0. 1 if an origin was found, GradScaler
skipped all steps, or the program left no report. 2 if the command line is invalid: nothing has run then.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", metavar="F.json", type=file(".json"), help="write the report as JSON")
    parser.add_argument(
        "--raise-at-first", action="store_true", help="raise an error at the first origin, from the line that made it"
    )
    add_record_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    request = Request("", {"raise_at_first": arguments.raise_at_first}, finds_nonfinite=True)
    outcome = run_recorded(arguments, "find-nan", request)
    tried = {one.partition("=")[0].strip().removeprefix("aten::") for one in ",".join(arguments.override).split(",")}
    for record in outcome.records.values():
        # A forked process inherits the origin that its parent found, and does not report it.
        data = record.data if record.data and (record.found or record.data["origin"] is None) else {}
        for attempt in data.get("attempts", ()):
            if attempt["option"] and tried.isdisjoint(name for op in attempt["ops"] for name in _names_of(op)):
                again = f"run it again with {attempt['option']}"
                record.text += f"\ntorch-promote: to see whether float32 cures it, {again}"
    return report_each(arguments, outcome, {".json": arguments.json})


def _names_of(key: str) -> tuple[str, str]:
    name = key.removeprefix("aten::")
    return name, name.partition(".")[0]
