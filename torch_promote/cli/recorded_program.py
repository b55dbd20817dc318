"""Runs a program that leaves records, for `torch-promote trace` and `torch-promote find-nan`.

NOTE [ One file for each process ]
A program may have several processes: ranks, workers of a DataLoader, a launcher. No two write one file. The report of
the program itself goes to the file that was named, that of a rank to a file with its number (run.rank1.json), that of
any other process to one with its id, if autocast had a policy for a call in it. Workers that only load data have none.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch_promote.cli.output import follow, say
from torch_promote.cli.user_program import LEFT_NO_REPORT, add_policy_options, command_of, end_as, run_to_end, settings
from torch_promote.errors import OptionError
from torch_promote.numerics.traced_process import VARIABLE, Record, Request, read_progress, read_records
from torch_promote.regions import installation as environment

__all__ = ["Outcome", "add_options", "parse_steps", "path_for", "run_program", "tell_each"]

_STEPS = re.compile(r"(\d*)(:?)(\d*)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        status: Its status, negative if a signal ended it.
        process: Its process id.
        records: The records of its processes, by process id.
    """

    status: int
    process: int
    records: Mapping[int, Record]

    def named(self) -> dict[str, Record]:
        """Returns the records that count, by what is put into the names of their files.

        See NOTE [ One file for each process ]. The program's own is "" unless it is a rank.
        """
        named: dict[str, Record] = {}
        for process, record in sorted(self.records.items()):
            parent = self.records.get(record.parent)
            is_rank = record.rank is not None and (parent is None or parent.rank != record.rank)
            if process != self.process and not is_rank and not _has_content(record):
                continue
            tag = "" if record.rank is None else f"rank{record.rank}"
            if (process != self.process and not is_rank) or tag in named:
                tag = f"{tag}.pid{process}".lstrip(".")
            named[tag] = record
        if len(named) > 1 and "" in named and not _has_content(named[""]):  # a launcher
            del named[""]
        return dict(sorted(named.items(), key=lambda item: (item[1].process != self.process, item[0])))


def _has_content(record: Record) -> bool:
    return bool(record.found if record.report is None else record.report.total.policies)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that both commands have."""
    parser.add_argument(
        "--steps",
        metavar="A:B",
        help="only optimizer steps A to B - 1, counted from 0; also A: and :B, or A for one step. A step is all that "
        "runs after the step before it, up to the end of optimizer.step()",
    )
    add_policy_options(parser)
    parser.add_argument(
        "--stock",
        action="store_true",
        help="keep PyTorch's own autocast; by default, torch.autocast opens regions of torch_promote, as in run",
    )


def parse_steps(text: str | None) -> tuple[int, int | None]:
    """Returns the first of the steps, and the one before which they end, None for the end of the program.

    Raises:
        OptionError: The text is not a range, or an empty one.

    Example:
        >>> parse_steps("2:5"), parse_steps("2:"), parse_steps(":5"), parse_steps("2"), parse_steps(None)
        ((2, 5), (2, None), (0, 5), (2, 3), (0, None))
    """
    if text is None:
        return 0, None
    match = _STEPS.fullmatch(text)
    if match is None or not (match[1] or match[3]):
        raise OptionError(
            f"--steps {text}: not a range of steps. Write A:B, as in 10:12 for steps 10 and 11; also A:, :B, or A."
        )
    first = int(match[1] or 0)
    end = int(match[3]) if match[3] else None if match[2] else first + 1
    if end is not None and end <= first:
        raise OptionError(f"--steps {text}: there is no step in it. B comes after A, and does not count itself.")
    return first, end


def run_program(arguments: argparse.Namespace, what: str, request: Request) -> Outcome:
    """Runs the program to its end.

    Args:
        arguments: The parsed command line.
        what: The command's name.
        request: What its processes do; the folder is not yet known.

    Raises:
        OptionError, PolicyError: The command line cannot be carried out. Nothing has run.
    """
    command = command_of(arguments, what)
    variables, _ = settings(arguments)
    if arguments.stock:
        if arguments.policy is not None or arguments.override or arguments.cache is not None:
            raise OptionError("--stock leaves torch.autocast PyTorch's, which has no --policy, --override or --cache.")
        variables[environment.AUTOCAST] = "0"
    watched = sys.stderr is not None and sys.stderr.isatty()
    with tempfile.TemporaryDirectory(prefix="torch-promote-") as folder:

        def describe() -> str:
            calls, steps = read_progress(Path(folder))
            return f"torch-promote: calls: {calls:,}, optimizer steps: {steps:,}" if calls or steps else ""

        variables[VARIABLE] = replace(request, folder=folder, shows_progress=watched).to_text()
        with follow(describe, quiet=not watched):
            program = run_to_end(command, variables)
        return Outcome(program.returncode, program.pid, read_records(Path(folder)))


def tell_each(
    arguments: argparse.Namespace, outcome: Outcome, records: Mapping[str, Record], tell: Callable[[str, Record], bool]
) -> int:
    """Prints the reports of the processes.

    Args:
        arguments: The parsed command line.
        outcome: How the program ended.
        records: The records with a report, by what is put into the names of their files.
        tell: Prints a record and writes its files. Returns whether it worked and the command found nothing.

    Returns:
        The exit status: the program's; 1 if the program succeeded, and there is no report or `tell` returned False.
    """
    good = bool(records)
    for tag, record in records.items():
        if tag or len(records) > 1:
            say(f"torch-promote: {tag or 'the program'}")
        good &= tell(tag, record)
    own = outcome.records.get(outcome.process)
    if not records and own is None:
        say(f"torch-promote: {LEFT_NO_REPORT}")
    elif not records and own is not None and own.report is None and own.found is None:
        say(
            f"torch-promote: the program ended before --steps {arguments.steps}. Optimizer steps: {own.steps}; a step "
            "that GradScaler skips does not count."
        )
    if outcome.status == 0 and not good:
        return 1
    return end_as(outcome.status, arguments.is_process)


def path_for(path: str, suffix: str, tag: str) -> str:
    """Returns the path of the file for one process.

    Example:
        >>> path_for("out/run.trace.json", ".trace.json", "rank1"), path_for("run.html", ".html", "")
        ('out/run.rank1.trace.json', 'run.html')
    """
    return f"{path.removesuffix(suffix)}.{tag}{suffix}" if tag else path
