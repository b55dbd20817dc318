"""The command `torch-promote tune`: finds the smallest set of overrides that meets a tolerance."""

from __future__ import annotations

import argparse
import json
import shlex

from torch_promote.cli import target as targets
from torch_promote.cli.output import STDOUT, file, natural, say, show
from torch_promote.cli.target import check as check
from torch_promote.errors import Fp32FailsError

DESCRIPTION = """\
Finds the smallest set of overrides with which a step in lower precision stays
within a tolerance of float32, and saves it as a policy. It searches on top of
the policy in force: PyTorch's own, or that of TORCH_PROMOTE_POLICY.

TARGET is that of `torch-promote compare --help`; its dict may have metric and
check, too.

A tolerance is relative to what float32 gives: of a number, |a - b| / |b|; of a
tensor, the relative L2 norm. What was found is run again on batches that the
search did not see. docs/tuning.md says how the search goes.
"""

EPILOG = """\
examples:
  torch-promote tune train.py:make --tolerance loss=1e-3 -o mine.toml
  torch-promote tune train.py:make --tolerance loss=1e-3 --tolerance logits=1e-2
  torch-promote tune train.py:make --tolerance 1e-3 --level site --budget 200
  torch-promote tune train.py:make --tolerance 1e-3 --resume runs.json
                                                 goes on after an interruption
  torch-promote run --policy mine.toml train.py  then: the program, unchanged

In a program: torch_promote.install(policy="mine.toml"), or
  with torch_promote.my_autocast("cpu", policy="mine.toml", model=model): ...

Ctrl-C ends the search, and reports and saves the best that is known.

exit status: 0 if the policy that is saved meets the tolerance, also if no
override is needed. 1 if it does not, or not even float32 does. 2 if the command
line is invalid, or the target raised an error or has other results in a second
run in float32. 130 if it was interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    targets.add_arguments(
        parser, "the largest error: 1e-3 for every metric, or loss=1e-3 for one; repeatable", required=True
    )
    parser.add_argument("--budget", metavar="N", type=natural, default=60, help="the most runs to make (default: 60)")
    parser.add_argument(
        "--level",
        choices=("op", "module", "site"),
        default="op",
        help="what gets an override: softmax in the whole model (op, the default), all "
        "that blocks.0.attn itself calls (module), or softmax in blocks.0.attn (site)",
    )
    parser.add_argument(
        "--direction",
        choices=("accuracy", "speed"),
        default="accuracy",
        help="what to search for: the fewest overrides with which the tolerance is met (accuracy, the default), or "
        "which ops that run in float32 may run in lower precision (speed)",
    )
    parser.add_argument(
        "--formats",
        metavar="FROM,TO",
        type=lambda text: tuple(part.strip() for part in text.split(",")),
        help="of --direction speed: fp32,lower (the default), or lower,float8 (or another float8 policy, such as "
        "lower,float8:tensorwise): which linear layers that run in lower precision may run in float8",
    )
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16"), help="the dtype of regions that name none: float16 or bfloat16"
    )
    parser.add_argument(
        "--seed", metavar="N", type=natural, default=0, help="the order of equal candidates (default: 0)"
    )
    parser.add_argument("--resume", metavar="F", help="keep the runs in a file, and go on with those that it has")
    parser.add_argument("-o", "--output", metavar="F.toml", type=file(".toml"), help="save the policy")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    from torch_promote.numerics.tune import tune

    tolerance = targets.tolerance_of(arguments)
    try:
        with targets.open_target(arguments) as target:
            found = tune(
                target.step,
                model=target.model,
                tolerance=tolerance,
                metric=target.metric,
                batches=arguments.batches,
                check=target.check,
                budget=arguments.budget,
                level=arguments.level,
                direction=arguments.direction,
                formats=arguments.formats,
                dtype=arguments.dtype,
                seed=arguments.seed,
                resume=arguments.resume,
                restore=target.restore,
            )
    except Fp32FailsError as error:
        return _end_without_search(error, arguments)
    except KeyboardInterrupt:
        say("torch-promote: interrupted in the first runs: nothing is known, and nothing was saved.")
        raise
    targets.put_out(found, arguments, arguments.output)
    if arguments.output is not None and not found.overrides:
        say(f"torch-promote: {arguments.output} has no override beyond the policy in force.")
    if not found.reason:
        if arguments.output is None:
            say("torch-promote: the policy was not saved. To save it, name a file: -o mine.toml")
        _say_next(arguments, found.met, interrupted=found.interrupted)
    elif found.candidates and found.direction == "accuracy":
        _say_search(arguments, "--direction", "speed")
    if found.interrupted:
        return 130
    return 0 if found.met else 1


def _end_without_search(error: Fp32FailsError, arguments: argparse.Namespace) -> int:
    """Prints why no overrides meet the tolerance, and returns the exit status."""
    from torch_promote.numerics.comparison import BROKEN
    from torch_promote.policy.files import write_atomically

    sentence = f"not met: {error}"
    data = {"met": False, "why": sentence}
    show(data, [sentence], arguments.json == STDOUT)
    if arguments.json not in (None, STDOUT):
        write_atomically(arguments.json, json.dumps(data, indent=2) + "\n")
        say(f"torch-promote: wrote {arguments.json}")
    if arguments.output is not None:
        say(f"torch-promote: no policy was found, so {arguments.output} was not written.")
    if arguments.html is not None:
        say("torch-promote: there was no search, so there is no page.")
    if BROKEN in sentence:
        targets.say_next(arguments, "find-nan")
    else:
        _say_next(arguments, False, is_saved=False)
    return 1


def _say_next(arguments: argparse.Namespace, met: bool, *, is_saved: bool = True, interrupted: bool = False) -> None:
    """Says what to type next: the program under the policy, the rest of this search, or what loses accuracy."""
    policy = arguments.output if is_saved else None
    if met and policy is not None and not interrupted:
        targets.say_next(arguments, "run", policy=policy)
    elif not met and not interrupted:
        targets.say_next(arguments, "compare", policy=policy)
    else:
        _say_search(arguments, *(["--resume", "runs.json"] if interrupted and arguments.resume is None else []))


def _say_search(arguments: argparse.Namespace, *options: str) -> None:
    """Says that the next command is this one with more options, and a file for the policy if it names none."""
    saved = [] if arguments.output is not None else ["-o", "mine.toml"]
    say(f"torch-promote: next: {shlex.join(['torch-promote', 'tune', *arguments.words, *saved, *options])}")
