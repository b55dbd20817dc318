"""The trials of `tune`: each set of overrides runs once, is judged on all ranks, and is stored in a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_promote.errors import OptionError, TorchPromoteError, did_you_mean, shown
from torch_promote.numerics.call_observers import hidden_from_observers
from torch_promote.numerics.comparison import Comparison
from torch_promote.numerics.search import OutOfBudgetError
from torch_promote.numerics.step_runs import Ranks, Results, StepRuns, distances, norm_of, read_result
from torch_promote.numerics.tuning import Trial
from torch_promote.policy.files import write_atomically
from torch_promote.policy.policy import Policy
from torch_promote.report.codec import decode, encode


class Judge:
    """Computes the metrics of runs, and compares them with the reference's. Its arguments are those of `tune`."""

    def __init__(
        self,
        tolerance: float | Mapping[str, float],
        metric: Callable[[Any], Any] | str | None = None,
        check: Callable[[Any], bool] | None = None,
    ) -> None:
        values = list(tolerance.values()) if isinstance(tolerance, Mapping) else [tolerance]
        numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
        if not values or len(numbers) < len(values) or not all(0 < one < math.inf for one in numbers):
            raise OptionError(
                f"tolerance must be a finite number above 0 (relative to the reference), or a mapping of metrics to "
                f"such numbers, got {shown(tolerance)}. For example tolerance=1e-3 or tolerance={{'loss': 1e-3}}."
            )
        if metric is not None and not isinstance(metric, str) and not callable(metric):
            raise OptionError(
                f"metric must be a function of the step's result, the name of a part of it, or None for all of it, got "
                f"{shown(metric)}."
            )
        if check is not None and not callable(check):
            raise OptionError(f"check must be a function of the step's result that returns a bool, got {shown(check)}.")
        self._asked = dict(tolerance) if isinstance(tolerance, Mapping) else float(tolerance)
        self.metric = metric
        self.check = check
        self.tolerance: dict[str, float] = {}  # of each metric; empty before `name_metrics`

    def compute(self, result: Any) -> dict[str, torch.Tensor]:
        """Returns the results of the metric function by name; a single number gets the only one, or the function's."""
        assert callable(self.metric)
        metrics = read_result(self.metric(result))
        if list(metrics) != ["loss"]:
            return metrics
        asked = list(self._asked) if isinstance(self._asked, dict) else []
        name = getattr(self.metric, "__name__", "metric")
        return {asked[0] if len(asked) == 1 else "metric" if name == "<lambda>" else name: metrics["loss"]}

    def choose(self, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the metrics among the tensors that a step returned."""
        if not isinstance(self.metric, str):
            return results
        if self.metric not in results:
            raise OptionError(
                f"metric={self.metric!r}: step() returned no such name.{did_you_mean(self.metric, results)} "
                f"Legal: {', '.join(results)}."
            )
        return {self.metric: results[self.metric]}

    def name_metrics(self, results: Results, zeros: Collection[str]) -> None:
        """Sets `tolerance` from the names of the reference's metrics; `zeros` are gradients that are rounding alone."""
        names = list(results[0])
        if not isinstance(self._asked, dict):
            self.tolerance = dict.fromkeys([one for one in names if one not in zeros] or names, self._asked)
            return
        unknown = [name for name in self._asked if name not in names]
        if unknown:
            raise OptionError(
                f"tolerance names {', '.join(map(repr, unknown))}, and step() returned {', '.join(map(repr, names))}."
                f"{did_you_mean(unknown[0], names)}"
            )
        self.tolerance = {name: float(value) for name, value in self._asked.items()}

    def errors(self, results: Results, reference: Results) -> dict[str, float]:
        """Returns the error of each metric for the worst batch."""
        return worst([distances(ours, theirs) for ours, theirs in zip(results, reference, strict=True)])

    def meets(self, errors: Mapping[str, float]) -> bool:
        """Whether errors are within the tolerance."""
        return all(errors.get(name, math.inf) <= limit for name, limit in self.tolerance.items())

    def describe(self, errors: Mapping[str, float]) -> str:
        """Returns errors with their tolerances as text: "loss 0.02 (tolerance 0.001)"."""
        return ", ".join(
            f"{name} {errors.get(name, math.inf):.3g} (tolerance {limit:g})" for name, limit in self.tolerance.items()
        )


@dataclass(frozen=True)
class FirstRuns:
    """What the runs before the search have measured, as the file to resume from stores it."""

    # The norms of the reference's metrics for each batch, from which a later process sees that its step gives the same
    # results.
    norms: list[dict[str, float]]
    noise_floor: dict[str, float]  # for each metric, the difference between two runs of the reference
    comparison: Comparison  # of the policy with the reference

    def fits(self, reference: Results) -> bool:
        """Whether these are the results of the same reference, up to the noise."""
        for batch, norms in zip(reference, self.norms, strict=True):
            for name, tensor in batch.items():
                norm = norm_of(tensor)
                allowed = 2 * self.noise_floor.get(name, 0.0) * abs(norms.get(name, 0.0))
                if str(norm) != str(norms.get(name)) and not abs(norm - norms.get(name, math.inf)) <= allowed:
                    return False
        return True


class ResumeFile:
    """The file from which `tune` resumes, which is rewritten after each trial. Rank 0 reads and writes it."""

    _FORMAT = 2

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, Any], ranks: Ranks) -> None:
        self._path = None if path is None or ranks.rank else Path(path)
        self._identity = json.loads(json.dumps(identity))
        self.first: FirstRuns | None = None  # None if the file is new
        self.trials: dict[str, Trial] = {}
        self.runs: int = 0  # the number of runs made
        error = None
        try:
            if self._path is not None:
                self._open(self._path)
        except TorchPromoteError as raised:
            error = raised
        (self.first, self.trials, self.runs, error) = ranks.gather((self.first, self.trials, self.runs, error))[0]
        if error is not None:
            raise error

    def _open(self, path: Path) -> None:
        if not path.exists():
            if not path.absolute().parent.is_dir():
                raise OptionError(
                    f"resume={str(path)!r} cannot be written: there is no folder of that name. Create it first."
                )
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            identity, form, self.runs = data["identity"], data["format"], int(data["runs"])
            if form == self._FORMAT:
                self.first = decode(FirstRuns, data["first"])
                self.trials = decode(dict[str, Trial], data["trials"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, TorchPromoteError) as error:
            raise OptionError(
                f"resume={str(path)!r} was not written by tune ({type(error).__name__}: {error}). Use another file, or "
                f"one that does not exist yet."
            ) from None
        if form != self._FORMAT:
            raise OptionError(f"resume={str(path)!r} has format {form!r}; this release reads format {self._FORMAT}.")
        for key in {**identity, **self._identity}:
            if identity.get(key) != self._identity.get(key):
                raise OptionError(
                    f"resume={str(path)!r} belongs to another tuning, with {key}={identity.get(key)!r} instead of "
                    f"{self._identity.get(key)!r}. Use another file, or delete it."
                )

    def write(self) -> None:
        """Writes the file."""
        if self._path is None:
            return
        data = {
            "format": self._FORMAT,
            "identity": self._identity,
            "runs": self.runs,
            "first": encode(self.first),
            "trials": encode(self.trials),
        }
        try:
            write_atomically(self._path, json.dumps(data, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise OptionError(f"resume={str(self._path)!r} cannot be written: {error.strerror or error}.") from error


@dataclass
class Run:
    """A run of the step."""

    policy: Policy
    metrics: Results = field(default_factory=list)  # for each batch
    agreed: bool = True  # whether `check` returned true for each batch's result
    seconds: float = 0.0
    error: str = ""  # the exception that the step raised


class Trials(StepRuns):
    """Runs of a step within a budget. A trial is a run under overrides with its verdict."""

    def __init__(
        self, step: Callable[..., Any], model: nn.Module, judge: Judge, budget: int, ranks: Ranks, **options: Any
    ) -> None:
        super().__init__(step, model, **options)
        self.judge: Judge = judge
        self.budget: int = budget
        self.ranks: Ranks = ranks
        self.file: ResumeFile
        self.show: Callable[[int, str], None] = lambda done, remark: None  # shows the progress
        self.log: list[Run] = []  # all runs, in order
        self.all: list[Trial] = []  # in order
        self.reference: Results = []  # the metrics of the reference
        # Those on held-out batches on which an earlier result failed, so that a set must pass on them as well.
        self.more: list[Results] = []
        self.reserve = 0  # the number of runs that the search leaves for later steps
        self.before = 0  # the number of runs of the budget that an earlier process made
        self._made: dict[str, Trial] = {}

    @property
    def spent(self) -> int:
        """The number of runs made, including those of an earlier process."""
        return self.before + self.count

    @property
    def left(self) -> int:
        """The number of runs left in the budget."""
        return self.budget - self.spent

    def spare(self) -> int:
        """The number of runs that the search may still make."""
        return self.left - self.reserve

    def run(self, policy: Policy, *, on_result: Callable[[int, Any], None] | None = None, **options: Any) -> Results:
        """Like `StepRuns.run`, and adds the run to `log`. Raises OutOfBudgetError if no runs are left."""
        if self.left < 1:
            raise OutOfBudgetError
        run = Run(policy)
        self.log.append(run)

        def measure(number: int, result: Any) -> None:
            with torch.no_grad(), hidden_from_observers():
                run.agreed &= self.judge.check is None or bool(self.judge.check(result))
                if callable(self.judge.metric):
                    run.metrics.append(self.judge.compute(result))
            if on_result is not None:
                on_result(number, result)

        started = time.perf_counter()
        try:
            results = super().run(policy, on_result=measure, **options)
            if not callable(self.judge.metric):
                run.metrics = [self.judge.choose(batch) for batch in results]
            return results
        except Exception as error:
            run.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            run.seconds = time.perf_counter() - started

    def run_safely(self, policy: Policy, **options: Any) -> Run:
        """Runs the step. An exception of the step becomes part of the result."""
        if self.left < 1:
            raise OutOfBudgetError
        with contextlib.suppress(Exception):  # it is in the log
            self.run(policy, **options)
        return self.log[-1]

    def search(self, policy: Policy, names: frozenset[str], why: str) -> Trial:
        """Makes a trial of the search on all batches. Raises OutOfBudgetError if the remaining runs are reserved."""
        trial = self.make(f"search {sorted(names)}", policy, names, why, is_search=True)
        for number, reference in enumerate(self.more, 1):
            if not trial.passed:
                break
            key = f"held out {number} {sorted(names)}"
            more = self.make(key, policy, names, "held out", reference=reference, held_out=number, is_search=True)
            errors = {name: max(error, trial.errors.get(name, 0.0)) for name, error in more.errors.items()}
            trial = dataclasses.replace(trial, errors=errors, passed=more.passed, error=more.error)
        return trial

    def is_known(self, key: str) -> bool:
        """Whether a trial was made, possibly by an earlier process."""
        return key in self._made or key in self.file.trials

    def make(
        self,
        key: str,
        policy: Policy,
        names: frozenset[str],  # of the candidates that have the override
        why: str,
        *,
        reference: Results | None = None,  # if it is not `self.reference`
        is_search: bool = False,  # whether it leaves the reserved runs alone
        **options: Any,
    ) -> Trial:
        """Makes a trial, or returns it if it was made before, possibly by an earlier process, which the key tells."""
        if key not in self._made:
            if key in self.file.trials:
                self.all.append(self.file.trials[key])
            elif is_search and self.spare() < 1:
                raise OutOfBudgetError
            else:
                run = self.run_safely(policy, **options)
                self.add(key, run, names, why, self.reference if reference is None else reference)
            self._made[key] = self.all[-1]
        return self._made[key]

    def add(self, key: str, run: Run, names: frozenset[str], why: str, reference: Results) -> None:
        """Adds the trial of a run, with the verdict of all ranks."""
        error, errors = run.error, dict.fromkeys(self.judge.tolerance, math.inf)
        if not error:
            try:
                errors = self.judge.errors(run.metrics, reference)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        passed = not error and run.agreed and self.judge.meets(errors)
        run.metrics = []  # they may be large
        verdicts = self.ranks.gather((passed, errors, error))
        raising = [(rank, text) for rank, (_, _, text) in enumerate(verdicts) if text]
        if raising:
            error = raising[0][1] if self.ranks.count == 1 else f"rank {raising[0][0]}: {raising[0][1]}"
        trial = Trial(
            overrides=tuple(sorted(names)),
            errors=worst([theirs for _, theirs, _ in verdicts]),
            passed=all(passed for passed, _, _ in verdicts),
            why=why,
            seconds=run.seconds,
            error=error,
        )
        self.all.append(trial)
        self.file.trials[key] = trial
        self.file.runs = self.spent
        self.file.write()
        self.show(self.spent, f"{why}: {'passed' if trial.passed else 'failed'}")


def worst(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the largest error of each metric."""
    return {name: max(one.get(name, 0.0) for one in errors) for name in dict.fromkeys(n for e in errors for n in e)}
