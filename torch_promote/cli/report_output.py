"""What `torch-promote compare` and `tune` share: options of a target, tolerances, and where reports go."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch_promote.cli.terminal import say, width_of_output, write
from torch_promote.cli.traced_program import check_file
from torch_promote.errors import MissingPackageError, OptionError
from torch_promote.report.base import load_renderer

__all__ = ["STDOUT", "add_outputs", "add_target", "check_outputs", "output_of_target", "parse_tolerance", "put_out"]

STDOUT = "-"


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the target and how it is run."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function or package.module:function; the function returns (model, step)",
    )
    parser.add_argument(
        "--batches", metavar="N", type=int, default=1, help="how many times a run calls the step (default: 1)"
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where the report goes, besides stdout."""
    parser.add_argument("--html", metavar="F.html", help="write a page, which needs no network")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="F.json",
        help="write JSON to a file, or to stdout in place of the text",
    )


def check_outputs(arguments: argparse.Namespace) -> None:
    """Checks before anything runs that the files can be written.

    Raises:
        OptionError: One of them cannot.
        MissingPackageError: A page needs jinja2, which is not installed.
    """
    check_file("--html", arguments.html, ".html")
    if arguments.json != STDOUT:
        check_file("--json", arguments.json, ".json")
    if arguments.html is not None and importlib.util.find_spec("jinja2") is None:
        raise MissingPackageError("--html needs jinja2: pip install jinja2. --json works without it.")


@contextlib.contextmanager
def output_of_target(arguments: argparse.Namespace) -> Iterator[None]:
    """Has what a target prints go to stderr if stdout is for JSON alone."""
    if arguments.json == STDOUT and sys.stderr is not None:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield


def put_out(report: Any, arguments: argparse.Namespace, *more: str | None) -> None:
    """Prints a report and writes its files.

    Args:
        report: A `Comparison` or `Tuning`.
        arguments: The parsed command line.
        more: More files to save it to; None is none.

    Raises:
        OptionError: A file cannot be written any more. The report was printed.
    """
    if arguments.json == STDOUT:
        write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        write(f"{load_renderer('terminal').to_text(report.content(), width_of_output() or 100)}\n")
    files = [path for path in (*more, arguments.html, arguments.json) if path not in (None, STDOUT)]
    for path in files:
        report.save(path)
    if files:
        say(f"torch-promote: wrote {', '.join(map(str, files))}")


def parse_tolerance(texts: Sequence[str], zero: bool = True) -> float | dict[str, float]:
    """Returns a tolerance for every metric, or one for each name.

    Args:
        texts: "1e-3", or "loss=1e-3" for each metric.
        zero: Whether it may be 0.

    Raises:
        OptionError: One of them is no tolerance, or they cannot hold together.

    Example:
        >>> parse_tolerance(["1e-3"]), parse_tolerance(["loss=1e-3", "accuracy=0.01"])
        (0.001, {'loss': 0.001, 'accuracy': 0.01})
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf or not (number or zero) or ("=" in text and not name):
            legal = "a number, 0 or more," if zero else "a number above 0"
            raise OptionError(
                f"--tolerance {text}: expected {legal} or NAME=NUMBER, such as 1e-3 or loss=1e-3. It is "
                f"relative to the reference."
            )
        if name in found:
            raise OptionError(f"--tolerance {text}: {name or 'all metrics'} already has {found[name]:g}. Name it once.")
        found[name] = number
    if "" in found and len(found) > 1:
        raise OptionError("--tolerance: give one number for all metrics, or NAME=NUMBER for each, not both.")
    all_metrics = found.pop("", None)
    return found if all_metrics is None else all_metrics
