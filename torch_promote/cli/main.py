"""The command `torch-promote`: its parser, and what its commands end with.

Each command is a file, cli_*.py. It gathers plain data first; `--json` prints that, and the text is drawn from the
same. Drawing is torch_promote/cli/terminal.py's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

import torch_promote
from torch_promote.cli import bench as cli_bench
from torch_promote.cli import info as cli_info
from torch_promote.cli import parity as cli_parity
from torch_promote.cli import policies as cli_policies
from torch_promote.cli import why as cli_why
from torch_promote.cli.terminal import let_go_of
from torch_promote.errors import TorchPromoteError

__all__ = ["main"]

_WRONG_COMMAND_LINE, _INTERRUPTED = 2, 130  # 0 is for what is done, 1 for commands that find something


class _Parser(argparse.ArgumentParser):
    """One whose errors are one line, like those of the commands. Its subparsers are of the same class."""

    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG_COMMAND_LINE, f"torch-promote: error: {message}. `{self.prog} --help` tells more.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torch-promote",
        description="Autocast with open policies: what is installed, and what happens to each op.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"torch-promote {torch_promote.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands: Any = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    cli_info.add_parser(commands)
    cli_policies.add_parser(commands)
    cli_parity.add_parser(commands)
    cli_bench.add_parser(commands)
    cli_why.add_parser(commands)
    return parser


_EPILOG = """\
examples:
  torch-promote info                             versions, devices, table size
  torch-promote policies                         the whole op table
  torch-promote policies --device cpu            what has a policy on the CPU
  torch-promote policies --op softmax            one op, with all its overloads
  torch-promote policies --op 'linalg_*' --json  a pattern; JSON for programs
  torch-promote policies --diff                  is this PyTorch the table's?
  torch-promote policies --policy cuda --diff stock
                                                 what a policy changes
  torch-promote parity --quick                   stock, ours and the reference
  torch-promote bench --suite region             timings against stock
  torch-promote why "int32[3] + 5.5"             how a result dtype comes about
  torch-promote why --rule jax "int32[3] + 5.5"  and by another promotion rule

exit status: 0 done, 1 something was found (a difference, a mismatch), 2 wrong
command line, 130 interrupted.
`torch-promote policies --help` explains each policy.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments, without the program's name. None: those of this process.

    Returns:
        The exit status: 0 done, 1 something was found, 2 the command line asks for what cannot be done,
        130 it was interrupted.

    Raises:
        SystemExit: From argparse, with 2 for a wrong command line and 0 after `--help` and `--version`.

    Example:
        >>> main(["policies", "--op", "sofmax", "--json"])
        2
    """
    try:
        return _run(argv)
    finally:
        _flush()


def _flush() -> None:
    """Has what argparse wrote, for --help, go now where it goes: as Python exits, it would fail with a traceback."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # a reader that has read enough, most likely
        let_go_of(sys.stdout)


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except TorchPromoteError as error:
        print(f"torch-promote: error: {error}", file=sys.stderr)
        return _WRONG_COMMAND_LINE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status
