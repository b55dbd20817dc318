"""The runs under overrides. Each is made once, judged on all ranks, and stored."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_promote import _C
from torch_promote.errors import OptionError, StepError, TorchPromoteError, TuningError, did_you_mean
from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.numerics.search import OutOfBudgetError
from torch_promote.numerics.step_runs import Results, StepRuns, distances, read_result
from torch_promote.numerics.step_state import add_bytes
from torch_promote.numerics.tuning.tuning_records import Trial
from torch_promote.observe.findings import count
from torch_promote.observe.pages import from_plain, numbers, spell_tolerance, to_plain
from torch_promote.policy.atomic_write import write_atomically
from torch_promote.policy.policy import Policy

__all__ = [
    "Agreement",
    "Judge",
    "Kept",
    "Measured",
    "MeasuredRuns",
    "Results",
    "ResumeFile",
    "Trials",
    "describe",
    "digest",
    "key_of_held_out",
]


# ---Judges whether a run meets the tolerance.


@dataclass
class Measured:
    """The measurements of a run.

    Attributes:
        results: For each batch the metrics.
        agreed: Whether `check` returned true for each batch's result.
        seconds: Its duration.
        error: The exception that the step raised, or "".
    """

    results: Results = field(default_factory=list)
    agreed: bool = True
    seconds: float = 0.0
    error: str = ""


class Judge:
    """Compares runs with the reference.

    Args:
        tolerance: For all metrics, or by name.
        metric: The value to compare: a function of the step's result, the name of a part of it, or None for all.
        check: A function of the step's result that must return true for each batch.

    Attributes:
        tolerance: The tolerance of each metric; empty before `name_metrics`.

    Raises:
        OptionError: An argument is invalid.

    Example:
        >>> judge = Judge(0.1)
        >>> judge.name_metrics([{"loss": torch.tensor(2.0)}])
        >>> judge.meets({"loss": 0.05}), judge.meets({"loss": 0.2})
        (True, False)
    """

    def __init__(
        self,
        tolerance: float | Mapping[str, float],
        metric: Callable[[Any], Any] | str | None = None,
        check: Callable[[Any], bool] | None = None,
    ) -> None:
        values = list(tolerance.values()) if isinstance(tolerance, Mapping) else [tolerance]
        if not values or not all(map(_is_tolerance, values)):
            raise OptionError(
                f"tolerance must be a finite number above 0 (relative to the reference), or a mapping of metrics to "
                f"such numbers, got {tolerance!r}. For example tolerance=1e-3 or tolerance={{'loss': 1e-3}}."
            )
        if metric is not None and not isinstance(metric, str) and not callable(metric):
            raise OptionError(
                f"metric must be a function of the step's result, the name of a part of it, or None for all of it, got "
                f"{metric!r}."
            )
        if check is not None and not callable(check):
            raise OptionError(f"check must be a function of the step's result that returns a bool, got {check!r}.")
        self._asked = dict(tolerance) if isinstance(tolerance, Mapping) else float(tolerance)
        self._metric = metric
        self._check = check
        self.tolerance: dict[str, float] = {}

    def agrees(self, result: Any) -> bool:
        """Whether `check` returns true for a step's result."""
        return self._check is None or bool(self._check(result))

    def compute(self, result: Any) -> dict[str, torch.Tensor] | None:
        """Returns the results of the metric function for a step's result; None if the metric is not a function.

        Raises:
            StepError: The function returned nothing to compare.
        """
        return self._named(read_result(self._metric(result))) if callable(self._metric) else None

    def choose(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the metrics among the named tensors that a step returned.

        Raises:
            OptionError: There is no metric of that name.
        """
        if not isinstance(self._metric, str):
            return found
        if self._metric not in found:
            raise OptionError(
                f"metric={self._metric!r}: step() returned no such name.{did_you_mean(self._metric, found)} "
                f"Legal: {', '.join(found)}."
            )
        return {self._metric: found[self._metric]}

    def _named(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Names the single number that a function returned: by the tolerance's only name, or by the function."""
        if list(found) != ["loss"]:
            return found
        asked = list(self._asked) if isinstance(self._asked, dict) else []
        name = getattr(self._metric, "__name__", "metric")
        return {asked[0] if len(asked) == 1 else "metric" if name == "<lambda>" else name: found["loss"]}

    def name_metrics(self, results: Results) -> None:
        """Sets `tolerance` from the names of the reference's metrics.

        Raises:
            OptionError: The tolerance names others.
        """
        names = list(results[0])
        if not isinstance(self._asked, dict):
            self.tolerance = dict.fromkeys(names, self._asked)
            return
        unknown = [name for name in self._asked if name not in names]
        if unknown:
            raise OptionError(
                f"tolerance names {', '.join(map(repr, unknown))}, and step() returned {', '.join(map(repr, names))}."
                f"{did_you_mean(unknown[0], names)}"
            )
        self.tolerance = {name: float(value) for name, value in self._asked.items()}

    def errors(self, results: Results, reference: Results) -> dict[str, float]:
        """Returns the error of each metric for the worst batch.

        Raises:
            StepError: The names, the shapes or the number of batches differ.
        """
        if len(results) != len(reference):
            raise StepError(f"the run ended after {len(results)} of {len(reference)} batches.")
        worst: dict[str, float] = {}
        for ours, theirs in zip(results, reference, strict=True):
            for name, error in distances(ours, theirs).items():
                worst[name] = max(worst.get(name, 0.0), math.inf if math.isnan(error) else error)
        return worst

    def meets(self, errors: Mapping[str, float]) -> bool:
        """Whether errors are within the tolerance."""
        return all(errors.get(name, math.inf) <= limit for name, limit in self.tolerance.items())

    def describe(self, errors: Mapping[str, float]) -> str:
        """Returns errors and tolerances as text: "loss 0.02 (tolerance 1e-3)"."""
        return describe({name: errors.get(name, math.inf) for name in self.tolerance}, self.tolerance)


def describe(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> str:
    """Returns errors as text, furthest beyond their tolerance first.

    Example:
        >>> describe({"loss": 0.02, "output": 0.5}, {"loss": 0.001, "output": 0.1})
        'loss 0.02 (tolerance 1e-3), output 0.5 (tolerance 0.1)'
    """
    shown = sorted(errors, key=lambda name: -errors[name] / tolerance[name])
    return ", ".join(f"{name} {_digits(errors[name])} (tolerance {spell_tolerance(tolerance[name])})" for name in shown)


def _digits(error: float) -> str:
    """Formats with three digits, so that an error near its tolerance does not look equal to it."""
    return spell_tolerance(float(f"{error:.3g}"))


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


# ---Runs of a step that are judged, within a budget.


class MeasuredRuns(StepRuns):
    """Runs of a step, each with its metrics.

    Args:
        step: As in `StepRuns`.
        model: As in `StepRuns`.
        judge: Reads the metrics.
        budget: The maximum number of runs.
        options: More arguments of `StepRuns`.

    Attributes:
        log: The results of each run, in order, and its policy.
        before: The number of runs of the budget that an earlier process made.
    """

    def __init__(
        self, step: Callable[..., Any], model: nn.Module | None, judge: Judge, budget: int, **options: Any
    ) -> None:
        super().__init__(step, model, **options)
        self.judge = judge
        self.budget = budget
        self.before = 0
        self.log: list[tuple[Policy, Measured]] = []

    def __enter__(self) -> MeasuredRuns:
        super().__enter__()
        return self

    @property
    def spent(self) -> int:
        """The number of runs made, including those of an earlier process."""
        return self.before + self.count

    @property
    def left(self) -> int:
        """The number of runs left in the budget."""
        return self.budget - self.spent

    def hashes(self) -> dict[str, str]:
        """Returns a hash of each part of the state before the step."""
        assert self._state is not None
        return self._state.hashes()

    def check_state(self) -> None:
        """Checks that the state before the step has been restored.

        Raises:
            StepError: It has not.
        """
        assert self._state is not None
        self._state.check()

    def run(
        self,
        policy: Policy,
        *,
        around: contextlib.AbstractContextManager[Any] | None = None,
        on_result: Callable[[int, Any], None] | None = None,
        held_out: int = 0,
        eager: bool | None = None,
    ) -> Results:
        """Like `StepRuns.run`, within the budget.

        Raises:
            OutOfBudgetError: No runs are left.
        """
        if self.left < 1:
            raise OutOfBudgetError
        measured = Measured()
        self.log.append((policy, measured))

        def judged(number: int, result: Any) -> None:
            with torch.no_grad(), _unobserved():
                measured.agreed &= self.judge.agrees(result)
                metrics = self.judge.compute(result)
                measured.results += [] if metrics is None else [metrics]
            if on_result is not None:
                on_result(number, result)

        started = time.perf_counter()
        try:
            results = super().run(policy, around=around, on_result=judged, held_out=held_out, eager=eager)
            measured.results = measured.results or [self.judge.choose(one) for one in results]
            return results
        except Exception as error:
            measured.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            measured.seconds = time.perf_counter() - started


def _unobserved() -> contextlib.AbstractContextManager[Any]:
    """Hides the judge's computations from observers."""
    keys: Any = torch._C
    guard: contextlib.AbstractContextManager[Any] = keys._ExcludeDispatchKeyGuard(
        keys.DispatchKeySet(keys._dispatch_key_parse(_C.dispatch_observer_key()))
    )
    return guard


# ---The file from which `tune` resumes after an interruption.


_FORMAT = 1
#: Larger results of the reference are not stored in the file; the reference then runs again.
_MOST_BYTES = 4 << 20


@dataclasses.dataclass
class Kept:
    """The content of the file.

    Attributes:
        state: The hashes of the state before the step.
        digest: A hash of the reference's results.
        reference: These results, if they are small.
        noise_floor: The noise floor of each metric.
        comparison: The comparison.
        trials: The trials, by their keys.
        runs: The number of runs made.
    """

    state: dict[str, str]
    digest: str
    reference: Results | None
    noise_floor: dict[str, float]
    comparison: Comparison
    trials: dict[str, Trial]
    runs: int


class ResumeFile:
    """The file, which is rewritten after each trial.

    Args:
        path: The file; None to store nothing.
        identity: The arguments that identify a tuning, as plain data.

    Raises:
        OptionError: The file cannot be read or written, or belongs to another tuning.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._identity = json.loads(json.dumps(identity))
        self._gates: dict[str, Any] = {}
        self._trials: dict[str, Any] = {}
        self.kept: Kept | None = None
        if self._path is None:
            return
        if self._path.exists():
            self.kept = self._read()
        elif not self._path.absolute().parent.is_dir():
            raise OptionError(
                f"resume={str(self._path)!r} cannot be written: there is no folder of that name. Create it first."
            )

    def _read(self) -> Kept:
        assert self._path is not None
        name = str(self._path)
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            theirs, gates, trials = data["identity"], data["gates"], data["trials"]
            found = {key: from_plain(Trial, one) for key, one in trials.items()}
            runs = int(data["runs"])
            kept = Kept(
                state=gates["state"],
                digest=gates["digest"],
                reference=None if gates["reference"] is None else _results_from(gates["reference"]),
                noise_floor=numbers(gates["noise_floor"]),
                comparison=Comparison.from_dict(gates["comparison"]),
                trials=found,
                runs=runs,
            )
            is_known = data["format"] == _FORMAT
        except (OSError, ValueError, KeyError, TypeError, AttributeError, TorchPromoteError) as error:
            raise OptionError(
                f"resume={name!r} was not written by tune ({type(error).__name__}: {error}). Use another file, or one "
                f"that does not exist yet."
            ) from None
        if not is_known:
            raise OptionError(f"resume={name!r} has format {data['format']!r}; this release reads format {_FORMAT}.")
        differ = [key for key in {**theirs, **self._identity} if theirs.get(key) != self._identity.get(key)]
        if differ:
            shown = "; ".join(
                f"{key} {_short(self._identity.get(key))}, in the file {_short(theirs.get(key))}" for key in differ
            )
            raise OptionError(f"resume={name!r} belongs to another tuning: {shown}. Use another file, or delete it.")
        self._gates, self._trials = gates, trials
        return kept

    def keep_gates(
        self,
        *,
        state: Mapping[str, str],
        reference: Results,
        noise_floor: Mapping[str, float],
        comparison: Comparison,
    ) -> None:
        """Stores the results of the runs before the search."""
        size = sum(tensor.numel() * tensor.element_size() for batch in reference for tensor in batch.values())
        self._gates = {
            "state": dict(state),
            "digest": digest(reference),
            "reference": _to_text(reference) if size <= _MOST_BYTES else None,
            "noise_floor": to_plain(noise_floor),
            "comparison": comparison.to_dict(),
        }  # written to the file with the next trial

    def keep(self, key: str, trial: Trial, runs: int) -> None:
        """Stores a trial."""
        self._trials[key] = to_plain(trial)
        self._write(runs)

    def _write(self, runs: int) -> None:
        if self._path is None:
            return
        data = {
            "format": _FORMAT,
            "identity": self._identity,
            "gates": self._gates,
            "trials": self._trials,
            "runs": runs,
        }
        try:
            write_atomically(self._path, json.dumps(data, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise OptionError(f"resume={str(self._path)!r} cannot be written: {error.strerror or error}.") from error


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def digest(results: Results) -> str:
    """Returns a hash of results.

    Example:
        >>> digest([{"loss": torch.ones(1)}]) == digest([{"loss": torch.ones(1)}])
        True
    """
    found = hashlib.sha256()
    for batch in results:
        for name, tensor in batch.items():
            found.update(name.encode())
            add_bytes(found, tensor)
    return found.hexdigest()[:32]


def _to_text(results: Results) -> str:
    stream = io.BytesIO()
    torch.save([{name: tensor.cpu() for name, tensor in batch.items()} for batch in results], stream)
    return base64.b64encode(stream.getvalue()).decode()


def _results_from(text: str) -> Results:
    found: Results = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return found


# ---Makes the ranks of a process group agree on each verdict.


class Agreement:
    """The ranks of the default process group. Without a process group, there is one rank.

    Attributes:
        ranks: Their number.
        rank: The rank of this process.
    """

    def __init__(self) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.ranks: int = dist.get_world_size() if active else 1
        self.rank: int = dist.get_rank() if active else 0

    def _gather(self, value: Any) -> list[Any]:
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def verdict(self, passed: bool, errors: Mapping[str, float], error: str) -> tuple[bool, dict[str, float], str]:
        """Returns the verdict of all ranks: passed if it passed on all, with the largest errors.

        Args:
            passed: Whether it passed here.
            errors: The errors here.
            error: The exception here; "".
        """
        worst: dict[str, float] = {}
        raised = ""
        agreed = True
        for rank, (theirs, found, text) in enumerate(self._gather((passed, dict(errors), error))):
            agreed &= theirs
            for name, one in found.items():
                worst[name] = max(worst.get(name, 0.0), one)
            raised = raised or (f"rank {rank}: {text}" if text and self.ranks > 1 else text)
        return agreed, worst, raised

    def raise_together(self, error: Exception | None) -> None:
        """Raises this rank's error, or an error about another rank's, so that no rank waits for one that has raised.

        Raises:
            TuningError: Another rank raised.
        """
        texts = self._gather("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                raise TuningError(f"rank {rank} raised {text}")

    def of_first_rank(self, value: Any) -> Any:
        """Returns rank 0's value."""
        return self._gather(value)[0]

    def order(self, names: list[str]) -> list[str]:
        """Returns rank 0's order of names.

        Raises:
            TuningError: The ranks have different names.
        """
        found = self._gather(names)
        for rank, theirs in enumerate(found):
            if set(theirs) != set(found[0]):
                differ = sorted(set(theirs) ^ set(found[0]))
                raise TuningError(
                    f"ranks 0 and {rank} run different ops in a lower dtype: {', '.join(differ[:5])} on only one of "
                    f"them. All ranks must run the same model to be tuned together."
                )
        return list(found[0])


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
