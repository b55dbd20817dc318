"""The command `torch-promote bench`: regions and ops timed against stock autocast."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_promote._terminal import check_rich, render, table
from torch_promote.bench import SUITES, Result, run

__all__ = ["add_parser"]

_DESCRIPTION = """\
Times regions and ops under torch.autocast and under my_autocast, in turn, in
one process and one thread. The figure is ours / stock: the median over the
rounds, with its quartiles. Below 1 is faster than stock.

suites:
  region  construct, enter and leave a region
  ops     ops with nothing to cast, with casts, with cached weights
  import  outside regions: this package imported or not (two processes)
"""


def add_parser(commands: Any) -> None:
    """Adds the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "bench",
        help="time regions and ops against stock autocast",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", help="only this suite; may be repeated")
    parser.add_argument("--rounds", type=_rounds, default=31, metavar="N", help="rounds of each case (default 31)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=_run)


def _rounds(text: str) -> int:
    rounds = int(text) if text.isdecimal() else 0
    if rounds < 2:
        raise argparse.ArgumentTypeError(f"expected a number of rounds, 2 or more, got {text!r}")
    return rounds


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        check_rich()
    results: list[Result] = []
    with _progress(quiet=arguments.json) as step:
        for suite in arguments.suite or SUITES:
            for result in run(suite, arguments.rounds):
                results.append(result)
                step(result.case)
    if arguments.json:
        data = {"torch": torch.__version__, "rounds": arguments.rounds, "results": [r.as_dict() for r in results]}
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        sys.stdout.write(render([_draw(results), "", f"torch {torch.__version__}, {arguments.rounds} rounds"]))
    return 0


def _draw(results: list[Result]) -> Any:
    listing = table("suite", "case", "ours / stock", "quartiles", "ours, ns", "stock, ns")
    for result in results:
        quartiles = f"{result.low:.2f} to {result.high:.2f}"
        times = (f"{result.ours_ns:.0f}", f"{result.stock_ns:.0f}")
        listing.add_row(result.suite, result.case, f"{result.ratio:.2f}", quartiles, *times)
    return listing


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A spinner on stderr with the case just done, where stderr is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda case: None
        return
    from rich.console import Console

    with Console(stderr=True).status("timing") as status:
        yield lambda case: status.update(f"timing (done: {case})")
