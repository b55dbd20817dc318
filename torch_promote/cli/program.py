"""The command `torch-promote`: the top-level parser and the exit statuses.

Each command is a module of this folder, which is imported when the command runs. It has `DESCRIPTION` and `EPILOG` for
`--help`, `add_arguments`, which adds options to a parser, and `run`, which takes the parsed arguments and returns the
exit status.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

import torch_promote
from torch_promote.cli.output import say, write
from torch_promote.errors import TorchPromoteError

__all__ = ["COMMANDS", "main", "make_parser", "parse_arguments"]

_WRONG_COMMAND_LINE, _INTERRUPTED = 2, 130

#: The commands, with a line for `--help`.
COMMANDS = {
    "run": "run a program with torch_promote in place of torch.autocast",
    "trace": "report which op of a program ran in which dtype, and why",
    "find-nan": "run a program and report where the first inf or NaN came from",
    "diff": "compare two recorded runs: what differs first",
    "compare": "compare two precisions of a step: which ops lose accuracy",
    "tune": "find the fewest overrides that meet a tolerance, and save them",
    "info": "show versions and devices; compare the op table with PyTorch",
    "policies": "show what autocast does with each op",
    "parity": "compare stock, ours and the reference on PyTorch's samples",
    "why": "explain the dtype of an expression, step by step",
    "build": "compile the extension for a PyTorch that has none yet",
}
#: The commands whose command line ends in a program.
_RUN_A_PROGRAM = ("run", "trace", "find-nan")

_EPILOG = """\
`torch-promote COMMAND --help` has examples, and explains the options and exit
statuses: 0 success; 1 the command found a difference or a mismatch; 2 invalid
command line; 130 interrupted. Of `run`, `trace` and `find-nan`, the program's,
if it is not 0.
"""


class _Parser(argparse.ArgumentParser):
    """A parser that prints as the commands do, and errors in one line. Its subparsers have the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "formatter_class": argparse.RawDescriptionHelpFormatter})

    def _print_message(self, message: str, file: Any = None) -> None:
        write(message) if file is sys.stdout else say(message.rstrip())

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ")
        option = next((name for name in ("--op", "--ops") if name in self._option_string_actions), "")
        if words != message and option and not words.startswith("-"):
            message += f". To show only some ops, write {option} {shlex.quote(words.split()[0])}"
        say(f"torch-promote: error: {message.rstrip('.')}. See `{self.prog} --help`.")
        self.exit(_WRONG_COMMAND_LINE)


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """Returns the parser of one command; for "", of the whole command line, without the options of the commands."""
    if command:
        module = importlib.import_module(f"torch_promote.cli.{command.replace('-', '_')}")
        runs_a_program = command in _RUN_A_PROGRAM
        parser = _Parser(
            prog=f"torch-promote {command}",
            usage=f"torch-promote {command} [options] PROGRAM [arguments of the program]" if runs_a_program else None,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            allow_abbrev=not runs_a_program,  # `_start_of_program` knows whole names
        )
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)
        return parser
    parser = _Parser(
        prog="torch-promote", description="Shows, changes and checks what autocast does with each op.", epilog=_EPILOG
    )
    version = f"torch-promote {torch_promote.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line. The result has the command's function as `run`, and the program to run as `program`."""
    command, *rest = argv or [""]
    if command not in COMMANDS:
        return make_parser().parse_args(argv)
    parser = make_parser(command)
    end = _start_of_program(parser, rest) if command in _RUN_A_PROGRAM else len(rest)
    arguments = parser.parse_args(rest[:end])
    arguments.words = rest
    arguments.is_separated = rest[end : end + 1] == ["--"]
    arguments.program = rest[end + arguments.is_separated :]
    return arguments


def _start_of_program(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Returns the position of the program, which follows our options: of `-m train` or `--` for example."""
    with_value = [name for action in parser._actions if action.nargs is None for name in action.option_strings]
    position = 0
    while position < len(argv):
        word = argv[position]
        if not word.startswith("-") or word in ("-", "--") or word.startswith(("-m", "-c")):
            break
        position += 2 if word in with_value else 1
    return position


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of the process, and returns the exit status.

    0 is success; 1, the command found something; 2, the command line is invalid or cannot be carried out; 130,
    interrupted. argparse raises SystemExit, with 2 for an invalid command line and 0 after `--help` and `--version`.
    """
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        arguments.is_process = argv is None
        status: int = arguments.run(arguments)
    except TorchPromoteError as error:
        say(f"torch-promote: error: {error}")
        return _WRONG_COMMAND_LINE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status
