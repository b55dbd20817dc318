"""The options that tune_gpt.py and float8_gpt.py share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_OPTIONS = {
    "--steps": (300, "optimizer steps"),
    "--seed": (0, "seed of the weights and the batches"),
    "--tolerance": (0.01, "relative tolerance of the losses"),
    "--budget": (60, "maximum number of runs of tune"),
    "--out": (Path("out"), "folder for the results"),
}


def parser_of(program: str, text: str) -> argparse.ArgumentParser:
    """Returns a parser with the shared options. The text is the program's docstring."""
    summary, _, rest = text.partition("\n")
    parser = argparse.ArgumentParser(
        prog=program, description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, what) in _OPTIONS.items():
        parser.add_argument(name, type=type(default), default=default, help=f"{what} (default: {default})")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; exits with status 2 and a one-line error if it is invalid. Creates the folder."""
    arguments, problem = parser.parse_args(argv), ""
    if arguments.steps < 1:
        problem = f"--steps must be at least 1, got {arguments.steps}"
    elif not 0 < arguments.tolerance < 1:
        problem = f"--tolerance must be between 0 and 1, got {arguments.tolerance}"
    else:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot write into {arguments.out}: {error.strerror}"
    if problem:
        print(f"{parser.prog}: error: {problem}", file=sys.stderr)
        sys.exit(2)
    return arguments
