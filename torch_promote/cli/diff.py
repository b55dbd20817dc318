"""The command `torch-promote diff`: compares two recorded runs, and names the first call that differs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from torch_promote.cli.output import file, natural, say, show
from torch_promote.errors import OptionError
from torch_promote.observe.difference import Difference
from torch_promote.observe.trace_report import TraceReport
from torch_promote.report.base import spell_number

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]

DESCRIPTION = """\
Compares two recorded runs of a program, which may have run on other machines,
devices or versions of PyTorch, and names the first call whose results differ
while its inputs do not: op, module, line, dtypes and policies of both sides.

kinds of differences:
  policy     a call ran in another dtype, or under another policy
  input      another batch, another order of batches, or other random numbers
  weight     another parameter or buffer: initialization, or another checkpoint
  op         a call with equal inputs has other results: kernel or arguments
  rounding   other kernels round differently; no call is to blame
  structure  calls of one run alone, without an effect on the others

Errors are relative L2 norms, estimated from the sketches in the recordings.
"""

EPILOG = """\
examples:
  torch-promote trace --record a.jsonl.gz train.py
                                                 first: record each run
  torch-promote diff a.jsonl.gz b.jsonl.gz       the first call that differs
  torch-promote diff a.jsonl.gz b.jsonl.gz --html diff.html
                                                 a page to open in a browser
  torch-promote diff a.jsonl.gz b.jsonl.gz --tolerance 1e-5
                                                 is this close enough?
  torch-promote diff here/ there/ --rank 3       rank 3 of two jobs
  torch-promote diff run.rank0.jsonl.gz run.rank3.jsonl.gz
                                                 two ranks of one job

Files of `torch-promote trace --json` can be compared, too. Without --values,
only their dtypes, policies and casts are.

exit status: 0 if the runs are equal, or within --tolerance; 1 if they differ.
2 if the command line is invalid, or a file is not a recording.
"""

_SUFFIXES = (".jsonl.gz", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    what = "a recording, a folder with one, or a saved trace"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="the same of the other run")
    parser.add_argument("--html", metavar="F.html", type=file(".html"), help="write a page, which needs no network")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=_tolerance,
        help="exit with 0 if no relative L2 error of a result, loss, gradient or parameter is larger",
    )
    parser.add_argument("--rank", metavar="N", type=natural, help="compare this rank of both jobs")


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value >= 0:
        return value
    raise argparse.ArgumentTypeError(f"{text} is not a number, 0 or more")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    paths = [_find(path, arguments.rank) for path in (arguments.a, arguments.b)]
    one, other = (TraceReport.load(path) for path in paths)
    if len(one.calls) + len(other.calls) > _MANY:
        say(f"torch-promote: comparing {len(one.calls):,} with {len(other.calls):,} calls ...")
    difference = one.diff(other)
    tolerance = arguments.tolerance
    if tolerance is not None and not difference.with_values:
        raise OptionError(
            "--tolerance needs recordings with values. `torch-promote trace --record F.jsonl.gz train.py` writes them."
        )
    if arguments.html is not None:
        difference.save(arguments.html)
    show(difference.to_dict(), [difference], arguments.json)
    return _status(difference, tolerance)


#: The number of calls from which a comparison takes more than a few seconds.
_MANY = 100_000


def _status(difference: Difference, tolerance: float | None) -> int:
    if tolerance is None:
        return int(bool(difference))
    if difference.is_within(tolerance):
        return 0
    largest = spell_number(difference.largest)
    say(f"torch-promote: the largest relative L2 error, {largest}, is over {spell_number(tolerance)}.")
    return 1


def _find(name: str, rank: int | None) -> Path:
    """Returns the file of a run, for one rank.

    Raises:
        OptionError: There is none, or a folder has several.
    """
    path = Path(name)
    if path.is_dir():
        end = f".rank{rank}.jsonl.gz" if rank is not None else ".jsonl.gz"
        found = sorted(one for one in path.iterdir() if one.name.endswith(end))
        if len(found) == 1:
            return found[0]
        names = ", ".join(one.name for one in found[:5]) or "none"
        remedy = "Name one of them, or choose a rank with --rank." if found else "Name a file."
        raise OptionError(f"the folder {name!r} has to have one recording, *{end}. Found: {names}. {remedy}")
    if rank is not None:
        suffix = next((end for end in _SUFFIXES if name.endswith(end)), "")
        if suffix:
            path = Path(f"{name.removesuffix(suffix)}.rank{rank}{suffix}")
    if not path.is_file():
        raise OptionError(
            f"there is no file {str(path)!r}. `torch-promote trace --record F.jsonl.gz train.py` records a run."
        )
    return path
