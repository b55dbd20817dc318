"""What `torch-promote trace` and `torch-promote find-nan` share: a program that leaves records, and files for reports.

NOTE [ One file for each process ]
A program may have several processes: ranks, workers of a DataLoader, a launcher. No two write one file. The report of
the program itself goes to the file that was named, that of a rank to a file with its number (run.rank1.json), that of
any other process to one with its id, if autocast had a policy for a call in it. Workers that only load data have none.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch_promote.cli.child_process import run_to_end
from torch_promote.cli.progress import follow
from torch_promote.cli.python_program import add_policy_options, command_of, settings
from torch_promote.errors import OptionError
from torch_promote.numerics.traced_process import VARIABLE, Record, Request, read_progress, read_records
from torch_promote.regions import installation as environment

__all__ = [
    "add_options",
    "check_file",
    "name_records",
    "parse_steps",
    "path_for",
    "run_program",
    "spell_tag",
    "why_nothing",
]

_STEPS = re.compile(r"(\d*)(:?)(\d*)")


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


def check_file(option: str, path: str | None, suffix: str) -> None:
    """Checks before the program runs that a report can be written to a file.

    Raises:
        OptionError: The name does not end as it has to, or the file cannot be written.
    """
    if path is None:
        return
    if not path.endswith(suffix) or (suffix == ".json" and path.endswith(".trace.json")):
        other = ". A file for Perfetto is an option of its own, --perfetto" if path.endswith(".trace.json") else ""
        raise OptionError(f"{option} {path}: the file's name has to end in {suffix}{other}.")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise OptionError(f"{option} {path}: there is no folder {folder!r}. Create it first.")
    if os.path.isdir(path):
        raise OptionError(f"{option} {path}: this is a folder. Name a file in it.")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise OptionError(f"{option} {path}: it cannot be written (permission denied).")


def run_program(arguments: argparse.Namespace, what: str, request: Request) -> tuple[int, int, dict[int, Record]]:
    """Runs the program to its end.

    Args:
        arguments: The parsed command line.
        what: The command's name.
        request: What its processes do; the folder is not yet known.

    Returns:
        The program's status, negative if a signal ended it, its process id, and the records of its processes.

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
        variables[VARIABLE] = replace(request, folder=folder, shows_progress=watched).to_text()
        with follow(lambda: _progress(Path(folder)), quiet=not watched):
            program = run_to_end(command, variables)
        return program.returncode, program.pid, read_records(Path(folder))


def _progress(folder: Path) -> str:
    calls, steps = read_progress(folder)
    counted = [f"{calls:,} calls"] * (calls > 0) + [f"{steps:,} optimizer steps"] * (steps > 0)
    return f"torch-promote: {' and '.join(counted)} so far" if counted else ""


def name_records(records: Mapping[int, Record], program: int) -> dict[str, Record]:
    """Returns the records that count, by what is put into the names of their files.

    See NOTE [ One file for each process ]. The program's own is "" unless it is a rank.

    Args:
        records: The records, by process id.
        program: The process id of the program.
    """
    named: dict[str, Record] = {}
    for process, record in sorted(records.items()):
        around = records.get(record.parent)
        has_own_rank = record.rank is not None and (around is None or around.rank != record.rank)
        if process != program and not has_own_rank and not _matters(record):
            continue
        tag = "" if record.rank is None else f"rank{record.rank}"
        if (process != program and not has_own_rank) or tag in named:
            tag = f"{tag}.pid{process}".lstrip(".")
        named[tag] = record
    if len(named) > 1 and "" in named and not _matters(named[""]):  # a launcher
        del named[""]
    return dict(sorted(named.items(), key=lambda item: (item[1].process != program, item[0])))


def _matters(record: Record) -> bool:
    if record.report is None:
        return bool(record.found)
    return bool(record.report.total.policies)


def path_for(path: str, suffix: str, tag: str) -> str:
    """Returns the path of the file for one process.

    Example:
        >>> path_for("out/run.trace.json", ".trace.json", "rank1"), path_for("run.html", ".html", "")
        ('out/run.rank1.trace.json', 'run.html')
    """
    return f"{path.removesuffix(suffix)}.{tag}{suffix}" if tag else path


def why_nothing(records: Mapping[int, Record], program: int, steps: str | None) -> str | None:
    """Returns why the program's own process has no report; None if it has one."""
    record = records.get(program)
    if record is None:
        return (
            "the program left no report: it did not import torch, or it ended without Python's exit handlers (a "
            "signal, os._exit)."
        )
    if record.report is None and record.found is None:
        ended = "1 optimizer step" if record.steps == 1 else f"{record.steps} optimizer steps"
        return (
            f"the program ended after {ended}, so those of --steps {steps} never came. A step that GradScaler skips "
            "does not count."
        )
    return None


def spell_tag(tag: str) -> str:
    """Returns which process a report is of, in words.

    Example:
        >>> spell_tag("rank1"), spell_tag("pid77"), spell_tag("")
        ('rank 1', 'process 77', 'the program')
    """
    words: Sequence[str] = [re.sub(r"^(rank|pid)", r"\1 ", part) for part in tag.split(".") if part]
    return ", ".join(words).replace("pid", "process") or "the program"
