"""The command `torch-promote run`: a Python program whose torch.autocast regions are ours.

NOTE [ A fresh interpreter ]
This process has imported PyTorch to check the command line. A program that runs in it would find its own settings
ignored that PyTorch reads when it is imported (OMP_NUM_THREADS, TORCH_LOGS, PYTORCH_CUDA_ALLOC_CONF). So the command
checks everything, sets the environment variables of torch_promote/regions/environment.py, and replaces itself with
`python script.py`. The rest is Python's own: `__main__`, sys.argv, tracebacks, signals, the exit status.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from torch_promote.checking import crosscheck_process
from torch_promote.checking.checker import Level
from torch_promote.checking.report import CrosscheckReport
from torch_promote.cli.autoloading import why_not_loaded
from torch_promote.cli.child_process import end_as, wait_for
from torch_promote.errors import OptionError, PolicyError
from torch_promote.policy.policy import Policy
from torch_promote.regions import environment
from torch_promote.regions.defaults import default_policy
from torch_promote.regions.installation import Installation

__all__ = ["add_parser", "split"]

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
  torch-promote run --override softmax=fp16 train.py
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

#: Options that take the next argument as their value.
_WITH_VALUE = ("--policy", "--override", "--cache")


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
    parser.add_argument(
        "--policy", metavar="P", help="the default policy of the program's regions: a name or the path of a policy file"
    )
    parser.add_argument(
        "--override",
        metavar="OP=POLICY",
        action="append",
        default=[],
        help="another cast policy for an op, as in my_autocast(overrides=...); repeatable",
    )
    parser.add_argument("--cache", metavar="MODE", help="the cache mode: weights, persistent, all or none")
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


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into ours and the program's. Only `run` has the second part.

    Example:
        >>> split(["run", "--cache", "all", "-m", "train", "--cache", "none"])
        (['run', '--cache', 'all'], ['-m', 'train', '--cache', 'none'])
        >>> split(["info", "--json"])
        (['info', '--json'], [])
    """
    if not argv or argv[0] != "run":
        return list(argv), []
    position = 1
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return list(argv[:position]), list(argv[position + 1 :])
        if not word.startswith("-") or word == "-" or word.startswith(("-m", "-c")):
            break
        position += 2 if word in _WITH_VALUE else 1
    return list(argv[:position]), list(argv[position:])


def _run(arguments: argparse.Namespace) -> int:
    kind, name = _kind_and_name(arguments.program)
    path = sys.path
    sys.path = _path_of(kind, name, arguments.is_process)
    try:
        _check_program(kind, name)
        problem = why_not_loaded()
    finally:
        sys.path = path
    if problem is not None:
        raise OptionError(f"the program would run without torch_promote: {problem}")
    variables, info = _settings(arguments)
    if arguments.verbose:
        print(f"torch-promote: {info}", file=sys.stderr, flush=True)
    options = _interpreter_options() if arguments.is_process else []
    command = [sys.executable, *options, *arguments.program]
    if arguments.crosscheck is not None:
        return _run_checked(command, variables, arguments.crosscheck, arguments.is_process)
    if arguments.is_process:
        os.execve(sys.executable, command, variables)
    return end_as(wait_for(_start(command, variables)), arguments.is_process)


# --- checks, before anything runs


def _kind_and_name(program: Sequence[str]) -> tuple[str, str]:
    """Returns "-m", "-c", "-" or "" (a script), and the module or script."""
    if not program:
        raise OptionError("run what? Name a script, -m MODULE, -c CODE or -. See `torch-promote run --help`.")
    word = program[0]
    if word[:2] in ("-m", "-c"):
        if len(word) == 2 and len(program) == 1:
            raise OptionError(f"{word} needs {'a module' if word == '-m' else 'code'} after it.")
        return word[:2], word[2:] or program[1]
    return ("-" if word == "-" else ""), word


def _path_of(kind: str, name: str, is_process: bool) -> list[str]:
    """Returns sys.path as the program will find it. In a process of its own, the first entry is this command's."""
    if sys.flags.safe_path:
        return sys.path
    first = str(Path(name).resolve().parent) if kind == "" else os.getcwd()
    return [first, *(sys.path[1:] if is_process else sys.path)]


def _check_program(kind: str, name: str) -> None:
    if kind == "" and not os.path.exists(name):
        raise OptionError(f"there is no file {name!r} to run. For a module, write -m {name.removesuffix('.py')}.")
    if kind == "" and os.path.isdir(name) and not Path(name, "__main__.py").exists():
        raise OptionError(f"the folder {name!r} has no __main__.py. Name a file in it.")
    if kind == "-m":
        top = name.partition(".")[0]
        try:
            found = top in sys.modules or importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise OptionError(f"there is no module {top!r} to run. Python looks in {sys.path[0]!r} and in sys.path.")


def _settings(arguments: argparse.Namespace) -> tuple[dict[str, str], str]:
    """Returns the environment of the program, and what it puts in force, in words."""
    variables = {**os.environ, environment.AUTOCAST: "1"}
    if arguments.policy is not None:
        variables[environment.POLICY] = _checked_policy(arguments.policy)
    overrides = environment.asked_overrides()
    for text in arguments.override:
        overrides |= environment.split_overrides(text)
    if overrides:
        variables[environment.OVERRIDES] = environment.join_overrides(overrides)
    if arguments.cache is not None:
        variables[environment.CACHE] = arguments.cache
    policy = arguments.policy if arguments.policy is not None else default_policy()
    installation = Installation(policy, overrides, variables.get(environment.CACHE) or None)  # checks them
    return variables, installation.info


def _checked_policy(policy: str) -> str:
    """Returns what the variable says: a name, or the path of a file from anywhere."""
    try:
        Policy.of(policy)
    except PolicyError as error:
        raise PolicyError(f"--policy {policy}: {error}") from error
    return policy if policy in Policy.names() else os.path.abspath(policy)


def _interpreter_options() -> list[str]:
    """Returns the options of the interpreter that runs this command, such as -u and -W error.

    They stand between the interpreter and what it runs: a script, `-m torch_promote` or `-c code`.
    """
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    del options[-1:]
    if options and re.fullmatch(r"-[bBdEIOPqRsSuvx]*[mc]", options[-1]):  # also -um
        flags = options.pop()[:-1]
        options += [flags] if flags != "-" else []
    return options


def _start(command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts the program with all files that are open for it, such as those of `<(command)` in a shell."""
    return subprocess.Popen(command, env=variables, close_fds=False)


# --- under crosscheck


def _run_checked(command: list[str], variables: dict[str, str], level: str, is_process: bool) -> int:
    """Runs the program, prints the report of its processes, and returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="torch-promote-") as folder:
        variables[crosscheck_process.VARIABLE] = f"{level}:{folder}"
        program = _start(command, variables)
        status = wait_for(program)
        reports = crosscheck_process.read_reports(Path(folder))
    whole = CrosscheckReport()
    for _, report in sorted(reports.items()):
        whole.add(report)
    count = "1 process" if len(reports) == 1 else f"{len(reports)} processes"
    print(f"torch-promote: crosscheck, level {level}, {count}", file=sys.stderr)
    if reports:
        print(whole, file=sys.stderr, flush=True)
    if program.pid not in reports:
        print(
            "torch-promote: the program left no report: it did not import torch, or it ended without Python's exit "
            "handlers (a signal, os._exit).",
            file=sys.stderr,
            flush=True,
        )
    if status == 0 and (not whole.ok or program.pid not in reports):
        return 1
    return end_as(status, is_process)
