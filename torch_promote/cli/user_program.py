"""Runs a user's Python program, for `run`, `trace` and `find-nan`: options, checks before it starts, and signals.

NOTE [ A fresh interpreter ]
This process has imported PyTorch to check the command line. A program that runs in it would find its own settings
ignored that PyTorch reads when it is imported (OMP_NUM_THREADS, TORCH_LOGS, PYTORCH_CUDA_ALLOC_CONF). So the command
checks everything, sets the environment variables of torch_promote/regions/installation.py, and starts
`python script.py`. The rest is Python's own: `__main__`, sys.argv, tracebacks, signals, the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from torch_promote.errors import OptionError, PolicyError
from torch_promote.policy.policy import Policy
from torch_promote.regions import installation as environment
from torch_promote.regions.defaults import default_policy
from torch_promote.regions.installation import Installation

__all__ = ["LEFT_NO_REPORT", "add_policy_options", "command_of", "end_as", "run_to_end", "settings", "why_not_loaded"]

LEFT_NO_REPORT = (
    "the program left no report: it did not import torch, or it ended without Python's exit handlers (a signal, "
    "os._exit)."
)
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GROUP, _MODULE = "torch.backends", "_torch_promote_hooks"


# The command line


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what regions of the program are."""
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


def settings(arguments: argparse.Namespace) -> tuple[dict[str, str], str]:
    """Returns the environment of the program, and a description of what it installs."""
    variables = {**os.environ, environment.AUTOCAST: "1"}
    if arguments.policy is not None:
        try:
            Policy.of(arguments.policy)
        except PolicyError as error:
            raise PolicyError(f"--policy {arguments.policy}: {error}") from error
        named = arguments.policy in Policy.names()
        variables[environment.POLICY] = arguments.policy if named else os.path.abspath(arguments.policy)
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


def command_of(arguments: argparse.Namespace, what: str) -> list[str]:
    """Returns the command that runs the program, which is checked.

    Args:
        arguments: The parsed command line.
        what: The command's name, for errors.

    Raises:
        OptionError: There is no such program, or torch_promote would not be loaded in it.
    """
    if not arguments.program:
        raise OptionError(f"{what} what? Name a script, -m MODULE, -c CODE or -. See `torch-promote {what} --help`.")
    word = arguments.program[0]
    kind = word[:2] if word.startswith(("-m", "-c")) else "-" if word == "-" else "script"
    if word == kind != "-" and len(arguments.program) == 1:
        raise OptionError(f"{word} needs {'a module' if word == '-m' else 'code'} after it.")
    name = word if kind in ("-", "script") else word[2:] or arguments.program[1]
    path = sys.path
    if not sys.flags.safe_path:  # sys.path as the program will find it
        first = str(Path(name).resolve().parent) if kind == "script" else os.getcwd()
        # In a process of its own, the first entry is that of this command.
        sys.path = [first, *(path[1:] if arguments.is_process else path)]
    try:
        _check_program(kind, name)
        problem = why_not_loaded()
    finally:
        sys.path = path
    if problem is not None:
        raise OptionError(f"the program would run without torch_promote: {problem}")
    options = _interpreter_options() if arguments.is_process else []
    return [sys.executable, *options, *arguments.program]


def _check_program(kind: str, name: str) -> None:
    if kind == "script" and not os.path.exists(name):
        raise OptionError(f"there is no file {name!r} to run. For a module, write -m {name.removesuffix('.py')}.")
    if kind == "script" and os.path.isdir(name) and not Path(name, "__main__.py").exists():
        raise OptionError(f"the folder {name!r} has no __main__.py. Name a file in it.")
    if kind == "-m":
        top = name.partition(".")[0]
        try:
            found = top in sys.modules or importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise OptionError(f"there is no module {top!r} to run. Python looks in {sys.path[0]!r} and in sys.path.")


def why_not_loaded() -> str | None:
    """Returns why `import torch` does not load torch_promote, and what to do; None if it does. It looks in sys.path."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD keeps PyTorch from loading it. Unset that variable."
    if not any(point.module == _MODULE for point in importlib.metadata.entry_points(group=_GROUP)):
        return (
            f"the installed package has no entry point in the group {_GROUP}, or is not installed. Install it in this "
            "environment, in the source checkout: pip install --no-build-isolation --force-reinstall --no-deps ."
        )
    return None


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


# The process


def start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the program with all files that are open for it, such as those of `<(command)` in a shell."""
    return subprocess.Popen(command, env=variables, close_fds=False)


def run_to_end(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Runs a program, and passes signals on to it until it ends.

    Args:
        command: The command line.
        variables: The environment.

    Returns:
        The ended program. Its return code is negative if a signal ended it.
    """
    program: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if program is None:
            early.append(number)
        elif number != signal.SIGINT or not _in_foreground():  # Ctrl-C reaches the program by itself
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(number)

    # Signals that are ignored here (nohup) are ignored in the program as well.
    passed_on = [number for number in _PASSED_ON if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, pass_on) for number in passed_on}
    try:
        program = start(command, variables)
        for number in early:
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(number)
        program.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return program


def _in_foreground() -> bool:
    """Whether this process is in the group to which the terminal sends Ctrl-C."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def end_as(status: int, is_process: bool) -> int:
    """Returns the exit status for a program's status. If a signal ended the program, it also ends this process.

    Args:
        status: The return code of the program, negative for a signal.
        is_process: Whether this process is the command's alone. Otherwise it stays alive.

    Example:
        >>> end_as(3, False), end_as(-15, False)
        (3, 143)
    """
    if status >= 0:
        return status
    if is_process:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return 128 - status
