"""The command `torch-promote compare`: runs a step under two policies and reports which ops lose accuracy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

from torch_promote.cli import target as targets
from torch_promote.cli.output import say
from torch_promote.cli.target import check as check
from torch_promote.errors import OptionError, did_you_mean

DESCRIPTION = """\
Runs a training or evaluation step under two policies, by default in float32 and
under the policy in force, and reports for each op in each module how much
accuracy it loses, and what that does to the loss.

TARGET is a function without arguments that returns (model, step), or (model,
step, restore), or a dict of them. step() runs one step with its own regions of
my_autocast or torch.autocast, and returns the loss, outputs, or a dict:

    def make():
        model, batch = MyModel(), load_batch()
        def step():
            with torch.autocast("cpu", dtype=torch.float16):
                return model(batch).mean()
        return model, step

columns:
  local        the error of the op alone, on the inputs of the reference: who is
               to blame
  accumulated  its error in the candidate's own run: who shows the symptom
  impact       what the local error does to the loss, first order, in its unit

Errors are relative L2 norms. The parameters, buffers, optimizers and random
number generators are restored after each run.
"""

EPILOG = """\
examples:
  torch-promote compare train.py:make            PyTorch's policy and float32
  torch-promote compare train.py:make --html run.html
                                                 a page to open in a browser
  torch-promote compare train.py:make --candidate mine.toml --tolerance 1e-3
                                                 is this policy good enough?
  torch-promote compare package.train:make --gradients --batches 4

The file is loaded as `python train.py` would load it, except that its __name__
is not "__main__". What it prints goes to stderr if --json prints to stdout.

exit status: 1 if the candidate's results are not finite and the reference's
are, or a metric is over --tolerance. 2 if the command line is invalid, or the
target raised an error or has other results in a second run of the reference.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    targets.add_arguments(
        parser, "exit with 1 if a metric's error is larger: 1e-3, or loss=1e-3; repeatable", required=False
    )
    parser.add_argument(
        "--candidate", metavar="P", help="the policy to judge: a name or a policy file (default: the one in force)"
    )
    parser.add_argument(
        "--reference", metavar="P", default="fp32", help="the policy to compare with (default: fp32, without casts)"
    )
    parser.add_argument("--gradients", action="store_true", help="compare the gradients of parameters, too")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status."""
    from torch_promote.numerics.compare import compare
    from torch_promote.numerics.comparison import BROKEN, TRACED
    from torch_promote.report.base import spell_number

    tolerance = targets.tolerance_of(arguments)
    with targets.open_target(arguments) as target:
        comparison = compare(
            target.step,
            model=target.model,
            reference=arguments.reference,
            candidate=arguments.candidate,
            gradients=arguments.gradients,
            batches=arguments.batches,
            restore=target.restore,
        )
    targets.put_out(comparison, arguments)
    errors = {metric.name: metric.error for metric in comparison.metrics}
    limits = tolerance if isinstance(tolerance, dict) else dict.fromkeys(errors, tolerance)
    for name in limits.keys() - errors.keys():
        raise OptionError(
            f"--tolerance {name}=...: the step returns no {name!r}.{did_you_mean(name, errors)} It returns "
            f"{', '.join(errors)}."
        )
    status = 0
    for name, error in errors.items():
        if name in limits and not error <= limits[name]:
            say(f"torch-promote: the error of {name}, {spell_number(error)}, is over {spell_number(limits[name])}.")
        elif not math.isfinite(error):
            known = next(metric.reference for metric in comparison.metrics if metric.name == name)
            also = "and the reference's is" if known is None or math.isfinite(known) else "nor is the reference's"
            say(f"torch-promote: {name} is not finite, {also}.")
        else:
            continue
        status = 1
    if any(note.startswith(BROKEN) for note in comparison.notes):
        targets.say_next(arguments, "find-nan", policy=arguments.candidate)
        return 1
    if not any(errors.values()) and any(TRACED in note for note in comparison.notes):
        targets.say_next(arguments, "trace", "--values", policy=arguments.candidate)
    else:
        _say_next(arguments, errors, limits, status)
    return status


def _say_next(
    arguments: argparse.Namespace, errors: Mapping[str, float], limits: Mapping[str, float], status: int
) -> None:
    """Says what to type next: the search for where the values become infinite, for overrides, or the program."""
    largest, policy = max(errors.values(), default=0.0), arguments.candidate
    if not math.isfinite(largest):
        targets.say_next(arguments, "find-nan", policy=policy)
    elif status or (largest and not limits):
        # Half of the error, as a power of ten, is a tolerance that the candidate does not meet. Above 1 % it is none.
        asked = arguments.tolerance or [("", float(f"1e{min(math.floor(math.log10(largest / 2)), -2)}"))]
        tolerances = (f"{name}{'=' * bool(name)}{_spell(value)}" for name, value in asked)
        options = [word for text in tolerances for word in ("--tolerance", text)]
        options += ["--batches", str(arguments.batches)] if arguments.batches > 1 else []
        targets.say_next(arguments, "tune", *options, "-o", "mine.toml", policy=policy)
    else:
        targets.say_next(arguments, "run", policy=policy)


def _spell(value: float) -> str:
    """Spells a tolerance as one writes it: 1e-3."""
    short = f"{value:.0e}".replace("e-0", "e-")
    return short if float(short) == value else f"{value:g}"
