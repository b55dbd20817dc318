"""The options that tune_gpt.py and float8_gpt.py share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parser_of(program: str, text: str) -> argparse.ArgumentParser:
    """Returns a parser with the shared options. The text is the program's docstring."""
    summary, _, rest = text.partition("\n")
    parser = argparse.ArgumentParser(
        prog=program, description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and the batches (default: %(default)s)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        help="relative tolerance of the losses (default: %(default)s)",
    )
    parser.add_argument("--budget", type=int, default=60, help="maximum number of runs of tune (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path("out"), help="folder for the results (default: %(default)s)"
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; exits with status 2 and a one-line error if it is invalid."""
    arguments = parser.parse_args(argv)
    problem = find_problem(arguments)
    if problem:
        print(f"{parser.prog}: error: {problem}", file=sys.stderr)
        sys.exit(2)
    return arguments


def find_problem(arguments: argparse.Namespace) -> str:
    """Returns a sentence about the first invalid argument, or "". Creates the folder for the results."""
    if arguments.steps < 1:
        return f"--steps must be at least 1, got {arguments.steps}"
    if not 0 < arguments.tolerance < 1:
        return f"--tolerance must be between 0 and 1, got {arguments.tolerance}"
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot write into {arguments.out}: {error.strerror}"
    return ""
