"""Verifies the result of a search: runs it on held-out batches, and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_promote.numerics.comparing.compare import REFERENCE
from torch_promote.numerics.tuning.resume import digest
from torch_promote.numerics.tuning.search import OutOfBudgetError
from torch_promote.numerics.tuning.trials import Trials, key_of_held_out
from torch_promote.numerics.tuning.verdict import Results
from torch_promote.policy.policy import Policy

__all__ = ["Verified", "verify", "verify_compiled"]

#: The text of a trial that was not made because there are no held-out batches.
_NONE = "no held-out batches"


@dataclass
class Verified:
    """The results of these runs.

    Attributes:
        met: Whether all met the tolerance.
        held_out: The errors on held-out batches; None if there are none.
        reference: The results of the reference on them; None if it has not run.
        compiled: The errors of the compiled step; None if nothing is compiled.
        texts: Sentences for the certificate.
        notes: Sentences for the notes.
    """

    met: bool = True
    held_out: Mapping[str, float] | None = None
    reference: Results | None = None
    compiled: Mapping[str, float] | None = None
    texts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(trials: Trials, policy: Policy, names: frozenset[str]) -> Verified:
    """Runs the step on held-out batches under the policy that was found.

    Args:
        trials: Makes the runs.
        policy: The policy.
        names: The candidates that have the override.
    """
    found = Verified()
    try:
        _on_held_out(trials, policy, names, found)
    except OutOfBudgetError:  # the process that wrote the file had a larger budget
        found.texts.append("The budget left no run for held-out batches.")
    return found


def verify_compiled(trials: Trials, policy: Policy, names: frozenset[str], found: Verified) -> None:
    """Runs the step compiled."""
    with contextlib.suppress(OutOfBudgetError):
        trial = trials.make(policy, names, "compiled", key=f"compiled {sorted(names)}", eager=False)
        found.compiled = trial.errors
        found.met &= trial.passed
        verdict = trial.error or trials.judge.describe(trial.errors)
        if trial.passed:
            found.texts.append(f"The compiled step meets the tolerance: {verdict}.")
        else:
            found.texts.append("The compiled step does not meet the tolerance.")
            found.notes.append(
                f"The step was tuned uncompiled, but does not meet the tolerance compiled: {verdict}. Compare the "
                f"reference compiled and uncompiled, or tune with a smaller tolerance."
            )


def _on_held_out(trials: Trials, policy: Policy, names: frozenset[str], found: Verified) -> None:
    which = len(trials.more) + 1
    key = key_of_held_out(names, which)
    if key not in trials.earlier:
        measured = trials.run(Policy.named(REFERENCE), held_out=which)
        same = not measured.error and any(
            digest(measured.results) == digest(known) for known in (trials.reference, *trials.more)
        )
        if measured.error or not trials.group.verdict(not same, {}, "")[0]:
            if measured.error:
                why = f"the reference raised {measured.error} there"
            elif trials.runs.takes_number:
                why = "the step gives the same results for the next numbers"
            else:
                why = (
                    "the step gives the same results with other random numbers. A step that takes the number of its "
                    "batch, step(i), has others"
                )
            found.texts.append(f"There are no held-out batches: {why}.")
            return
        trial = trials.make(policy, names, "held out", key=key, reference=measured.results, held_out=which)
        found.reference = measured.results
    else:
        trial = trials.make(policy, names, "held out", key=key)
        if not trial.passed and trials.runs.left > 0:
            found.reference = trials.run(Policy.named(REFERENCE), held_out=which).results
    found.held_out = trial.errors
    found.met &= trial.passed
    verdict = trial.error or trials.judge.describe(trial.errors)
    number = trials.runs.batches
    batches = "a held-out batch" if number == 1 else f"{number} held-out batches"
    if trial.passed:
        found.texts.append(f"On {batches} it also meets the tolerance: {verdict}.")
    else:
        found.texts.append(f"On {batches} it does not meet the tolerance: {verdict}.")
        found.notes.append(
            f"Held-out batches do not meet the tolerance: {verdict}. Tune with more batches than {number}, "
            f"or with a tolerance that is smaller than the one you need."
        )
