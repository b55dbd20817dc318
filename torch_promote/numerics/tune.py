"""`tune`: finds the smallest set of overrides with which a policy meets a tolerance."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from torch_promote.checking.comparison import compare
from torch_promote.errors import (
    DtypeError,
    Fp32FailsError,
    NoiseFloorError,
    OptionError,
    PolicyError,
    check_flag,
    check_path,
    did_you_mean,
    explains_arguments,
    shown,
)
from torch_promote.numerics.compare import DIFFER, REFERENCE, ComparedRuns
from torch_promote.numerics.comparison import BROKEN, Comparison
from torch_promote.numerics.search import (
    LEVELS,
    Candidates,
    Memo,
    OutOfBudgetError,
    all_in_float8,
    is_float8,
    minimise,
    prove,
)
from torch_promote.numerics.step_runs import Ranks, Results, current_policy, norm_of, not_finite, show_progress
from torch_promote.numerics.step_state import is_compiled
from torch_promote.numerics.trials import FirstRuns, Judge, ResumeFile, Run, Trials, worst
from torch_promote.numerics.tuning import Certificate, Direction, Level, Trial, Tuning
from torch_promote.policy.dtype_names import parse_dtype, why_not_cast
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy, CastPolicyName, spell_policy
from torch_promote.policy.overrides import parse_policy
from torch_promote.policy.policy import Policy
from torch_promote.report.base import some_of

#: Two runs of the reference, one of the policy, one with all candidates in float32, two on held-out batches.
_LEAST = 6
#: The key of the trial without overrides.
_UNTUNED = "untuned"
#: The maximum number of violations of monotonicity that are listed.
_MOST_VIOLATIONS = 20


@explains_arguments
def tune(
    step: Callable[..., Any],
    *,
    model: nn.Module,
    tolerance: float | Mapping[str, float],
    metric: Callable[[Any], Any] | str | None = None,
    batches: int = 1,
    check: Callable[[Any], bool] | None = None,
    budget: int = 60,
    level: Level = "op",
    direction: Direction = "accuracy",
    formats: tuple[Literal["fp32", "lower"], CastPolicyName] | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
    restore: Iterable[Any] = (),
) -> Tuning:
    """Finds the smallest set of overrides with which the current policy meets a tolerance.

    The current policy is that of `install` or `set_default_policy`, or PyTorch's. The reference is the same step
    without casts. `compare` ranks the ops that the policy runs in a lower dtype by their effect on the loss. `tune`
    then runs the step: it searches for the shortest prefix of the ranking that passes in float32, removes overrides
    that are not needed, and checks the result on held-out batches. More float32 does not always mean a smaller error,
    so `Tuning.certificate` states what the runs have proved, and lists runs that contradict monotonicity.

    Args:
        step: A training or evaluation step, as in `compare`.
        model: The model.
        tolerance: How far each metric may be from the reference's, relative to it: |a - b| <= tolerance * |b| for a
            number, the relative L2 norm of the difference for a tensor. Or a number for each metric by its name; the
            others are then not judged.
        metric: What is compared: a function of what step returns, the name of a part of it, or None for all of it.
        batches: How many times a run calls the step. Held-out batches are as many: those with the next numbers if step
            takes a number, otherwise the same step with other random numbers. If what was found fails on them, they
            become part of the tuning while the budget lasts, and others are held out.
        check: A function of what step returns that has to be true of each batch.
        budget: The most runs: those that rank and those on held-out batches count. A run calls step `batches` times.
        level: What gets overrides: "op", an op everywhere; "module", all ops of a module; "site", an op in a module.
        direction: "accuracy": the fewest overrides to float32 that meet the tolerance. "speed": the policy meets it,
            and what runs in float32 is lowered while it does, as many bytes as possible.
        formats: For "speed", from which format to which: ("fp32", "lower"), the default, or ("lower", "float8"), where
            any float8 policy may be named. Then `linear` may run in float8 where it runs in lower precision and the
            features fit, as many floating point operations as possible.
        dtype: The dtype of regions that name none: torch.float16 or torch.bfloat16, or its name.
        seed: Orders candidates that no estimate tells apart.
        resume: A file that keeps each run. A later call with the same arguments goes on from it, in another process,
            too; runs in the file count as part of the budget.
        progress: Whether to show a bar, if stderr is a terminal.
        restore: Other state that the step changes, as in `compare`.

    Returns:
        The tuning. All state is restored. If the policy meets the tolerance as it is, or no op can get an override, the
        tuning has none, and `reason` says why. After Ctrl-C, the results so far; during the first runs (three, for
        float8 four) there are none, and the KeyboardInterrupt propagates.

    Raises:
        OptionError: An argument is invalid, or the file in `resume` belongs to another tuning.
        NoiseFloorError: Two runs of the reference differ by more than the tolerance.
        Fp32FailsError: With all candidates in float32, the step does not meet it either.
        StepError: As `compare`.
        TuningError: The ranks of the process group run different ops.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> def step():
        ...     with torch.autocast("cpu", torch.float16):
        ...         return (model(torch.ones(2, 4)) * 1e6).square().mean()  # 1e6 is too large for float16
        >>> tuning = tune(step, model=model, tolerance=1e-2)
        >>> tuning.overrides, tuning.met
        ({'aten::mul': 'fp32'}, True)
    """
    for name, value, legal in (("level", level, LEVELS), ("direction", direction, ("accuracy", "speed"))):
        if value not in legal:
            near = did_you_mean(str(value), legal, 1)
            if str(value).startswith("layer"):
                near = ' A layer is a module: level="module".'
            raise OptionError(f"{name} must be {' or '.join(map(repr, legal))}, got {shown(value)}.{near}")
    override = _override_for(direction, formats)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise OptionError(f"seed must be an int, got {shown(seed)}.")
    check_flag("progress", progress)
    dtype = None if dtype is None else parse_dtype(dtype)
    if dtype is not None and (why := why_not_cast(dtype)) is not None:
        raise DtypeError(f"{why}. Use torch.bfloat16 or torch.float16.")
    ranks = Ranks()
    resume = None if resume is None else check_path("resume", resume)
    judge = Judge(tolerance, metric, check)
    trials = Trials(step, model, judge, budget, ranks, batches=batches, restore=restore, dtype=dtype)
    compiled = is_compiled(step, model)
    least = _LEAST + compiled + (direction == "speed")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < least:
        raise OptionError(
            f"budget (the maximum number of runs) must be {least} or more, got {shown(budget)}: tune makes so many "
            f"runs besides those of the search."
        )
    base = current_policy()
    shapes = [(name, list(one.shape), str(one.dtype)) for name, one in model.named_parameters()]
    identity = {
        "torch": str(torch.__version__),
        "policy": base.to_dict(),
        "tolerance": dict(tolerance) if isinstance(tolerance, Mapping) else tolerance,
        "metric": metric if isinstance(metric, str) else getattr(metric, "__qualname__", None),
        "check": getattr(check, "__qualname__", None),
        "batches": batches,
        "level": level,
        "direction": direction,
        "formats": ["lower", override] if is_float8(override) else None,
        "dtype": None if dtype is None else str(dtype),
        "seed": seed,
        "parameters": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "ranks": ranks.count,
    }
    with trials, show_progress("tune", budget, wanted=progress and ranks.rank == 0) as trials.show:
        trials.file = ResumeFile(resume, identity, ranks)
        return _Tuner(trials, base, level=level, override=override, seed=seed, compiled=compiled).tune()


def _override_for(direction: str, formats: Sequence[str] | None) -> str:
    """The policy that overrides give. Raises OptionError as `tune`."""
    if direction == "accuracy":
        if formats is not None:
            raise OptionError(
                f'formats={formats!r} is for direction="speed", got direction="accuracy", whose overrides are to '
                f'float32. Give direction="speed" as well, or leave out formats.'
            )
        return "fp32"
    pair = ("fp32", "lower") if formats is None else formats
    legal = (
        "formats must be ('fp32', 'lower') or ('lower', 'float8'), where any float8 policy may take the place of "
        f"'float8', got {shown(formats)}"
    )
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise OptionError(f"{legal}. Give a pair: the format of the candidates, and the one that they may run in.")
    try:
        before, after = map(parse_policy, pair)
    except PolicyError as error:
        raise OptionError(f"{legal}: {error}") from None
    if (before, after) != (CastPolicy.fp32, CastPolicy.lower_precision_fp) and not (
        before is CastPolicy.lower_precision_fp and after in FLOAT8_POLICIES
    ):
        remedy = "Tune from float32 to lower precision first, set that policy, and tune it from there to float8."
        raise OptionError(f"{legal}. {remedy}")
    return spell_policy(after)


@dataclass
class _Verification:
    """The runs of the policy that the search has found: on held-out batches, and compiled."""

    met: bool = True
    held_out: Mapping[str, float] | None = None  # the errors on held-out batches
    reference: Results | None = None  # the metrics of the reference on them
    compiled: Mapping[str, float] | None = None  # the errors of the compiled step
    texts: list[str] = field(default_factory=list)  # for the certificate
    notes: list[str] = field(default_factory=list)


class _Tuner:
    """A tuning, from the first runs to the result."""

    # The search looks for a small set in the wider format: float32, or lower precision if the override is float8. For
    # "accuracy" these get the override, for "speed" the others; trials name those that have the override.

    def __init__(self, trials: Trials, base: Policy, *, level: Level, override: str, seed: int, compiled: bool) -> None:
        self._trials, self._base = trials, base
        self._level, self._override, self._seed, self._compiled = level, override, seed, compiled
        self._is_speed, self._is_float8 = override != "fp32", is_float8(override)
        self._direction: Direction = "speed" if self._is_speed else "accuracy"
        self._after = 2 + compiled  # the runs after the search: two on held-out batches, one compiled
        self._comparison: Comparison
        self._noise: dict[str, float] = {}
        self._candidates: Candidates
        self._names: list[str] = []
        self._memo: Memo
        self._found: frozenset[str] | None = None
        self._overrides: dict[str, Any] = {}
        self._policy = base
        self._last: Trial  # the last trial of the policy
        self._untuned: Trial  # the trial of the policy without overrides
        self._verified = _Verification()
        self._notes: list[str] = []
        self._reason = ""  # why there is nothing to tune
        self._ended = ""  # why the search ended early
        self._interrupted = False

    def tune(self) -> Tuning:
        """Performs the runs, and returns the result."""
        self._reason = self._start()
        if self._reason:
            self._found, self._policy = frozenset(), self._base
            if self._is_speed or not self._names:
                return self._result()
            self._verify_held_out()
            if self._verified.met or self._verified.reference is None or not self._learn():
                self._reason *= self._verified.met
                return self._result()
        try:
            if not self._reason:
                self._run_extremes()
            self._reason = ""
            self._search()
            while not self._verified.met and self._verified.reference is not None and self._learn():
                self._search()
            if self._compiled and not self._interrupted:
                self._verify_compiled()
        except KeyboardInterrupt:
            self._interrupted = True
        if self._interrupted:
            self._ended = "The search was interrupted before more was known."
            if self._verified.met and self._verified.held_out is None:
                self._verified.texts.append("It was interrupted before a run on held-out batches.")
        return self._result()

    # --- before the search

    def _start(self) -> str:
        """Runs the reference and the policy, and ranks the candidates. Returns why there is nothing to tune, or ""."""
        trials = self._trials
        first = self._measure() if trials.file.first is None else self._resume(trials.file.first)
        self._comparison, self._noise = first.comparison, first.noise_floor
        self._check_noise()
        base, sites = self._base, self._comparison.sites
        self._candidates = Candidates(base, trials.model, self._level, self._override, sites, self._seed)
        self._names = trials.ranks.same_order([one.name for one in self._candidates.all])
        self._candidates.all.sort(key=lambda one: self._names.index(one.name))
        self._memo = self._new_memo()
        # The comparison is that of the policy, or for float8 that of the policy with all candidates in float8.
        self._last = self._untuned = self._run(frozenset(self._names), "gate") if self._is_float8 else trials.all[0]
        reason = self._why_nothing()
        if not self._names and not reason:
            raise self._fp32_fails("no op that can get an override runs in a lower dtype")
        self._notes += [f"No override for {text}." for text in self._candidates.excluded]
        if zeros := [one.name for one in self._comparison.gradients]:
            self._notes.append(f"Gradients that are zero up to rounding errors are no metrics: {some_of(zeros)}.")
        if any(self._noise.values()):
            self._notes.append("The step is not exactly repeatable: a run near the tolerance may pass or fail.")
        return reason

    def _measure(self) -> FirstRuns:
        trials, judge = self._trials, self._trials.judge
        reference = Policy.named(REFERENCE)
        most = max(min(trials.left - self._after - 1 - self._is_speed, 4 + trials.budget // 4), 3)
        raised: Exception | None = None
        try:
            candidate = all_in_float8(self._base, self._override) if self._is_float8 else self._base
            comparison = ComparedRuns(trials, reference, candidate, most_runs=most, strict=False).compare()
            first, *others = [run for run in trials.log if run.policy == reference]
            trials.reference = first.metrics
            judge.name_metrics(first.metrics, [one.name for one in comparison.gradients])
            again = next(run for run in others if not run.error)
            noise = judge.errors(again.metrics, first.metrics)
            trials.state.check()
        except Exception as error:
            raised = error
        trials.ranks.raise_together(raised)
        for run in others:
            run.metrics = []
        if not trials.ranks.all(first.agreed):
            raise Fp32FailsError(
                "check returns false for the result of step() under the reference, which casts nothing. No override "
                "can help. Correct check or the step."
            )
        broken = [name for name in not_finite(first.metrics) if name in judge.tolerance]
        if not trials.ranks.all(not broken):
            raise Fp32FailsError(
                f"{BROKEN}{some_of(broken) or 'a result of another rank'}. The reference casts nothing, so no override "
                "can help. find_nonfinite names the call that makes it."
            )
        noise = worst(trials.ranks.gather(noise))
        norms = [{name: norm_of(tensor) for name, tensor in batch.items()} for batch in first.metrics]
        trials.file.first = FirstRuns(norms, noise, comparison)
        if not self._is_float8:
            untuned = next(run for run in trials.log if run.policy == self._base)
            trials.add(_UNTUNED, untuned, frozenset(), "gate", trials.reference)
        return trials.file.first

    def _resume(self, first: FirstRuns) -> FirstRuns:
        """Runs the reference to check that nothing has changed since the file was written. This run does not count."""
        trials = self._trials
        run = trials.run_safely(Policy.named(REFERENCE))
        if not trials.ranks.all(trials.ranks.rank > 0 or (not run.error and first.fits(run.metrics))):
            raise OptionError(
                "the step gives other results than when the file in resume= was written. Build the model and seed the "
                "random number generators in the same way, or use another file."
            )
        trials.reference = run.metrics
        trials.judge.name_metrics(run.metrics, [one.name for one in first.comparison.gradients])
        trials.before = trials.file.runs - trials.count
        if not self._is_float8:
            trials.all.append(trials.file.trials[_UNTUNED])
        return first

    def _check_noise(self) -> None:
        """Raises NoiseFloorError if the noise exceeds the tolerance. A note names the first call that differed."""
        judge = self._trials.judge
        if not judge.meets({**dict.fromkeys(judge.tolerance, 0.0), **self._noise}):
            where = [note for note in self._comparison.notes if note.startswith(DIFFER)]
            raise NoiseFloorError(
                f"two runs of the reference from the same state differ by more than the tolerance: "
                f"{judge.describe(self._noise)}. {' '.join(where)} Raise the tolerance above that, or make the step "
                f"repeatable: torch.use_deterministic_algorithms(True), restore=(...) for what it changes or draws "
                f"from."
            )

    def _why_nothing(self) -> str:
        """Why the policy needs no override, or ""; for "speed", raises Fp32FailsError if it fails."""
        judge, errors = self._trials.judge, self._untuned.errors
        if self._base == Policy.named(REFERENCE):
            return (
                f"the current policy is {self._base!r}, which casts no op. Set the policy to tune with "
                f"set_default_policy or install."
            )
        if self._is_speed:
            if not self._untuned.passed:
                raise Fp32FailsError(
                    f"the policy does not meet the tolerance even before more ops are lowered: "
                    f'{self._failure(self._untuned)}. Tune it with direction="accuracy" first, and set the resulting '
                    f"policy."
                )
            if self._names:
                return ""
            what = "linear runs in lower precision and may run in float8"
            what = what if self._is_float8 else "op that may be lowered runs in float32"
            return f"no {what} in a region of the step.{self._excluded()}"
        if not self._untuned.passed:
            return ""
        advice = 'Tune with a smaller tolerance, or with direction="speed" (--direction speed) to lower more ops.'
        return (
            f"the current policy meets the tolerance without an override: {judge.describe(errors)}. "
            f"{advice if self._names else ' '.join(self._comparison.notes)}"
        ).strip()

    def _run_extremes(self) -> None:
        """Runs all candidates overridden; for "speed", also none, to time it without the observers of the first run."""
        everything, nothing = frozenset(self._names), frozenset[str]()
        if self._is_speed:
            self._untuned = self._run(everything, "gate")
            self._memo.known[everything] = True
            self._memo.known[nothing] = self._run(nothing, "gate").passed
            return
        full = self._run(everything, "gate")
        if not full.passed:
            raise self._fp32_fails(f"with all candidates in float32 the result is: {self._failure(full)}")
        self._memo.known.update({everything: True, nothing: False})

    def _fp32_fails(self, why: str) -> Fp32FailsError:
        not_aligned = "".join(f" {text}" for text in self._comparison.not_aligned[:3])
        level = "" if self._level == "op" else 'choose level "op", whose overrides also act in a backward, '
        return Fp32FailsError(
            f"no set of the candidates meets the tolerance: {why}.{self._excluded()}{not_aligned} Raise the tolerance, "
            f"cast to float32 in the program, {level}or check that the step's regions have no policy= argument, which "
            "would take precedence over the overrides."
        )

    def _excluded(self) -> str:
        return "".join(f" No override for {text}." for text in self._candidates.excluded[:5])

    def _failure(self, trial: Trial) -> str:
        judge = self._trials.judge
        if trial.error:
            return f"it raised {trial.error}"
        return f"{judge.describe(trial.errors)}{', and check returned false' * judge.meets(trial.errors)}"

    # --- the search

    def _search(self) -> None:
        trials = self._trials
        trials.reserve = self._after + (self._level != "op")
        pinned = 0 if self._is_speed else sum(one.nonfinite for one in self._candidates.all)
        try:
            if not (self._is_speed and self._memo(())):
                minimise(self._names, self._memo, pinned=pinned, spare=trials.spare)
        except OutOfBudgetError:
            self._ended = (
                f"The budget of {trials.budget} runs was exhausted before the search ended. Allow more runs; with a "
                f"file in resume=, tune resumes from the finished runs."
            )
        except KeyboardInterrupt:
            self._interrupted = True
        self._found = self._memo.best()
        assert self._found is not None  # all candidates in float32 have passed
        self._verified = _Verification()
        self._overrides = self._candidates.overrides(self._overridden(self._found))
        self._policy = self._candidates.policy(self._overrides)
        self._last = self._run(self._found, "")  # the trial has been made
        trials.reserve = 0
        if not self._interrupted:
            self._use_patterns()
            self._verify_held_out()

    def _learn(self) -> bool:
        """Makes held-out batches on which the result failed part of the tuning; returns whether it can go on."""
        trials, reference = self._trials, self._verified.reference
        if trials.left < 1 + self._after or reference is None:
            return False
        known, self._memo = self._memo.known, self._new_memo()
        self._memo.known.update({subset: False for subset, passed in known.items() if not passed})
        trials.more.append(reference)
        trials.reserve = self._after
        if self._memo(self._names):
            text = "What met the tolerance at first, but failed on held-out batches: overrides of "
            text += f"{', '.join(self._chosen()) or 'no op'}. The batches became part of the tuning, and others were"
            self._notes.append(f"{text} held out.")
            return True
        self._memo = self._new_memo()
        self._memo.known.update(known)  # for the certificate
        return False

    def _new_memo(self) -> Memo:
        def passes(wider: frozenset[str]) -> bool:
            return self._run(wider, "speed" if self._is_speed else self._memo.stage).passed

        return Memo(passes, self._candidates.weight if self._is_speed else len)

    def _run(self, wider: frozenset[str], why: str) -> Trial:
        names = self._overridden(wider)
        return self._trials.search(self._candidates.policy(self._candidates.overrides(names)), names, why)

    def _overridden(self, wider: frozenset[str]) -> frozenset[str]:
        """The candidates that have the override."""
        return frozenset(self._names) - wider if self._is_speed else wider

    def _chosen(self) -> list[str]:
        """The candidates that have the override in the result, in order."""
        chosen = frozenset[str]() if self._found is None else self._overridden(self._found)
        return [name for name in self._names if name in chosen]

    # --- after the search

    def _use_patterns(self) -> None:
        """Writes the tables of modules as patterns, and runs the step under them."""
        trials = self._trials
        overrides = self._overrides if self._level == "op" else self._candidates.with_patterns(self._overrides)
        key = f"pattern {sorted(overrides)}"
        if overrides == self._overrides or (trials.left <= self._after and not trials.is_known(key)):
            return
        policy = self._candidates.policy(overrides)
        if trials.make(key, policy, frozenset(self._chosen()), "pattern").passed:
            self._overrides, self._policy = overrides, policy

    def _verify_held_out(self) -> None:
        trials, verified, names = self._trials, self._verified, frozenset(self._chosen())
        which = len(trials.more) + 1
        key = f"held out {which} {sorted(names)}"
        try:
            if trials.is_known(key):
                trial = trials.make(key, self._policy, names, "held out")
                if not trial.passed and trials.left > 0:
                    verified.reference = trials.run_safely(Policy.named(REFERENCE), held_out=which).metrics
            else:
                run = trials.run_safely(Policy.named(REFERENCE), held_out=which)
                reason = self._why_not_held_out(run)
                if not trials.ranks.all(not reason):
                    verified.texts.append(f"There are no held-out batches: {reason or 'another rank has none'}.")
                    return
                verified.reference = run.metrics
                trial = trials.make(key, self._policy, names, "held out", reference=verified.reference, held_out=which)
        except OutOfBudgetError:  # the process that wrote the file had a larger budget
            verified.texts.append("The budget left no run for held-out batches.")
            return
        verified.held_out = trial.errors
        verified.met &= trial.passed
        meets = "also meets" if trial.passed else "does not meet"
        verified.texts.append(f"It {meets} the tolerance on held-out batches.")
        if not trial.passed:
            verified.notes.append(
                f"On held-out batches: {self._failure(trial)}. Tune with more batches than {trials.batches}, or with a "
                f"tolerance that is smaller than the one you need."
            )

    def _why_not_held_out(self, run: Run) -> str:
        if run.error:
            return f"the reference raised {run.error} there"
        trials = self._trials
        if all(compare(run.metrics, known) for known in (trials.reference, *trials.more)):
            return ""
        if trials.takes_number:
            return "the step gives the same results for the next numbers"
        return (
            "the step gives the same results with other random numbers. A step whose parameter, without a default, is "
            "the number of its batch, step(i), has others"
        )

    def _verify_compiled(self) -> None:
        trials, verified, names = self._trials, self._verified, frozenset(self._chosen())
        try:
            trial = trials.make(f"compiled {sorted(names)}", self._policy, names, "compiled", eager=False)
        except OutOfBudgetError:
            return
        verified.compiled = trial.errors
        verified.met &= trial.passed
        verified.texts.append(f"The compiled step {'meets' if trial.passed else 'does not meet'} the tolerance.")
        if not trial.passed:
            verified.notes.append(
                f"The step was tuned uncompiled. Compiled: {self._failure(trial)}. Compare the reference compiled and "
                f"uncompiled, or tune with a smaller tolerance."
            )

    def _certificate(self) -> Certificate:
        verified, found, known = self._verified, self._found, self._memo.known
        if self._reason:
            text = "The policy was run without overrides, and no set of overrides is smaller."
            return Certificate("minimum", " ".join([text, *verified.texts]), held_out=verified.held_out)
        if found is None:
            return Certificate("passes", "The search was interrupted before any overrides were known to pass.")
        kind = prove(found, self._names, known) if found in known else "passes"
        lowers_all = self._is_speed and not found
        if self._is_speed and kind == "minimum":
            kind = "1-minimal"  # a minimum of bytes was not proved
        text = _PROVED[self._direction, "minimum" if lowers_all else kind]
        if kind == "passes" and self._ended:
            text = f"It passed. {self._ended}"
        if kind == "1-minimal" and not self._is_speed:
            ran = sum(1 for subset in known if len(subset) < len(found))
            smaller = sum(math.comb(len(self._names), size) for size in range(len(found)))
            text += f" Of {smaller} smaller sets, {ran} were run."
        passed, failed = ([subset for subset, ok in known.items() if ok is wanted] for wanted in (True, False))
        pairs = [(small, large) for small in passed for large in failed if small < large]
        wider = "lower precision" if self._is_float8 else "float32"
        pairs.sort(key=lambda pair: (len(pair[1]) - len(pair[0]), sorted(pair[0]), sorted(pair[1])))
        return Certificate(
            kind=kind,  # type: ignore[arg-type]
            text=" ".join([text, *verified.texts]),
            violations=tuple(
                f"{wider} for {self._spell(small)} passed, and with {self._spell(large - small)} as well it failed"
                for small, large in pairs[:_MOST_VIOLATIONS]
            ),
            held_out=verified.held_out,
            compiled=verified.compiled,
        )

    def _spell(self, names: frozenset[str]) -> str:
        return some_of([name for name in self._names if name in names]) or "nothing"

    def _result(self) -> Tuning:
        trials, found = self._trials, self._found
        gain: dict[str, float] = {}
        if self._is_speed and found is not None and not self._reason:
            saved = self._candidates.weight(self._overridden(found))
            if self._is_float8:
                gain["float8_share"] = (self._candidates.flops_before + saved) / self._comparison.flops
            else:
                gain["bytes"] = saved / 2
            gain["seconds"] = self._untuned.seconds - self._last.seconds
        return Tuning(
            policy=self._policy,
            overrides=self._overrides,
            met=found is not None and self._last.passed and self._verified.met,
            level=self._level,
            direction=self._direction,
            override=self._override,
            tolerance=trials.judge.tolerance,
            errors=self._last.errors,
            certificate=self._certificate(),
            trials=trials.all,
            noise_floor=self._noise,
            candidates=self._candidates.all,
            comparison=self._comparison,
            budget=trials.budget,
            runs=trials.spent,
            gain=gain,
            notes=[*self._notes, *self._verified.notes],
            interrupted=self._interrupted,
            found=() if self._reason else tuple(self._chosen()),
            reason=self._reason,
        )


_PROVED = {
    ("accuracy", "minimum"): "It is a minimum: all smaller sets of overrides were run and failed.",
    ("accuracy", "1-minimal"): "It is 1-minimal: without any one of the overrides it fails.",
    ("accuracy", "passes"): "It passed. Whether fewer overrides are sufficient is unknown.",
    ("speed", "minimum"): "It is 1-maximal: all candidates are lowered.",
    ("speed", "1-minimal"): "It is 1-maximal: with any one more candidate lowered it fails.",
    ("speed", "passes"): "It passed. Whether more candidates can be lowered is unknown.",
}
