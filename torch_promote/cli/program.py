"""The command `torch-promote`: the top-level parser and the exit statuses.

Each command is a module of this folder, which is imported when the command runs. It has `DESCRIPTION` and `EPILOG` for
`--help`, `add_arguments`, which adds options to a parser, and `run`, which takes the parsed arguments and returns the
exit status. If it has `check`, that raises for what is wrong with the arguments together, such as a file that does not
exist.

NOTE [ Before PyTorch ]
`import torch` takes more than a second. `--help`, and an error of the command line, answer without it: the modules of
this folder import at their top only what imports no PyTorch (`errors`, `building`, `policy.cast_policy`), and the rest
inside functions. `torch_promote/__init__.py` waits, too, until `main` has parsed and checked the command line.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NoReturn

import _torch_promote_hooks
import torch_promote
from torch_promote.cli.output import say, write
from torch_promote.errors import MissingPackageError, TorchPromoteError, did_you_mean
from torch_promote.recording import SUFFIX

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
#: The value of an option that the program follows at once.
_VALUES = {"--fix": "mine.toml"}
#: The environment variables TORCH_PROMOTE_..., with those that the commands set for a program.
_VARIABLES = (
    *("AUTOCAST", "POLICY", "MODEL", "OVERRIDES", "CACHE", "CHECK_CASTS", "KNOWN_GAPS", "BUILD_DIR", "CXXFLAGS"),
    *("LDFLAGS", "CROSSCHECK_REPORTS", "ERRORS", "MONITOR", "TRACED"),
)
#: Words of the command line that do not exist, and what to write instead.
_ELSEWHERE = {
    "help": "Write `torch-promote --help`, or `torch-promote COMMAND --help`.",
    "version": "Write `torch-promote --version`.",
    "gpu": "The device types of GPUs are cuda (also for ROCm), xpu (Intel) and mps (Apple).",
    "layer": "A layer is a module.",
    "nan": "`torch-promote find-nan train.py` finds where a NaN begins.",
    "crosscheck": "Write `torch-promote run --crosscheck train.py`.",
    "monitor": "Write `torch-promote run --monitor logs train.py`.",
    "record": "Write `torch-promote trace --record F.jsonl.gz train.py`.",
    "--version": "Write `torch-promote --version`.",
    "explain": "`torch-promote trace --read F.jsonl.gz PATTERN` explains a module, an op or a line of a recording.",
    "--torch": "It compiles for the PyTorch that is installed beside it: install the other version first, or run it "
    "with the Python of its environment.",
}

_EPILOG = """\
`torch-promote COMMAND --help` has examples, and explains the options and exit
statuses: 0 success; 1 the command found a difference or a mismatch; 2 invalid
command line; 130 interrupted. Of `run`, `trace` and `find-nan`, the program's,
if it is not 0.
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that prints a text as it is written, or on a narrower terminal in whole words."""

    def _format_usage(self, *arguments: Any) -> str:
        text = super()._format_usage(*arguments)
        if all(len(line) <= self._width + 2 for line in text.splitlines()):
            return text
        return fill(" ".join(text.split()), self._width, subsequent_indent=" " * 7) + "\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if all(len(line) <= width + 2 for line in text.splitlines()):
            return super()._fill_text(text, width, indent)
        shown: list[str] = []
        for paragraph in text.split("\n\n"):
            is_prose = not re.search("^  ", paragraph, re.MULTILINE)
            for line in [paragraph.replace("\n", " ")] if is_prose else paragraph.splitlines():
                # An example, and what is said of it behind some spaces.
                for part, start in zip(re.split(r"(?<=\S) {2,}|^ {6,}", line), ("", " " * 6), strict=False):
                    later = start or " " * 6 * (not is_prose)
                    shown += wrap(part, width, initial_indent=start, subsequent_indent=later, break_on_hyphens=False)
            shown.append("")
        return "".join(f"{line}\n" for line in shown[:-1])


class _Parser(argparse.ArgumentParser):
    """A parser that prints as the commands do, and errors in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "formatter_class": _Formatter})

    def _print_message(self, message: str, file: Any = None) -> None:
        write(message) if file is sys.stdout else say(message.rstrip())

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            legal = list(map(str, action.choices))
            hint = f" {_ELSEWHERE[value]}" if value in _ELSEWHERE else did_you_mean(str(value), legal, 1)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}.{hint} Legal: {', '.join(legal)}")

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            error.message += f": {action.option_strings[-1]} {self._get_formatter()._format_args(action, 'VALUE')}"
            raise

    def error(self, message: str) -> NoReturn:
        is_unknown = message.startswith("unrecognized")
        words = message.removeprefix("unrecognized arguments: ").split() if is_unknown else []
        if message.startswith("the following arguments are required"):  # perhaps under a misspelt name
            known = " ".join(["", *self._option_string_actions])  # of which one may be a part
            words = [word for word in self.get_default("words") if word.startswith("--")]
            words = [word for word in words if f" {word.partition('=')[0]}" not in known]
        if words:
            words = [word for word in words if word.startswith("--")] or words  # the others may be their values
            message = f"unrecognized arguments: {' '.join(words)}"
            message += self._remedy(words[0].partition("=")[0])
        say(f"torch-promote: error: {message.rstrip('.')}. See `{self.prog} --help`.")
        self.exit(_WRONG_COMMAND_LINE)

    def _remedy(self, word: str) -> str:
        """Returns what to write instead of a word that the command does not take."""
        if word in _ELSEWHERE:
            return f". {_ELSEWHERE[word]}"
        target = next((one for one in self._get_positional_actions() if one.dest == "target"), None)
        if target and word.startswith("-m"):
            return f". {target.metavar} of a module is its name and a function, such as package.train:make"
        if word.startswith("-"):
            having = [command for command in COMMANDS if word in make_parser(command)._option_string_actions]
            known = [name for name in self._option_string_actions if name not in ("-h", "--help")]
            if having and not difflib.get_close_matches(word, known, 1, 0.75):
                return f". Commands with this option: {', '.join(having)}"
            hint = did_you_mean(word, known, 1)
            return f".{hint}" if hint else ""
        places = [action.dest for action in self._get_positional_actions()]
        if "op" in places:
            return ". PATTERN is one word: for several ops, a shell pattern such as 'linalg_*'"
        if "--ops" in self._option_string_actions:
            return f". To show only some ops, write --ops {shlex.quote(word)}"
        if word.endswith(SUFFIX) and "a" not in places:
            return ". `torch-promote diff A B` compares recordings, and `torch-promote trace --read A` shows one"
        if "target" in places and word.isidentifier():
            return f". TARGET is one word, such as train.py:{word}"
        takes = [str(action.metavar) for action in self._get_positional_actions()]
        return f". This command takes {' and '.join(takes) if takes else 'options alone'}"


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
        parser.set_defaults(run=module.run, check=getattr(module, "check", None), command=command)
        return parser
    parser = _Parser(
        prog="torch-promote", description="Shows, changes and checks what autocast does with each op.", epilog=_EPILOG
    )
    found = importlib.util.find_spec("torch")  # whose version is in a file that imports nothing
    folders = (found and found.submodule_search_locations) or []
    version = next((runpy.run_path(f"{folder}/version.py")["__version__"] for folder in folders), "not installed")
    text = f"torch-promote {torch_promote.__version__} (torch {version})"
    parser.add_argument("--version", action="version", version=text)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line. The result has the command's function as `run`, and the program to run as `program`."""
    command, *rest = argv or [""]
    if command not in COMMANDS:
        _end_without_command(make_parser(), argv)
    parser = make_parser(command)
    end = _start_of_program(parser, rest) if command in _RUN_A_PROGRAM else len(rest)
    parser.set_defaults(words=rest)  # which errors name
    arguments = parser.parse_args(rest[:end])
    arguments.is_separated = rest[end : end + 1] == ["--"]
    arguments.program = rest[end + arguments.is_separated :]
    return arguments


def _end_without_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> NoReturn:
    """Prints the help or the version, or the error of a command line that begins with no command."""
    word = argv[0] if argv else ""
    if not word.startswith("-"):
        legal = f"{did_you_mean(word, COMMANDS, 1)} Legal: {', '.join(COMMANDS)}"
        if not word:
            parser.error(f"name a COMMAND.{legal}")
        remedy = f" {_ELSEWHERE[word]}" if word in _ELSEWHERE else ""
        if not remedy and Path(word).suffix == ".py":
            remedy = f" To run a program, write `torch-promote run {shlex.join(argv)}`."
        parser.error(f"{word!r} is not a command.{remedy}{legal}")
    if word.partition("=")[0] not in parser._option_string_actions:
        parser.error(f"unrecognized arguments: {word}")
    parser.parse_args(argv)
    parser.error(f"name a COMMAND before its options. Legal: {', '.join(COMMANDS)}")


def _start_of_program(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Returns the position of the program, which follows our options: of `-m train` or `--` for example."""
    # An option of `_VALUES` gets its value if the program follows at once.
    with_value = {name: one for one in parser._actions if one.nargs is None for name in one.option_strings}
    position = 0
    while position < len(argv):
        word = argv[position]
        if not word.startswith("-") or word in ("-", "--") or word.startswith(("-m", "-c")):
            break
        for value in argv[position + 1 : position + 2] if word in with_value else ():
            if value.endswith(".py") and word in _VALUES:
                argv.insert(position + 1, _VALUES[word])
            elif value.endswith(".py") and with_value[word].dest != "read":
                usage = f"{word} {with_value[word].metavar} {value}"
                parser.error(f"{value} was taken as the value of {word}. Write it before the program: {usage}")
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
        _note_misspelt_variables()
        if arguments.check is not None:
            arguments.check(arguments)
        if arguments.command != "build":  # which compiles what the package needs to be loaded
            _load_package()
        status: int = arguments.run(arguments)
    except TorchPromoteError as error:
        say(f"torch-promote: error: {error}")
        return _WRONG_COMMAND_LINE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status


def _note_misspelt_variables() -> None:
    for name in os.environ:
        rest = name.removeprefix("TORCH_PROMOTE_")
        close = difflib.get_close_matches(rest, _VARIABLES, 1, 0.7) if rest != name else []
        if close and rest not in _VARIABLES:
            say(f"torch-promote: nothing reads the environment variable {name}. Closest: TORCH_PROMOTE_{close[0]}.")


def _load_package() -> None:
    """Loads PyTorch and the package, if this is the process of the command; see NOTE [ Before PyTorch ]."""
    if "my_autocast" in vars(torch_promote):
        return
    _torch_promote_hooks.is_command = False
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # nohup ignores it
        # Not KeyboardInterrupt: code that runs during the imports catches it, and the command would go on.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    try:
        importlib.reload(torch_promote)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackageError("PyTorch is not installed, which torch_promote needs: pip install torch.") from error
    finally:
        signal.signal(signal.SIGINT, before)
