"""The command `torch-promote run`: a Python program whose torch.autocast regions are ours."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from torch_promote.cli.output import natural, say
from torch_promote.cli.user_program import PROGRAM, add_policy_options, end_as, left_no_report, prepare, run_to_end
from torch_promote.cli.user_program import check as check
from torch_promote.errors import OptionError

DESCRIPTION = f"""\
Runs a Python program, unchanged, with torch_promote in place of torch.autocast:
every region of torch.autocast on cpu, cuda, xpu and mps is ours, whether the
program, a library or PyTorch opens it, in the program's child processes too.

{PROGRAM}It runs in a Python process of its own, which takes the place of this one, so
input and output, exit status, tracebacks and signals are the program's.
"""

EPILOG = """\
examples:
  torch-promote run train.py --lr 0.1            same bits as without it
  torch-promote run --override softmax=lower --policy my.toml -m package.train
  torch-promote run --policy off train.py        no casts: what does autocast do
                                                 to this program?
  torch-promote run --crosscheck=bits train.py   check every op of the program
  torch-promote run --monitor logs train.py      numerics in TensorBoard, of one
                                                 step in 100
  torchrun --nproc-per-node 2 -m torch_promote run train.py

The options become environment variables, which child processes inherit and you
can set yourself: TORCH_PROMOTE_AUTOCAST=1, TORCH_PROMOTE_POLICY=cuda,
TORCH_PROMOTE_OVERRIDES=exp=fp32,mm=fp32, TORCH_PROMOTE_CACHE=persistent.
An option takes precedence over its variable; overrides are added.

If an error about dtypes ends the program, a line after its traceback names the
call, its tensors and what cures it; `trace` tries what it can.

--crosscheck checks the thread that imports PyTorch first, its backward passes,
and the same in child processes. The report goes to stderr.

exit status: the program's. 2 if the command line is invalid: nothing has run
then. With --crosscheck, 1 if the program succeeded and there is a mismatch, or
no report.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_policy_options(parser)
    parser.add_argument(
        "--crosscheck",
        nargs="?",
        const="dtype",
        choices=("dtype", "bits"),
        help="check every op of the program, and print a report at its end. dtype (the default level): dtypes, casts "
        "and strides against the reference; bits: also results against stock autocast, bit for bit",
    )
    parser.add_argument(
        "--monitor",
        metavar="DIR",
        help="look at one step of the training in --every, and write figures and alarms to this folder, for "
        "TensorBoard: see tp.monitor",
    )
    parser.add_argument("--every", metavar="N", type=natural, help="with --monitor (default: 100)")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what is installed to stderr first")


def run(arguments: argparse.Namespace) -> int:
    """Runs the program, and returns its exit status: see NOTE [ A fresh interpreter ] in user_program.py."""
    command, variables, info = prepare(arguments)
    variables["TORCH_PROMOTE_ERRORS"] = "1"
    if arguments.verbose:
        say(f"torch-promote: {info}")
    if arguments.monitor is not None or arguments.every is not None:
        variables |= _monitored(arguments)
    if arguments.crosscheck is not None:
        return _run_checked(command, variables, arguments.crosscheck, arguments.is_process)
    if arguments.is_process:
        os.execve(sys.executable, command, variables)
    return end_as(run_to_end(command, variables).returncode, arguments.is_process)


def _monitored(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the variable that monitors the program."""
    from torch_promote.reading.monitor import VARIABLE, check_folder

    if arguments.monitor is None or arguments.every == 0:
        raise OptionError("--every N goes with --monitor DIR, and N is 1 or more.")
    there = Path(arguments.monitor)
    while not there.exists() and there != there.parent:
        there = there.parent
    if there.is_dir() and not os.access(there, os.W_OK):
        raise OptionError(f"--monitor {arguments.monitor}: it cannot be written (permission denied: {str(there)!r}).")
    to, every = check_folder(arguments.monitor), arguments.every or 100
    return {VARIABLE: json.dumps({"to": to, "every": every, "is_child": False})}


def _run_checked(command: list[str], variables: dict[str, str], level: str, is_process: bool) -> int:
    """Runs the program, prints the report of its processes, and returns the exit status."""
    from torch_promote.checking import crosscheck as crosscheck_process
    from torch_promote.checking.report import CrosscheckReport

    title = f"torch-promote: crosscheck, level {level}"
    with tempfile.TemporaryDirectory(prefix="torch-promote-") as folder:
        variables[crosscheck_process.VARIABLE] = f"{level}:{folder}"
        program = run_to_end(command, variables)
        reports = crosscheck_process.read_reports(Path(folder))
    whole = CrosscheckReport()
    for _, report in sorted(reports.items()):
        whole.add(report)
    say(f"{title}, processes: {len(reports)}")
    if reports:
        say(whole)
    if program.pid not in reports:
        say(left_no_report(program.returncode))
    if program.returncode == 0 and (not whole.ok or program.pid not in reports):
        return 1
    return end_as(program.returncode, is_process)
