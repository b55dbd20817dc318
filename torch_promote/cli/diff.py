"""The command `torch-promote diff`: compares two recorded runs, and says what differs first."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from torch_promote.cli.output import closest_files, file, natural, say, show
from torch_promote.errors import OptionError
from torch_promote.recording import SUFFIX

if TYPE_CHECKING:
    from torch_promote.reading.difference import Difference

DESCRIPTION = """\
Compares two recorded runs of a program, which may have run on other machines,
devices or versions of PyTorch, and says what differs first.

kinds of differences, and what each rests on:
  weight     a parameter or buffer has other contents when it is first read
  state      the optimizer's state, GradScaler's or a schedule's differs at the
             start of a step
  input      a batch differs, or random numbers of generators whose states do
  arguments  a number, flag, size or text of a call: both values are shown
  shape      tensors of other shapes
  policy     a call ran in another dtype, or under another policy
  structure  calls or modules of one run alone
  op         other results on equal inputs and arguments
  rounding   other kernels round differently; no call is to blame

Errors are relative L2 norms, estimated from the sketches in the recordings.

--match pairs two implementations of one model, such as a reference A and a port
B, by the values of their results instead of by names: which modules and weights
of B are those of A, and where B goes wrong.
"""

EPILOG = """\
examples:
  torch-promote trace --record a.jsonl.gz train.py
                                                 first: record each run, there
                                                 or here, and copy the files
  torch-promote diff a.jsonl.gz b.jsonl.gz       what differs first
  torch-promote diff a.jsonl.gz b.jsonl.gz --html diff.html
                                                 a page to open in a browser
  torch-promote diff run.rank0.jsonl.gz run.rank3.jsonl.gz
                                                 two ranks of one job
  torch-promote diff here/ there/ --rank 3       rank 3 of two jobs, each of
                                                 which has a folder
  torch-promote trace --stock --record stock.jsonl.gz train.py
  torch-promote trace --record ours.jsonl.gz train.py
  torch-promote diff stock.jsonl.gz ours.jsonl.gz
                                                 does this package compute the
                                                 bits of PyTorch's autocast?
  torch-promote diff good.jsonl.gz new.jsonl.gz --tolerance 1e-5
                                                 in CI: fail if an error is
                                                 larger than rounding

  torch-promote diff --match reference.jsonl.gz port.jsonl.gz
                                                 is the port right, and where
                                                 does it go wrong?

Files that TraceReport.save wrote can be compared, too. Without values, only
their dtypes, policies, casts and arguments are. For tests, there is a pytest
option, --record-numerics=DIR.

exit status: 0 if the runs are equal, or within --tolerance; 1 if they differ,
or have no call in common. With --match, 0 if all outputs of A have a
counterpart in B, and 1 if not. 2 if the command line is invalid, or a file is
not a recording.
"""

_RECORD = f"`torch-promote trace --record F{SUFFIX} train.py` records a run."
_MOST_NAMES = 5
#: The number of calls from which a comparison takes more than a few seconds.
_MANY = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    what = "a recording, or a folder with one"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="the same of the other run")
    parser.add_argument("--html", metavar="F.html", type=file(".html"), help="write a page, which needs no network")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=_tolerance,
        help="exit with 0 if no relative L2 error of a result, loss, gradient or parameter is larger, and no run alone "
        "has any that no compared call reads; with --match, the error up to which results are a pair",
    )
    parser.add_argument(
        "--match",
        action="store_true",
        help="pair two implementations of one model by the values of their results, whatever their names are",
    )
    parser.add_argument("--rank", metavar="N", type=natural, help="compare this rank of both jobs")


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 <= value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"{text} is not a relative L2 error, a number from 0 up")


def check(arguments: argparse.Namespace) -> None:
    """Finds the files, or raises OptionError."""
    arguments.a, arguments.b = (_find(path, arguments.rank) for path in (arguments.a, arguments.b))


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    from torch_promote.reading.trace_report import diff, load

    paths = arguments.a, arguments.b
    one, other = map(load, paths)
    for name, report in zip(paths, (one, other), strict=True):
        if not report.calls:
            raise OptionError(f"{str(name)!r} has no call: its program ran no op, or was stopped early. {_RECORD}")
    if len(one.calls) + len(other.calls) > _MANY:
        say(f"torch-promote: comparing {len(one.calls):,} with {len(other.calls):,} calls ...")
    tolerance = arguments.tolerance
    if arguments.match:
        match = diff(one, other, match=True, tolerance=tolerance)
        if arguments.html is not None:
            match.save(arguments.html)
        return show(match.to_dict(), [match], arguments.json, int(not match.outputs_match))
    difference = diff(one, other)
    if tolerance is not None and not difference.with_values:
        raise OptionError(f"--tolerance compares contents, and a file has none. {_RECORD}")
    if arguments.html is not None:
        difference.save(arguments.html)
    show(difference.to_dict(), [difference], arguments.json)
    return _status(difference, tolerance)


def _status(difference: Difference, tolerance: float | None) -> int:
    if tolerance is None:
        return int(bool(difference) or not difference.compared)
    from torch_promote.report.base import spell_number

    within = difference.is_within(tolerance)
    verdict = "within" if difference.largest <= tolerance else "over"
    text = f"the largest relative L2 error, {spell_number(difference.largest)}, is {verdict} {spell_number(tolerance)}"
    if difference.unmatched and not within:
        alone = "1 result, loss, gradient or parameter of one run alone has no error, so no tolerance covers it"
        if difference.unmatched > 1:
            what = f"{difference.unmatched:,} results, losses, gradients or parameters"
            alone = f"{what} of one run alone have no error, so no tolerance covers them"
        text += f". {alone}"
    say(f"torch-promote: {text}.")
    return int(not within)


def _find(name: str, rank: int | None) -> Path:
    """Returns the file of a run, for one rank. Raises OptionError if there is none, or a folder has several."""
    path = Path(name)
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if one.name.endswith(SUFFIX))
        end = SUFFIX if rank is None else f".rank{rank}{SUFFIX}"
        found = [one for one in names if one.endswith(end)]
        if len(found) == 1:
            return path / found[0]
        listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        remedy = "Name one of them, or choose a rank with --rank." if names else _RECORD
        raise OptionError(f"the folder {name!r} has to have one recording, *{end}. Found: {listed or 'none'}. {remedy}")
    if not name.endswith(SUFFIX):
        raise OptionError(f"{name!r} is not a recording, *{SUFFIX}. {_RECORD}")
    if rank is not None:
        path = Path(f"{re.sub(r'[.]rank[0-9]+$', '', name.removesuffix(SUFFIX))}.rank{rank}{SUFFIX}")
    if not path.is_file():
        ranks = sorted(one.name for one in path.parent.glob(f"{path.name.removesuffix(SUFFIX)}.rank*{SUFFIX}"))
        remedy = f"There are files of ranks, such as {ranks[0]}: choose one with --rank." if ranks else _RECORD
        raise OptionError(f"there is no file {str(path)!r}.{closest_files(str(path), SUFFIX)} {remedy}")
    return path
