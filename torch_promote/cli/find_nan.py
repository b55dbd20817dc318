"""The command `torch-promote find-nan`: runs a program and reports where the first inf or NaN came from."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch_promote.cli.output import file, say
from torch_promote.cli.user_program import PROGRAM, add_record_options, end_as, own_words, report_each, run_recorded
from torch_promote.cli.user_program import check as check_program
from torch_promote.errors import OptionError

if TYPE_CHECKING:
    from torch_promote.cli.user_program import Outcome
    from torch_promote.numerics.find_nonfinite import NonfiniteReport
    from torch_promote.policy.policy import Policy

#: So many overrides are tried one after the other.
_MOST_TRIED = 8

DESCRIPTION = f"""\
Runs a Python program as `torch-promote run` does, and reports the first call
with finite inputs and an inf or NaN in its result, forward or backward, or the
call that lost the number for want of which it is one (1e-8 is 0 in float16):
the op, the module, the line, the ranges of its inputs, and whether the dtype
is to blame or the mathematics. The report goes to stderr, stdout is the
program's.

{PROGRAM}"""

EPILOG = """\
examples:
  torch-promote find-nan train.py --lr 0.1       where did the NaN come from?
  torch-promote find-nan --steps 100: train.py   after a hundred good steps
  torch-promote find-nan --raise-at-first train.py
                                                 stop there, with a traceback
  torch-promote find-nan --override softmax=fp32 train.py
                                                 does this override cure it?
  torch-promote find-nan --fix mine.toml train.py
                                                 run it again with each cure

Masks with -inf, values that the program replaces and steps that GradScaler
skips are no alarm, but listed as benign, with the number of skipped steps and
a scale that would do. Each rank writes a file of its own, such as
nan.rank1.json.

exit status: the program's, if it is not 0. 1 if an origin was found, GradScaler
skipped all steps, or the program left no report. 2 if the command line is
invalid: nothing has run then.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", metavar="F.json", type=file(".json"), help="write the report as JSON")
    parser.add_argument("--html", metavar="F.html", type=file(".html"), help="write the report as a page")
    parser.add_argument(
        "--raise-at-first", action="store_true", help="raise an error at the first origin, from the line that made it"
    )
    parser.add_argument(
        "--fix",
        metavar="F.toml",
        type=file(".toml"),
        help="run the program again with each cure, until there is no origin, and write the policy that cured it; "
        "mine.toml if no name stands before the program",
    )
    add_record_options(parser)


def check(arguments: argparse.Namespace) -> None:
    """Raises OptionError if there is no such program, or --fix cannot run it again."""
    check_program(arguments)
    if arguments.fix is not None and arguments.stock:
        raise OptionError("--fix tries overrides, which --stock rules out. Leave one of them out.")
    word = arguments.program[0]
    is_again = word.startswith(("-m", "-c")) or os.path.isfile(word) or os.path.isdir(word)
    if arguments.fix is not None and not is_again:
        what = word.replace("-", "stdin", word == "-")
        raise OptionError(f"--fix runs the program several times, and {what} can be read once. Save it in a file.")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    from torch_promote.numerics.traced_process import Request
    from torch_promote.regions.installation import split_overrides

    request = Request("", {"raise_at_first": arguments.raise_at_first}, finds_nonfinite=True)
    given, runs, step = len(arguments.override), 0, 0
    others: list[list[str]] = []  # the overrides to try next, in place of those in force
    cured: dict[int, list[str]] = {}  # those without an origin, by the number of parameters that they leave no gradient
    while True:
        outcome = run_recorded(arguments, request)
        status = report_each(arguments, outcome, {".json": arguments.json, ".html": arguments.html})
        found = [one.report for one in outcome.records.values() if one.report is not None and one.found]
        cures = _cures(found, arguments.override)
        is_killed = outcome.status < 0  # by Ctrl-C, for example
        if arguments.fix is None or is_killed:
            for cure in cures:
                say(
                    f"torch-promote: to see whether it cures it:\n  torch-promote find-nan {cure} {_program(arguments)}"
                )
            if cures:
                what = "to try it, and then what cures the next origin, if there is one"
                say(f"torch-promote: {what}:\n  torch-promote find-nan --fix mine.toml {_program(arguments)}")
            unused = [one.unused for one in outcome.named().values()]
            asked = split_overrides(",".join(arguments.override)).items()
            options = _options(one for one in map("=".join, asked) if not all(one in each for each in unused))
            if options and not found and not status:
                say(f"torch-promote: to use it:\n  torch-promote run{options} {_program(arguments)}")
            if arguments.fix is not None:
                why = f"{signal.Signals(-outcome.status).name} ended the program"
                say(f"torch-promote: {arguments.fix} is not written: {why}.")
            return end_as(status, arguments.is_process)
        runs += 1
        tried = _options(arguments.override[given:])
        if found and cures:
            others[:0] = [[*arguments.override, *shlex.split(one.replace("--override ", ""))] for one in cures]
            step = min((one.origin.step for one in found if one.origin is not None), default=step)
        elif tried and not found and not status:
            zeros, count = _zero_gradients(outcome, step)
            others = others if zeros else []
            if zeros and (others or zeros == count):  # some have none in any dtype
                of = f"{zeros:,} of {count:,} parameters"
                say(f"torch-promote: with{tried}, the gradients of {of} are all 0 from step {step:,} on.")
            if zeros < max(count, 1):
                cured.setdefault(zeros, arguments.override)
        if others and runs <= _MOST_TRIED:
            arguments.override = others.pop(0)
            say(f"torch-promote: runs it again with{_options(arguments.override[given:])}")
            continue
        if not cured:
            if found:
                why = "an origin is left" if cures else "the report names no override to try"
            elif tried and not status:
                why, status = "no gradient is left", 1
            else:
                why = "it failed" if status else "there is no origin to cure"
            say(f"torch-promote: {arguments.fix} is not written: {why}.{' Tried:' * bool(tried)}{tried}")
            return end_as(status, arguments.is_process)
        arguments.override = cured[min(cured)]
        done = "replaced" if os.path.exists(arguments.fix) else "wrote"
        _policy(arguments).save(arguments.fix)
        say(f"torch-promote: {done} {arguments.fix}. With it, no origin was found in the same steps.")
        policy = shlex.quote(arguments.fix)
        say(f"torch-promote: to use it:\n  torch-promote run --policy {policy} {_program(arguments)}")
        return 0


def _options(overrides: Iterable[str]) -> str:
    return "".join(f" --override {one}" for one in overrides)


def _zero_gradients(outcome: Outcome, step: int) -> tuple[int, int]:
    """The number of parameters whose gradients are all 0 from a step on, and of those that have some."""
    reports = [one.report for one in outcome.records.values() if one.report is not None]
    zeros, counts = zip(*(one.zero_gradients(step) for one in reports), strict=True)
    return sum(zeros), sum(counts)


def _cures(found: Iterable[NonfiniteReport], in_force: Sequence[str]) -> list[str]:
    """The options to try, the narrowest first, without those for ops that have an override."""
    tried = {one.partition("=")[0].strip().removeprefix("aten::") for one in ",".join(in_force).split(",")}
    attempts = (one for report in found for one in report.attempts if one.option)
    return list(
        dict.fromkeys(
            one.option for one in attempts if tried.isdisjoint(name for op in one.ops for name in _names_of(op))
        )
    )


def _policy(arguments: argparse.Namespace) -> Policy:
    from torch_promote.policy.policy import Policy
    from torch_promote.regions.defaults import default_policy
    from torch_promote.regions.installation import split_overrides

    overrides: dict[str, Any] = {}
    for text in arguments.override:
        overrides |= split_overrides(text)
    return Policy.of(arguments.policy or default_policy() or "stock").override(overrides)


def _program(arguments: argparse.Namespace) -> str:
    return shlex.join(own_words(arguments))


def _names_of(key: str) -> tuple[str, str]:
    name = key.removeprefix("aten::")
    return name, name.partition(".")[0]
