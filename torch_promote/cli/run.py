"""The command `torch-promote run`: a Python program whose torch.autocast regions are ours.

NOTE [ A fresh interpreter ]
This process has imported PyTorch to check the command line. A program that runs in it would find its own settings
ignored that PyTorch reads when it is imported (OMP_NUM_THREADS, TORCH_LOGS, PYTORCH_CUDA_ALLOC_CONF). So the command
checks everything, sets the environment variables of torch_promote/regions/installation.py, and replaces itself with
`python script.py`. The rest is Python's own: `__main__`, sys.argv, tracebacks, signals, the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

from torch_promote.checking import crosscheck as crosscheck_process
from torch_promote.checking.checker import Level
from torch_promote.checking.report import CrosscheckReport
from torch_promote.cli.child_process import end_as, run_to_end
from torch_promote.cli.progress import follow
from torch_promote.cli.python_program import add_policy_options, command_of, settings
from torch_promote.cli.terminal import say

__all__ = ["add_parser"]

_DESCRIPTION = """\
Runs a Python program, unchanged, with torch_promote in place of torch.autocast:
every region of torch.autocast on cpu and cuda is ours, whether the program, a
library or PyTorch opens it, in the program's child processes too.

PROGRAM is what python takes: a script, a folder or zip file with __main__.py,
-m MODULE, -c CODE, or - for stdin. All arguments after it are the program's.
It runs in a Python process of its own, which takes the place of this one, so
input and output, exit status, tracebacks and signals are the program's.
"""

_EPILOG = """\
examples:
  torch-promote run train.py --lr 0.1            same bits as without it
  torch-promote run --override softmax=lower train.py
                                                 one op under another policy
  torch-promote run --policy my.toml --cache persistent train.py
  torch-promote run -v -m package.train --help   show what is installed; --help
                                                 is the program's
  torch-promote run --policy off train.py        no casts: what does autocast do
                                                 to this program?
  torch-promote run --crosscheck=bits train.py   check every op of the program
  torch-promote run -m accelerate.commands.launch train.py

with torchrun:
  torchrun --nproc-per-node 2 --no-python torch-promote run train.py
  torchrun --nproc-per-node 2 -m torch_promote run train.py

The options are environment variables, which child processes inherit. You can
set them yourself instead of using this command:
  TORCH_PROMOTE_AUTOCAST=1    --policy     TORCH_PROMOTE_POLICY=cuda
                              --override   TORCH_PROMOTE_OVERRIDES=exp=fp32,...
                              --cache      TORCH_PROMOTE_CACHE=persistent
An option takes precedence over its variable; overrides are added to those of
the variable.

--crosscheck checks the thread that imports PyTorch first, its backward passes,
and the same in child processes; not other threads. The report goes to stderr.

exit status: the program's. 2 if the command line is invalid: nothing has run
then. With --crosscheck, 1 if the program succeeded and there is a mismatch, or
no report.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "run",
        help="run a program with torch_promote in place of torch.autocast",
        usage="torch-promote run [options] PROGRAM [arguments of the program]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # `split` knows the whole names
    )
    add_policy_options(parser)
    parser.add_argument(
        "--crosscheck",
        nargs="?",
        const="dtype",
        choices=get_args(Level),
        help="check every op of the program, and print a report at its end. dtype (the default level): dtypes, casts "
        "and strides against the reference; bits: also results against stock autocast, bit for bit",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print what is installed to stderr first")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    command = command_of(arguments, "run")
    variables, info = settings(arguments)
    if arguments.verbose:
        print(f"torch-promote: {info}", file=sys.stderr, flush=True)
    if arguments.crosscheck is not None:
        return _run_checked(command, variables, arguments.crosscheck, arguments.is_process)
    if arguments.is_process:
        os.execve(sys.executable, command, variables)
    return end_as(run_to_end(command, variables).returncode, arguments.is_process)


# --- under crosscheck


def _run_checked(command: list[str], variables: dict[str, str], level: str, is_process: bool) -> int:
    """Runs the program, prints the report of its processes, and returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="torch-promote-") as folder:
        variables[crosscheck_process.VARIABLE] = f"{level}:{folder}"
        began = time.monotonic()
        watched = sys.stderr is not None and sys.stderr.isatty()
        line = f"torch-promote: crosscheck, level {level}, "
        with follow(lambda: f"{line}{time.monotonic() - began:.0f} s so far", quiet=not watched):
            program = run_to_end(command, variables)
        reports = crosscheck_process.read_reports(Path(folder))
    whole = CrosscheckReport()
    for _, report in sorted(reports.items()):
        whole.add(report)
    count = "1 process" if len(reports) == 1 else f"{len(reports)} processes"
    say(f"torch-promote: crosscheck, level {level}, {count}")
    if reports:
        say(str(whole), is_report=True)
    if program.pid not in reports:
        say(
            "torch-promote: the program left no report: it did not import torch, or it ended without Python's exit "
            "handlers (a signal, os._exit)."
        )
    if program.returncode == 0 and (not whole.ok or program.pid not in reports):
        return 1
    return end_as(program.returncode, is_process)
