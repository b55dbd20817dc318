"""The command `torch-promote`: the top-level parser and the exit statuses.

Each command is a module of this folder. It collects plain data first. `--json` prints the data; the text output is
drawn from the same data, with the functions of torch_promote/cli/terminal.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch

import torch_promote
from torch_promote.cli import (
    compare,
    explain,
    find_nan,
    info,
    parity,
    policies,
    run,
    trace,
    tune,
    why,
)
from torch_promote.cli.exit_status import INTERRUPTED, WRONG_COMMAND_LINE
from torch_promote.cli.python_program import split
from torch_promote.cli.terminal import fold, redirect_to_null, say
from torch_promote.errors import TorchPromoteError

__all__ = ["main", "make_parser", "parse_arguments"]


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples, except on a terminal that is narrower than they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        width += 2  # which argparse leaves free
        text = super()._fill_text(text, width, indent)
        if max(map(len, text.splitlines()), default=0) <= width:
            return text
        return "\n".join(fold("\n".join(_joined(text.splitlines())), width))

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Wraps the usage of a command that has one of its own."""
        given = None if usage is None else "\n".join(fold(usage, self._width + 2 - len("usage: ")))
        super().add_usage(given, actions, groups, prefix)


def _joined(lines: Sequence[str]) -> Iterator[str]:
    """Joins the lines of a paragraph, and those of an entry of a list, whose second line is indented further."""
    held = ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        is_prose = indent == 0 and held and not held.startswith(" ") and not held.endswith(":")
        is_entry = indent >= _DEEP and held.startswith(" ")
        if line and (is_prose or is_entry):
            held = f"{held} {line.lstrip()}"
            continue
        if held:
            yield held
        held = line
        if not line:
            yield ""
    if held:
        yield held


#: The indentation of what belongs to the line above.
_DEEP = 8


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line, as the commands do. Its subparsers have the same class.

    Attributes:
        commands: The names of the commands, of the parser of all.
        command: The command that the arguments are for, where the parser of all commands reports an error.
    """

    command = ""
    commands: Collection[str] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "formatter_class": _HelpFormatter})

    def error(self, message: str) -> NoReturn:
        say(f"torch-promote: error: {message.rstrip('.')}. See `{self.command or self.prog} --help`.")
        self.exit(WRONG_COMMAND_LINE)


def make_parser() -> _Parser:
    """Returns the parser of the whole command line. Parsed arguments have the command's function as `run`."""
    parser = _Parser(
        prog="torch-promote",
        description="Shows, changes and checks what autocast does with each op.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"torch-promote {torch_promote.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands: Any = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    for command in (run, trace, find_nan, explain, compare, tune, info, policies, parity, why):
        command.add_parser(commands)
    parser.commands = commands.choices
    return parser


_EPILOG = """\
examples:
  torch-promote run train.py --lr 0.1            in place of torch.autocast
  torch-promote run --override softmax=fp32 -m package.train
  torch-promote trace --html run.html train.py   what ran in which dtype
  torch-promote find-nan train.py                where the first NaN came from
  torch-promote explain run.json blocks.3.attn   one module of a trace
  torch-promote compare train.py:make            which ops lose accuracy
  torch-promote tune train.py:make --tolerance loss=1e-3 -o mine.toml
                                                 the fewest overrides
  torch-promote info                             versions, devices, table size
  torch-promote policies                         the whole op table
  torch-promote policies --device cpu            what has a policy on the CPU
  torch-promote policies --op softmax            one op, with all its overloads
  torch-promote policies --op 'linalg_*' --json  a pattern; JSON for programs
  torch-promote policies --diff                  compare PyTorch with the table
  torch-promote policies --policy cuda --diff stock
                                                 what a policy changes
  torch-promote parity --quick                   compare stock, ours, reference
  torch-promote why "int32[3] + 5.5"             explain a result dtype
  torch-promote why --rule jax "int32[3] + 5.5"  the same by JAX's rule

exit status: 0 success; 1 the command found a difference or a mismatch;
2 invalid command line; 130 interrupted. Of `run`, `trace` and `find-nan`, the
program's, if it is not 0.
`torch-promote run --help` shows how to use it with torchrun and others.
`torch-promote policies --help` explains each cast policy.
"""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line. Those of `run`, `trace` and `find-nan` have the program and its arguments as `program`."""
    own, program = split(argv)
    parser = make_parser()
    if own and own[0] in parser.commands:  # argparse reports an unknown option by the parser of all commands
        parser.command = f"{parser.prog} {own[0]}"
    arguments = parser.parse_args(own)
    arguments.program = program
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments, without the program name. None: those of the process.

    Returns:
        The exit status: 0 success, 1 the command found something, 2 the command line is invalid or cannot be carried
        out, 130 interrupted.

    Raises:
        SystemExit: Raised by argparse, with 2 for an invalid command line and 0 after `--help` and `--version`.

    Example:
        >>> main(["policies", "--op", "sofmax", "--json"])
        2
    """
    try:
        return _run(argv)
    finally:
        _flush()


def _flush() -> None:
    """Flushes what argparse printed for --help. At exit, Python would print a traceback if that fails."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # most likely the reader of a pipe has exited
        redirect_to_null(sys.stdout)


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        arguments.is_process = argv is None
        status: int = arguments.run(arguments)
    except TorchPromoteError as error:
        say(f"torch-promote: error: {error}")
        return WRONG_COMMAND_LINE
    except KeyboardInterrupt:
        return INTERRUPTED
    return status
