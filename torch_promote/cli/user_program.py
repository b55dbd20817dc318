"""Runs a user's Python program, for `run`, `trace` and `find-nan`: options, signals, and the records of its processes.

NOTE [ A fresh interpreter ]
This process has imported PyTorch, which reads settings (OMP_NUM_THREADS, TORCH_LOGS) only then. So the command checks
everything, sets the environment variables of torch_promote/regions/installation.py, and starts `python script.py`,
which finds its own settings, `__main__`, sys.argv, signals and exit status.

NOTE [ One file for each process ]
A program may have several processes: ranks, workers of a DataLoader, a launcher. No two write one file. The report of
the program itself goes to the file that was named, that of a rank to a file with its number (run.rank1.json), that of
any other process to one with its id, if autocast had a policy for a call in it. Workers that only load data have none.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import TYPE_CHECKING, cast

import torch_promote
from torch_promote.cli.output import closest_files, say
from torch_promote.errors import OptionError, PolicyError, TorchPromoteError
from torch_promote.recording import SUFFIX

if TYPE_CHECKING:
    from torch_promote.numerics.traced_process import Record, Request
    from torch_promote.regions.autocast import CacheMode

#: A paragraph for `--help`.
PROGRAM = """\
PROGRAM is what python takes: a script, a folder or zip file with __main__.py,
-m MODULE, -c CODE, or - for stdin. All arguments after it are the program's.
"""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GROUP, _MODULE = "torch.backends", "_torch_promote_hooks"


# The command line


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what regions of the program are."""
    parser.add_argument(
        "--policy",
        metavar="NAME|F.toml",
        help="the default policy of the program's regions: a name or the path of a policy file",
    )
    parser.add_argument(
        "--override",
        metavar="OP=POLICY",
        action="append",
        default=[],
        help="another cast policy for an op, as in my_autocast(overrides=...); repeatable",
    )
    parser.add_argument(
        "--model",
        metavar="CLASS",
        help="the class of the model from which the names in the policy's tables for modules start; by default the "
        "outermost module that runs, or the one module in it that has them all",
    )
    parser.add_argument("--cache", metavar="MODE", help="the cache mode: weights, persistent, all or none")
    parser.set_defaults(options=parser._option_string_actions)


def check(arguments: argparse.Namespace) -> None:
    """Raises OptionError if there is no such program, or it would not find this package."""
    what = arguments.command
    if not arguments.program:
        raise OptionError(f"{what} what? Name a script, -m MODULE, -c CODE or -. See `torch-promote {what} --help`.")
    policy = arguments.policy
    if policy is not None and policy.endswith(".toml") and not os.path.exists(policy):  # before PyTorch is imported
        close = closest_files(policy, ".toml")
        raise OptionError(f"--policy {policy}: there is no policy file {policy!r}.{close}")
    word = arguments.program[0]
    is_script = not word.startswith("-")
    if word in ("-m", "-c") and len(arguments.program) == 1:
        raise OptionError(f"{word} needs {'a module' if word == '-m' else 'code'} after it.")
    if is_script and not os.path.exists(word):
        raise OptionError(f"there is no file {word!r} to run.{closest_files(word, '.py')}{_what_to_run(arguments)}")
    if is_script and word.endswith(SUFFIX):
        raise OptionError(f"{word!r} is a recording, not a program. To see it: `torch-promote trace --read {word}`.")
    if is_script and os.path.isdir(word) and not Path(word, "__main__.py").exists():
        raise OptionError(f"the folder {word!r} has no __main__.py. Name a file in it.")
    module = (word[2:] or arguments.program[1]) if word.startswith("-m") else ""
    if module.endswith(".py") and os.path.isfile(module):
        raise OptionError(f"-m takes the name of a module, and {module} is a file. Leave -m out, or leave .py out.")
    if module and not _is_module(module.partition(".")[0]):
        raise OptionError(f"there is no module to run: -m {module}. Python looks in {os.getcwd()!r} and in sys.path.")
    _refuse_shadow(word if is_script else "")
    name = module or ("the code" if word.startswith("-c") else word)
    for option in _behind(arguments):
        say(f"torch-promote: {option} after {name} is {name}'s argument. Options of `{what}` stand before the program.")


def prepare(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str], str]:
    """Returns the command that runs the program, its environment, and a description of what that installs."""
    from torch_promote.policy.policy import Policy
    from torch_promote.regions import installation as environment
    from torch_promote.regions.defaults import MODEL, default_policy

    problem = why_not_loaded()
    if problem is not None:
        raise OptionError(f"the program would run without torch_promote: {problem}")
    variables = {**os.environ, environment.AUTOCAST: "1"}
    policy = default_policy()
    if arguments.policy is not None:
        try:
            policy = Policy.of(arguments.policy)
        except PolicyError as error:
            raise PolicyError(f"--policy {arguments.policy}: {error}") from error
        named = arguments.policy in Policy.names()
        variables[environment.POLICY] = arguments.policy if named else os.path.abspath(arguments.policy)
    if arguments.model is not None:
        if policy is None or not policy.modules:
            raise OptionError(
                f"--model {arguments.model} is for a policy with tables for modules. Name one: --policy F.toml."
            )
        variables[MODEL] = arguments.model
    overrides = environment.asked_overrides()
    overrides |= environment.split_overrides(",".join(arguments.override))
    if overrides:
        variables[environment.OVERRIDES] = environment.join_overrides(overrides)
    if arguments.cache is not None:
        variables[environment.CACHE] = arguments.cache
    cache = cast("CacheMode | None", variables.get(environment.CACHE) or None)
    # Checks them. The program finds the models of the tables.
    installation = environment.Installation(None if policy is None else policy.without_modules(), overrides, cache)
    info = installation.info
    if policy is not None and policy.modules:
        tables = "; ".join(f"{name!r}: {table}" for name, table in policy.to_dict()["modules"].items())
        info += f" The policy's tables for modules apply to the models that run: {tables}."
    options = []
    if arguments.is_process:  # those of this interpreter, as multiprocessing passes them on
        options = [*subprocess._args_from_interpreter_flags(), *["-u"] * sys.stdout.write_through]  # type: ignore
    return [sys.executable, *options, *arguments.program], variables, info


def _what_to_run(arguments: argparse.Namespace) -> str:
    """Returns what to write instead of a program that does not exist."""
    word, *more = arguments.program
    script, colon, _ = word.partition(":")
    if getattr(arguments, "crosscheck", None) and word in ("dtype", "bits"):
        return f" To check {word}, write --crosscheck={word}."
    if word in ("python", "python3") and more:
        return f" Leave {word} out."
    if colon and os.path.exists(script):
        return f" Name the file alone, {script}, which runs as a program. `compare` and `tune` call a function of it."
    is_module = all(part.isidentifier() for part in word.removesuffix(".py").split("."))
    return f" For a module, write -m {word.removesuffix('.py')}." if is_module else ""


def _behind(arguments: argparse.Namespace) -> list[str]:
    """The long options of the command among the arguments of the program, unless `--` or its source says they are."""
    if arguments.is_separated:
        return []
    source = _source_of(arguments.program)
    words = [word.partition("=")[0] for word in arguments.program[1 + (arguments.program[0] in ("-m", "-c")) :]]
    ours = {word for word in arguments.options if word.startswith("--")} - {"--help"}
    return [one for one in dict.fromkeys(words) if one in ours and not re.search(rf"['\"]{one}(?![\w-])", source)]


def own_words(arguments: argparse.Namespace) -> list[str]:
    """Returns the program and its arguments without the options that `check` says stand before the program."""
    behind, kept, is_value = _behind(arguments), list[str](), False
    for word in arguments.program:
        name, equals, _ = word.partition("=")
        if name not in behind and not (is_value and not word.startswith("-")):
            kept.append(word)
        is_value = name in behind and not equals and arguments.options[name].nargs != 0
    return kept


def _refuse_shadow(script: str) -> None:
    """Raises OptionError if the program would import another torch_promote, from the first folder of its sys.path."""
    if os.path.isdir(script) or (os.path.isfile(script) and zipfile.is_zipfile(script)):  # not a pipe
        first = script
    elif sys.flags.safe_path:  # python -P
        return
    else:
        first = os.path.dirname(os.path.realpath(script)) if script else os.getcwd()
    spec = importlib.machinery.PathFinder.find_spec(torch_promote.__name__, [first])
    found = (spec and spec.origin) or ""  # a folder without __init__.py has none, and hides nothing
    if found and os.path.realpath(found) != os.path.realpath(torch_promote.__file__):
        raise OptionError(
            f"the program would run without torch_promote: {found} has its name, and comes first on the program's "
            "sys.path. Rename that file or folder."
        )


def _source_of(program: Sequence[str]) -> str:
    """Returns the source of a program, or of the one file of it that is known; "" if there is none."""
    word, *more = program
    if word.startswith("-c"):
        return word[2:] or more[0]
    path = Path(*(word[2:] or more[0]).split(".")).with_suffix(".py") if word.startswith("-m") else Path(word)
    path = path / "__main__.py" if path.is_dir() else path
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8") if path.is_file() else ""  # a pipe is read once
    return ""


def _is_module(name: str) -> bool:
    sys.path.insert(0, os.getcwd())
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def why_not_loaded() -> str | None:
    """Returns why `import torch` does not load torch_promote, and what to do; None if it does."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD keeps PyTorch from loading it. Unset that variable."
    if not any(point.module == _MODULE for point in importlib.metadata.entry_points(group=_GROUP)):
        return (
            f"the installed package has no entry point in the group {_GROUP}, or is not installed. Install it in this "
            "environment, in the source checkout: pip install --no-build-isolation --force-reinstall --no-deps ."
        )
    return None


# The process


def run_to_end(command: Sequence[str], variables: Mapping[str, str]) -> Popen[bytes]:
    """Runs a program, and passes signals on to it until it ends. Returns the ended program."""
    # All files stay open for it, such as those of `<(command)` in a shell.
    program = Popen(command, env=variables, close_fds=False)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not (_in_foreground() or _ends(program.pid)):  # it reaches the program by itself
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(number)

    # Signals that are ignored here (nohup) are ignored in the program as well.
    passed_on = [number for number in _PASSED_ON if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, pass_on) for number in passed_on}
    try:
        program.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return program


def _ends(process: int) -> bool:
    """Whether a child ends within half a second, as by a SIGINT for its group: that of `timeout`, or `kill %1`."""
    until = time.monotonic() + 0.5
    while hasattr(os, "waitid") and time.monotonic() < until:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        time.sleep(0.01)
    return False


def _in_foreground() -> bool:
    """Whether this process is in the group to which the terminal sends Ctrl-C."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def end_as(status: int, is_process: bool) -> int:
    """Returns the exit status for a program's status (negative: a signal, which also ends this process)."""
    # A process that is not the command's alone stays alive.
    if status >= 0:
        return status
    if is_process:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return 128 - status


def left_no_report(status: int) -> str:
    """Returns why a program left no report, as far as its status tells; negative if a signal ended it."""
    if status < 0:
        why = f"{signal.Signals(-status).name} ended it before Python's exit handlers ran"
    else:
        why = "it did not import torch, or it ended without Python's exit handlers (os._exit)"
    return f"torch-promote: the program left no report: {why}."


# Records, of `trace` and `find-nan`


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int  # negative if a signal ended it
    process: int
    records: Mapping[int, Record]  # by process
    lost: int = 0  # the processes that the program forked without multiprocessing and that left no record

    def named(self) -> dict[str, Record]:
        """Returns the records that count by their part of a file's name: see NOTE [ One file for each process ]."""
        named: dict[str, Record] = {}
        for process, record in sorted(self.records.items(), key=lambda item: (item[0] != self.process, item[0])):
            parent = self.records.get(record.parent)
            is_rank = record.rank is not None and (parent is None or parent.rank != record.rank)
            is_main = is_rank or process == self.process
            if is_main or _has_content(record):
                tag = "" if record.rank is None else f"rank{record.rank}"
                named[f"{tag}.pid{process}".lstrip(".") if tag in named or not is_main else tag] = record
        if len(named) > 1 and "" in named and not _has_content(named[""]):  # a launcher
            del named[""]
        return named


def _has_content(record: Record) -> bool:
    return bool(record.found if record.report is None or record.found is not None else record.report.total.policies)


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the program of `trace` and `find-nan`."""
    parser.add_argument(
        "--steps",
        metavar="A:B",
        type=parse_steps,
        default=(0, None),
        help="only optimizer steps A to B - 1, counted from 0; also A: and :B, or A for one step. A step is all that "
        "runs after the step before it, up to the end of optimizer.step()",
    )
    add_policy_options(parser)
    parser.add_argument(
        "--stock",
        action="store_true",
        help="keep PyTorch's own autocast; by default, torch.autocast opens regions of torch_promote, as in run",
    )


def parse_steps(text: str) -> tuple[int, int | None]:
    """Returns the first of the steps, and the one before which they end, None for the end of the program."""
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if match is None or not (match[1] or match[3]):
        raise argparse.ArgumentTypeError(
            f"{text}: not a range of steps. Write A:B, as in 10:12 for steps 10 and 11; also A:, :B, or A"
        )
    first = int(match[1] or 0)
    end = int(match[3]) if match[3] else None if match[2] else first + 1
    if end is not None and end <= first:
        raise argparse.ArgumentTypeError(f"{text}: there is no step in it. B comes after A, and does not count itself")
    return first, end


def run_recorded(arguments: argparse.Namespace, request: Request) -> Outcome:
    """Runs the program of `trace` or `find-nan` to its end. The folder and the steps are added to the request."""
    from torch_promote.numerics.traced_process import VARIABLE, read_records
    from torch_promote.regions.installation import AUTOCAST

    first, end = arguments.steps
    command, variables, _ = prepare(arguments)
    if arguments.stock:
        if arguments.override or any(getattr(arguments, name) is not None for name in ("policy", "model", "cache")):
            raise OptionError("--stock leaves torch.autocast PyTorch's, which has no --policy, --override or --cache.")
        variables[AUTOCAST] = "0"
    with tempfile.TemporaryDirectory(prefix="torch-promote-") as folder:
        if request.finds_nonfinite:  # a trace says it itself
            variables["TORCH_PROMOTE_ERRORS"] = "1"
        variables[VARIABLE] = replace(request, folder=folder, first=first, end=end).to_text()
        program = run_to_end(command, variables)
        records = read_records(Path(folder), request.options.get("max_calls", 0))
        lost = {int(one.stem) for one in Path(folder).glob("*.forked")} - records.keys()
        return Outcome(program.returncode, program.pid, records, len(lost))


def report_each(arguments: argparse.Namespace, outcome: Outcome, files: Mapping[str, str | None]) -> int:
    """Prints the reports of the processes, and writes their files. Returns the program's status, or 1 for its 0."""
    # 1 if the program succeeded, but left no report, a file was not written, or a record has an origin of inf or NaN.
    # `files` are those that were asked for, by their suffix; None is none.
    from torch_promote.numerics.traced_process import named_after

    records = {tag: one for tag, one in outcome.named().items() if one.report is not None}
    good = bool(records)
    for tag, record in records.items():
        if tag or len(records) > 1:
            say(f"torch-promote: {tag or 'the program'}")
        assert record.report is not None
        say(record.report)
        good &= not record.found
        written = []
        for suffix, path in files.items():
            if path is not None:
                path = named_after(path, suffix, tag)
                try:
                    record.report.save(path)
                    written.append(path)
                except (OSError, TorchPromoteError) as error:
                    say(f"torch-promote: error: {path} cannot be written: {getattr(error, 'strerror', error)}")
                    good = False
        if written:
            say(f"torch-promote: wrote {', '.join(written)}")
    own = outcome.records.get(outcome.process)
    if not records:
        few = f"the program ended before step {arguments.steps[0]}. Optimizer steps: {own.steps if own else 0}; a step "
        say(f"torch-promote: {few}that GradScaler skips does not count." if own else left_no_report(outcome.status))
    elif outcome.lost:
        say(f"torch-promote: forked processes that left no report (os._exit, a signal, exec): {outcome.lost:,}.")
    return outcome.status or int(not good)
