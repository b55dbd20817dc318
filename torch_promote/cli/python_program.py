"""What the commands share that run a Python program: `run`, `trace` and `find-nan`.

Their command line ends in a program and its arguments, which they check before anything runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_promote.cli.autoloading import why_not_loaded
from torch_promote.errors import OptionError, PolicyError
from torch_promote.policy.policy import Policy
from torch_promote.regions import installation as environment
from torch_promote.regions.defaults import default_policy
from torch_promote.regions.installation import Installation

__all__ = ["add_policy_options", "command_of", "settings", "split"]

#: The commands whose command line ends in a program.
_COMMANDS = ("run", "trace", "find-nan")
#: Their options that take the next argument as their value.
_WITH_VALUE = (
    *("--policy", "--override", "--cache"),
    *("--html", "--json", "--csv", "--perfetto", "--steps", "--max-calls"),
)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into ours and the program's. Only the commands that run a program have the second part.

    Example:
        >>> split(["run", "--cache", "all", "-m", "train", "--cache", "none"])
        (['run', '--cache', 'all'], ['-m', 'train', '--cache', 'none'])
        >>> split(["info", "--json"])
        (['info', '--json'], [])
    """
    if not argv or argv[0] not in _COMMANDS:
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


def command_of(arguments: argparse.Namespace, what: str) -> list[str]:
    """Returns the command that runs the program, which is checked.

    Args:
        arguments: The parsed command line.
        what: The command's name, for errors.

    Raises:
        OptionError: There is no such program, or torch_promote would not be loaded in it.
    """
    kind, name = _kind_and_name(arguments.program, what)
    path = sys.path
    sys.path = _path_of(kind, name, arguments.is_process)
    try:
        _check_program(kind, name)
        problem = why_not_loaded()
    finally:
        sys.path = path
    if problem is not None:
        raise OptionError(f"the program would run without torch_promote: {problem}")
    options = _interpreter_options() if arguments.is_process else []
    return [sys.executable, *options, *arguments.program]


# --- checks, before anything runs


def _kind_and_name(program: Sequence[str], what: str) -> tuple[str, str]:
    """Returns "-m", "-c", "-" or "" (a script), and the module or script."""
    if not program:
        raise OptionError(f"{what} what? Name a script, -m MODULE, -c CODE or -. See `torch-promote {what} --help`.")
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


def settings(arguments: argparse.Namespace) -> tuple[dict[str, str], str]:
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
