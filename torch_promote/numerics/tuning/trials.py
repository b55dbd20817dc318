"""The runs under overrides. Each is made once, judged on all ranks, and stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from torch_promote.numerics.report.findings import count
from torch_promote.numerics.tuning.agreement import Agreement
from torch_promote.numerics.tuning.measured_runs import MeasuredRuns
from torch_promote.numerics.tuning.resume import ResumeFile
from torch_promote.numerics.tuning.search import OutOfBudgetError
from torch_promote.numerics.tuning.tuning import Trial
from torch_promote.numerics.tuning.verdict import Judge, Measured, Results
from torch_promote.policy.policy import Policy

__all__ = ["Trials", "key_of_held_out"]


def key_of_held_out(names: frozenset[str], number: int) -> str:
    """Returns the key of a trial on held-out batches."""
    return f"held out {number} {sorted(names)}"


class Trials:
    """Runs under overrides.

    Args:
        runs: Makes the runs.
        judge: Judges them.
        group: The ranks that agree on each verdict.
        file: The file that stores them.
        show: Shows the progress.

    Attributes:
        reference: The results of the reference.
        more: Its results on further batches, on which a set must pass as well: held-out batches on which an earlier
            result failed.
        all: The trials, in order.
        reserve: The number of runs that the search leaves for later steps.
        predict: Returns the error that the impacts predict for the names that have the override.
        earlier: Trials of an earlier process, by key, that have not been used yet.
    """

    def __init__(
        self, runs: MeasuredRuns, judge: Judge, group: Agreement, file: ResumeFile, show: Callable[[int, str], None]
    ) -> None:
        self.runs, self.judge, self.group, self._file, self._show = runs, judge, group, file, show
        self.reference: Results = []
        self.more: list[Results] = []
        self._made: dict[str, Trial] = {}
        self.all: list[Trial] = []
        self.reserve = 0
        self.predict: Callable[[frozenset[str]], float | None] = lambda names: None
        self.earlier: dict[str, Trial] = {}

    def spare(self) -> int:
        """The number of runs that the search may still make."""
        return self.runs.left - self.reserve

    def search(self, policy: Policy, names: frozenset[str], why: str) -> Trial:
        """Makes a trial of the search, with one run per set of batches.

        Returns:
            The trial. With several sets of batches, it has the largest errors.

        Raises:
            OutOfBudgetError: The remaining runs are reserved.
        """
        trial = self._search(policy, names, why, 0)
        for number in range(1, len(self.more) + 1):
            if not trial.passed:
                break
            more = self._search(policy, names, "held out", number)
            errors = {name: max(error, trial.errors.get(name, 0.0)) for name, error in more.errors.items()}
            trial = dataclasses.replace(trial, errors=errors, passed=more.passed, error=more.error)
        return trial

    def _search(self, policy: Policy, names: frozenset[str], why: str, number: int) -> Trial:
        key = f"search {sorted(names)}" if number == 0 else key_of_held_out(names, number)
        if not self.is_made(key) and self.spare() < 1:
            raise OutOfBudgetError
        reference = self.more[number - 1] if number else None
        return self.make(policy, names, why, key=key, reference=reference, held_out=number)

    def is_made(self, key: str) -> bool:
        """Whether a trial was made, possibly by an earlier process."""
        return key in self._made or key in self.earlier

    def make(
        self,
        policy: Policy,
        names: frozenset[str],
        why: str,
        *,
        key: str,
        reference: Results | None = None,
        held_out: int = 0,
        eager: bool | None = None,
    ) -> Trial:
        """Makes a trial, or returns it if it was made before, possibly by an earlier process.

        Args:
            policy: The policy.
            names: The candidates that have the override.
            why: Its purpose.
            key: The key that identifies it.
            reference: The reference's results, if they are not `self.reference`.
            held_out: As in `StepRuns.run`.
            eager: As in `StepRuns.run`.
        """
        if key in self._made:
            return self._made[key]
        trial = self.earlier.pop(key, None)
        if trial is None:
            measured = self.run(policy, held_out=held_out, eager=eager)
            trial = self.judged(measured, names, why, reference)
            self.keep(key, trial)
        else:
            self.all.append(trial)
        self._made[key] = trial
        return trial

    def keep(self, key: str, trial: Trial) -> None:
        """Adds a trial, also to the file."""
        self.all.append(trial)
        if self.group.rank == 0:
            self._file.keep(key, trial, self.runs.spent)
        verdict = "passed" if trial.passed else "failed"
        self._show(self.runs.spent, f"{trial.why}: {count(len(trial.overrides), 'override')} {verdict}")

    def run(self, policy: Policy, *, held_out: int = 0, eager: bool | None = None) -> Measured:
        """Runs the step. An exception of the step becomes part of the result."""
        try:
            self.runs.run(policy, held_out=held_out, eager=eager)
        except OutOfBudgetError:
            raise
        except Exception as error:
            self.runs.log[-1][1].error = f"{type(error).__name__}: {error}"
        return self.runs.log[-1][1]

    def judged(self, measured: Measured, names: frozenset[str], why: str, reference: Results | None = None) -> Trial:
        """Returns the trial of a run, with the verdict of all ranks."""
        error, errors = measured.error, dict.fromkeys(self.judge.tolerance, math.inf)
        if not error:
            try:
                errors = self.judge.errors(measured.results, self.reference if reference is None else reference)
            except Exception as differs:
                error = f"{type(differs).__name__}: {differs}"
        passed = not error and measured.agreed and self.judge.meets(errors)
        passed, errors, error = self.group.verdict(passed, errors, error)
        measured.results = []  # metrics may be large
        return Trial(
            overrides=tuple(sorted(names)),
            errors=errors,
            passed=passed,
            why=why,
            predicted=self.predict(names),
            seconds=measured.seconds,
            error=error,
        )
