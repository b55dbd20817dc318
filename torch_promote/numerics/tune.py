"""`tune`: finds the smallest set of overrides with which a policy meets a tolerance."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from torch_promote.errors import (
    Fp32FailsError,
    NoiseFloorError,
    NothingToTuneError,
    OptionError,
    TorchPromoteError,
    did_you_mean,
)
from torch_promote.numerics.candidates import (
    LEVELS,
    Overriding,
    bytes_of,
    compress,
    overridable,
    rank_candidates,
    sites_of,
)
from torch_promote.numerics.compare import DIFFER, REFERENCE, compare_runs
from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.numerics.search import MOST_FOR_MINIMUM, Memo, OutOfBudgetError, minimise, prove
from torch_promote.numerics.step_runs import present_policy, show_progress
from torch_promote.numerics.trials import (
    Agreement,
    Judge,
    Kept,
    MeasuredRuns,
    Results,
    ResumeFile,
    Trials,
    describe,
    digest,
    key_of_held_out,
)
from torch_promote.numerics.tuning.tuning import Candidate, Certificate, Trial, Tuning
from torch_promote.observe.pages import spell_op
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.policy.policy import Policy

__all__ = [
    "Prediction",
    "Tuner",
    "Verified",
    "certify",
    "check_full",
    "check_noise",
    "check_untuned",
    "first_runs",
    "is_compiled",
    "tune",
    "verify",
    "verify_compiled",
    "violations",
]


# ---The runs before a search, and the errors that can end it there.


#: The purpose of the run without overrides.
UNTUNED = "untuned"


def first_runs(
    trials: Trials, file: ResumeFile, base: Policy, reserve: int
) -> tuple[Comparison, dict[str, float], Trial]:
    """Runs the reference twice and the policy once, unless a file has the results.

    Args:
        trials: Receives the reference's results.
        file: The file to resume from.
        base: The policy.
        reserve: The number of runs needed after these.

    Returns:
        The comparison, the noise floor of each metric, and the trial of the policy without overrides.

    Raises:
        OptionError: The file belongs to another state.
        NothingToTuneError: The policy casts nothing.
        StepError: As `compare`.
    """
    runs, judge = trials.runs, trials.judge
    reference = Policy.named(REFERENCE)
    if base == reference:
        raise NothingToTuneError(
            f"the current policy is {base!r}, which casts no op. Set the policy to tune with set_default_policy or "
            f"install."
        )
    state = runs.hashes()
    if file.kept is not None:
        trials.earlier = dict(file.kept.trials)
        trials.reference = _reference_again(trials, file.kept, state)
        runs.before = file.kept.runs - runs.count  # a run to check that nothing has changed does not count
        judge.name_metrics(trials.reference)
        untuned = trials.earlier.pop(UNTUNED)
        trials.all.append(untuned)
        return file.kept.comparison, file.kept.noise_floor, untuned
    raised: Exception | None = None
    try:
        comparison = compare_runs(runs, reference, base, most_runs=max(runs.left - reserve, 3), strict=False)
        of_reference = [measured for policy, measured in runs.log if policy == reference]
        trials.reference = of_reference[0].results
        judge.name_metrics(trials.reference)
        again = next(measured for measured in of_reference[1:] if not measured.error)
        noise = judge.errors(again.results, trials.reference)  # in a third run, gradients may differ
        runs.check_state()
    except Exception as error:
        raised = error
    trials.group.raise_together(raised)
    for measured in of_reference[1:]:
        measured.results = []
    agreed, noise, _ = trials.group.verdict(of_reference[0].agreed, noise, "")
    if not agreed:
        raise Fp32FailsError(
            "check returns false for the result of step() under the reference, which casts nothing. No override can "
            "help. Correct check or the step."
        )
    measured = next(one for policy, one in runs.log if policy == base)
    file.keep_gates(state=state, reference=trials.reference, noise_floor=noise, comparison=comparison)
    untuned = trials.judged(measured, frozenset(), "gate")
    trials.keep(UNTUNED, untuned)
    return comparison, noise, untuned


def _reference_again(trials: Trials, kept: Kept, state: Mapping[str, str]) -> Results:
    """The reference's results: from the file if nothing can have changed, otherwise from a run."""
    if kept.state == dict(state) and kept.reference is not None and trials.group.ranks == 1:
        return kept.reference
    measured = trials.run(Policy.named(REFERENCE))
    same = not measured.error and digest(measured.results) == kept.digest
    if not same and any(kept.noise_floor.values()) and kept.reference is not None and not measured.error:
        errors = trials.judge.errors(measured.results, kept.reference)
        same = all(error <= 2 * kept.noise_floor.get(name, 0.0) for name, error in errors.items())
    if not trials.group.verdict(same or trials.group.rank > 0, {}, "")[0]:
        differ = [name for name in state if kept.state.get(name) != state[name]]
        raise OptionError(
            f"the step gives other results than when the file in resume= was written"
            f"{'; different before the step: ' + ', '.join(differ) if differ else ''}. Build the model and seed the "
            f"random number generators in the same way, or use another file."
        )
    return measured.results


def check_noise(noise: Mapping[str, float], judge: Judge, notes: Sequence[str]) -> None:
    """Checks that the tolerance is above the noise. The comparison's notes name the first call that differed.

    Raises:
        NoiseFloorError: It is not.
    """
    below = {name: error for name, error in noise.items() if error > judge.tolerance.get(name, float("inf"))}
    if below:
        where = [f" {note.partition('. ')[2]}" for note in notes if note.startswith(DIFFER)]
        raise NoiseFloorError(
            f"two runs of the reference from the same state differ by more than the tolerance: "
            f"{describe(below, judge.tolerance)}.{''.join(where)} Raise the tolerance above that, or make the step "
            f"repeatable: torch.use_deterministic_algorithms(True), restore=(...) for what it changes or draws from."
        )


def check_untuned(untuned: Trial, judge: Judge, direction: str, candidates: int, notes: Sequence[str]) -> None:
    """Checks that there is something to tune. The comparison's notes are the reason why there are no candidates.

    Raises:
        NothingToTuneError: The policy meets the tolerance without overrides; for "speed", nothing runs in float32.
        Fp32FailsError: For "speed", the policy does not meet the tolerance.
    """
    if direction == "speed":
        if not untuned.passed:
            raise Fp32FailsError(
                f"the policy does not meet the tolerance even before more ops are lowered: {_why(untuned, judge)}. "
                f'Tune it with direction="accuracy" first, and set the resulting policy.'
            )
        if not candidates:
            raise NothingToTuneError("no op that may be lowered runs in float32 in a region of the step.")
    elif untuned.passed:
        text = f"the current policy meets the tolerance without an override: {judge.describe(untuned.errors)}."
        if candidates:
            text += ' Tune with a smaller tolerance, or use direction="speed" to lower more ops.'
        raise NothingToTuneError(" ".join([text, *([] if candidates else notes)]))


def check_full(
    full: Trial | None, judge: Judge, candidates: int, others: Sequence[str], not_aligned: Sequence[str]
) -> None:
    """Checks that the step passes with every candidate in float32.

    Args:
        full: The run; None if there are no candidates.
        judge: Has the tolerance.
        candidates: Their number.
        others: A sentence for each site that runs in a lower dtype and cannot get an override.
        not_aligned: Calls made in only one of the runs.

    Raises:
        Fp32FailsError: It does not.
    """
    if full is not None and full.passed:
        return
    if full is None:
        text = "the policy does not meet the tolerance, and no op that can get an override runs in a lower dtype."
    else:
        text = (
            f"with all {candidates} candidates in float32 the step does not meet the tolerance either: "
            f"{_why(full, judge)}."
        )
    if others:
        text += f" Not among them: {'; '.join(others[:5])}{f'; {len(others) - 5} more' if len(others) > 5 else ''}."
    if not_aligned:
        text += f" {' '.join(not_aligned[:3])}"
    raise Fp32FailsError(
        f"{text} Raise the tolerance, cast to float32 in the program, or check that the step's regions have no policy= "
        f"argument, which would take precedence over the overrides."
    )


def _why(trial: Trial, judge: Judge) -> str:
    if trial.error:
        return f"it raised {trial.error}"
    if judge.meets(trial.errors):
        return f"check does not agree, at {judge.describe(trial.errors)}"
    return judge.describe(trial.errors)


# ---Verifies the result of a search: runs it on held-out batches, and compiled.


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


# ---The certificate: sentences about what the runs of a search have proved.


#: The maximum number of violations listed.
_SHOWN = 20
#: The maximum number of members listed per set.
_NAMED = 6


def violations(known: Mapping[frozenset[str], bool]) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Returns the pairs of a set that passed and a larger one that failed.

    Example:
        >>> violations({frozenset(): True, frozenset("a"): False})
        [(frozenset(), frozenset({'a'}))]
    """
    passed = [subset for subset, good in known.items() if good]
    failed = [subset for subset, good in known.items() if not good]
    pairs = [(small, large) for small in passed for large in failed if small < large]
    return sorted(pairs, key=lambda pair: (len(pair[1]) - len(pair[0]), sorted(pair[0]), sorted(pair[1])))


def certify(
    found: frozenset[str],
    order: Sequence[str],
    known: Mapping[frozenset[str], bool],
    *,
    direction: str,
    budget: int,
    ended: str = "",
) -> Certificate:
    """Returns the certificate of a set.

    Args:
        found: The names of the candidates that keep or get float32.
        order: The names of all candidates.
        known: The sets that ran, and whether they passed.
        direction: "accuracy" or "speed".
        budget: The maximum number of runs.
        ended: Why the search ended early; "".
    """
    kind = prove(found, order, known)
    if direction == "speed" and kind == "minimum":
        kind = "1-minimal"  # a minimum of bytes was not proved
    pairs = violations(known)
    count = f"{len(found)} override{'' if len(found) == 1 else 's'}"
    number = sum(math.comb(len(order), size) for size in range(len(found)))
    if ended and kind == "passes":
        text = f"It passed. {ended}"
    elif direction == "speed" and not found:
        text = "It is 1-maximal: all candidates are lowered."
    elif direction == "speed":
        text = {
            "1-minimal": "It is 1-maximal: with "
            f"{'the other one' if len(found) == 1 else f'any one of the other {len(found)}'} lowered as well it fails.",
            "passes": "It passed. Whether more can be lowered is unknown.",
        }[kind]
    else:
        text = {
            "minimum": "It is a minimum: without an override it fails."
            if number == 1
            else f"It is a minimum: all {number} smaller sets of overrides were run and failed.",
            "1-minimal": f"It is 1-minimal: without any one of the {count} it fails.",
            "passes": "It passed. Whether fewer overrides are sufficient is unknown.",
        }[kind]
    if direction == "accuracy" and kind == "1-minimal":
        ran = sum(1 for subset in known if len(subset) < len(found))
        text += f" {ran} of {number} smaller sets were run."
        if len(order) <= MOST_FOR_MINIMUM and number - ran > 0 and not pairs:
            text += f" For a proof of the minimum, allow a budget of {budget + number - ran} runs."
    shown = [
        f"{_spell(small, order, direction)} passed, and {_spell(large, order, direction)} failed"
        for small, large in pairs[:_SHOWN]
    ]
    shown += [f"{len(pairs) - _SHOWN} more pairs"] if len(pairs) > _SHOWN else []
    return Certificate(kind=kind, text=text, violations=tuple(shown))  # type: ignore[arg-type]


def _spell(subset: frozenset[str], order: Iterable[str], direction: str) -> str:
    names = [name for name in order if name in subset]
    what = "float32 for" if direction == "accuracy" else "float32 kept for"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what} {', '.join(names[:_NAMED]) or 'nothing'}{more}"


# ---The errors that impacts predict.


#: The purposes of runs whose errors impacts cannot predict: they use other batches, or are compiled.
_ELSEWHERE = ("held out", "compiled")


class Prediction:
    """Predicts the error of the first metric that is one number.

    Args:
        comparison: Provides the reference's values.
        candidates: The candidates, with their impacts.
        metrics: The names of the metrics that are judged.
        known: Whether the impacts are known.
    """

    def __init__(
        self, comparison: Comparison, candidates: Sequence[Candidate], metrics: Iterable[str], known: bool
    ) -> None:
        judged = set(metrics)
        numbers = ((one.name, one.reference) for one in comparison.metrics if one.name in judged)
        self._name, self._value = next(
            ((name, value) for name, value in numbers if known and value is not None and math.isfinite(value)),
            ("", 0.0),
        )
        self._candidates = candidates

    def error(self, given: frozenset[str]) -> float | None:
        """Returns the first-order error if the other candidates stay low, or None if it cannot be predicted."""
        if not self._name:
            return None
        left = math.sqrt(sum(one.impact**2 for one in self._candidates if one.name not in given))
        return left / abs(self._value) if self._value else left

    def pairs(self, trials: Iterable[Trial]) -> list[tuple[tuple[str, ...], float, float]]:
        """Returns for each trial the names with the override, the predicted and the measured error."""
        return [
            (one.overrides, one.predicted, one.errors[self._name])
            for one in trials
            if one.predicted is not None and self._name in one.errors and not one.error and one.why not in _ELSEWHERE
        ]


# ---A tuning, from the first runs to the result.


#: The override for each direction.
_VALUES = {"accuracy": "fp32", "speed": "lower_precision_fp"}


class Tuner:
    """A tuning.

    Args:
        trials: Makes the runs.
        file: The file that stores them.
        base: The policy to tune.
        model: The model.
        level: As in `tune`.
        direction: As in `tune`.
        seed: As in `tune`.
        compiled: Whether the step runs compiled code.
    """

    def __init__(
        self,
        trials: Trials,
        file: ResumeFile,
        base: Policy,
        model: nn.Module,
        *,
        level: str,
        direction: Literal["accuracy", "speed"],
        seed: int,
        compiled: bool,
    ) -> None:
        self._trials, self._file, self._base = trials, file, base
        self._level, self._direction, self._seed, self._compiled = level, direction, seed, compiled
        self._overriding = Overriding(base, model, level, _VALUES[direction])
        self._candidates: list[Candidate] = []
        self._comparison: Comparison
        self._noise: dict[str, float] = {}
        self._notes: list[str] = []
        self._ended = ""  # why the search ended early
        self._interrupted = False
        self._policy, self._overrides = base, dict[str, Any]()
        self._last: Trial  # the last run of the policy
        self._untuned: Trial  # the run of the policy to tune

    @property
    def _is_speed(self) -> bool:
        return self._direction == "speed"

    def tune(self) -> Tuning:
        """Performs the runs, and returns the result."""
        self._after = 2 + self._compiled  # held-out batches take two runs
        self._last = self._first_runs(self._after)
        self._verified = Verified()
        self._found: frozenset[str] | None = None
        self._memo = self._new_memo()
        try:
            self._extremes(self._memo)
            self._search_and_verify()
            while not self._verified.met and self._verified.reference is not None and self._learn():
                self._search_and_verify()
            if self._compiled and self._found is not None and not self._interrupted:
                verify_compiled(self._trials, self._policy, self._given(self._found), self._verified)
        except KeyboardInterrupt:
            self._interrupted = True
        if self._interrupted:
            self._ended = "The search was interrupted before more was known."
            if self._verified.met and self._verified.held_out is None:
                self._verified.texts.append("It was interrupted before a run on held-out batches.")
        return self._result()

    def _search_and_verify(self) -> None:
        trials = self._trials
        trials.reserve = self._after + (self._level != "op")
        self._search(self._memo)
        self._found = self._memo.best()
        assert self._found is not None
        self._verified = Verified()
        self._choose(self._found)
        trials.reserve = 0
        if not self._interrupted:
            self._compress(self._found, spare=self._after)
            self._verified = verify(trials, self._policy, self._given(self._found))

    def _learn(self) -> bool:
        """Makes held-out batches part of the tuning, after the result failed on them.

        Returns:
            Whether the search can continue. Sets that passed before are run on these batches when they are needed.
        """
        trials = self._trials
        if trials.runs.left < 1 + self._after:
            return False
        reference = self._verified.reference
        assert reference is not None
        known, self._memo = self._memo.known, self._new_memo()
        self._memo.known.update({subset: False for subset, passed in known.items() if not passed})
        trials.more.append(reference)
        trials.reserve = self._after
        if self._memo(self._names):
            names = ", ".join(map(spell_op, self._names_of(self._found)))
            self._notes.append(
                f"The overrides {names} met the tolerance at first, but failed on held-out batches. These then became "
                f"part of the tuning, and other batches were held out."
            )
            return True
        self._memo = self._new_memo()
        self._memo.known.update(known)  # for the certificate
        return False

    def _new_memo(self) -> Memo:
        return Memo(self._passes, None, self._kept_bytes if self._is_speed else None)

    # --- the steps

    def _first_runs(self, after: int) -> Trial:
        trials = self._trials
        self._comparison, self._noise, untuned = first_runs(trials, self._file, self._base, after + 1 + self._is_speed)
        check_noise(self._noise, trials.judge, self._comparison.notes)
        sites, others = overridable(self._comparison.sites, self._overriding.value, self._overriding.closed)
        others += self._overriding.choose_from(sites)
        ranked = rank_candidates(self._overriding.sites, self._level, self._seed, by_bytes=self._is_speed)
        order = trials.group.order([one.name for one in ranked])
        by_name = {one.name: one for one in ranked}
        self._candidates = [by_name[name] for name in order]
        self._names = order
        check_untuned(untuned, trials.judge, self._direction, len(order), self._comparison.notes)
        if not order:
            check_full(None, trials.judge, 0, others, self._comparison.not_aligned)
        self._others = others
        self._notes += [f"No override for {text}." for text in others]
        if any(self._noise.values()):
            self._notes.append("The step is not exactly repeatable: a run near the tolerance may pass or fail.")
        known = not self._is_speed and any(site.impact is not None for site in self._overriding.sites)
        self._prediction = Prediction(self._comparison, self._candidates, trials.judge.tolerance, known)
        trials.predict = self._prediction.error
        trials.all[0] = dataclasses.replace(untuned, predicted=trials.predict(frozenset()))
        return trials.all[0]

    def _extremes(self, memo: Memo) -> None:
        """Runs all candidates overridden; for "speed", also none, to time it without the observers of the first run."""
        everything = frozenset(self._names)
        if self._is_speed:
            self._untuned = self._trials.search(self._base, frozenset(), "gate")
            memo.known[everything] = True
        full = self._trials.search(self._policy_of(everything), everything, "gate")
        if self._is_speed:
            memo.known[frozenset()] = full.passed
        else:
            check_full(full, self._trials.judge, len(everything), self._others, self._comparison.not_aligned)
            memo.known.update({everything: True, frozenset(): False})

    def _search(self, memo: Memo) -> None:
        pinned = 0 if self._is_speed else sum(one.nonfinite for one in self._candidates)
        try:
            if self._is_speed and memo(()):
                return  # everything can be lowered
            minimise(self._names, memo, pinned=pinned, spare=self._trials.spare)
        except OutOfBudgetError:
            budget = self._trials.runs.budget
            self._ended = (
                f"The budget of {budget} runs was exhausted before the search ended. Allow more runs; with a file in "
                f"resume=, tune resumes from the finished runs."
            )
        except KeyboardInterrupt:
            self._interrupted = True

    def _passes(self, found: frozenset[str]) -> bool:
        given = self._given(found)
        why = "speed" if self._is_speed else self._memo.stage
        return self._trials.search(self._policy_of(given), given, why).passed

    def _choose(self, found: frozenset[str]) -> None:
        given = self._given(found)
        self._overrides = self._overriding.overrides(self._places(given))
        self._policy = self._overriding.policy(self._overrides) if given else self._base
        self._last = self._trials.search(self._policy, given, "")  # the trial has been made

    def _compress(self, found: frozenset[str], spare: int) -> None:
        """Writes the tables as patterns, and runs the step under them."""
        if self._level == "op":
            return
        overrides = compress(self._overrides, self._overriding)
        key = f"pattern {sorted(overrides)}"
        if overrides == self._overrides or (self._trials.runs.left <= spare and not self._trials.is_made(key)):
            return
        policy = self._overriding.policy(overrides)
        trial = self._trials.make(policy, self._given(found), "pattern", key=key)
        if trial.passed:
            self._overrides, self._policy = overrides, policy

    # --- names and policies

    def _given(self, found: frozenset[str]) -> frozenset[str]:
        """The candidates that have the override. For "speed", the search finds those that keep float32."""
        return frozenset(self._names) - found if self._is_speed else found

    def _names_of(self, found: frozenset[str] | None) -> list[str]:
        """The names of the candidates that have the override, in order."""
        given = frozenset() if found is None else self._given(found)
        return [name for name in self._names if name in given]

    def _places(self, given: frozenset[str]) -> set[tuple[str, str]]:
        chosen = [one for one in self._candidates if one.name in given]
        return {(site.module, site.op) for site in sites_of(chosen, self._overriding.sites, self._level)}

    def _policy_of(self, given: frozenset[str]) -> Policy:
        return self._overriding.policy(self._overriding.overrides(self._places(given))) if given else self._base

    def _kept_bytes(self, found: frozenset[str]) -> float:
        return self._bytes(found)

    def _bytes(self, names: frozenset[str]) -> int:
        chosen = [one for one in self._candidates if one.name in names]
        return bytes_of(sites_of(chosen, self._overriding.sites, self._level))

    # --- the result

    def _result(self) -> Tuning:
        trials, found, memo, verified = self._trials, self._found, self._memo, self._verified
        if found is not None:
            certificate = certify(
                found,
                self._names,
                memo.known,
                direction=self._direction,
                budget=trials.runs.budget,
                ended=self._ended,
            )
        else:
            certificate = Certificate(
                kind="passes", text="The search was interrupted before any overrides were known to pass."
            )
        certificate = dataclasses.replace(
            certificate,
            text=" ".join([certificate.text, *verified.texts]),
            held_out=verified.held_out,
            compiled=verified.compiled,
        )
        gain = {}
        if self._is_speed and found is not None:
            seconds = self._untuned.seconds - self._last.seconds
            gain = {"bytes": self._bytes(self._given(found)) / 2, "seconds": seconds}
        return Tuning(
            policy=self._policy,
            overrides=self._overrides,
            met=found is not None and self._last.passed and verified.met,
            level=self._level,
            direction=self._direction,
            tolerance=trials.judge.tolerance,
            errors=self._last.errors,
            certificate=certificate,
            trials=trials.all,
            noise_floor=self._noise,
            candidates=self._candidates,
            predicted_against_measured=self._prediction.pairs(trials.all),
            comparison=self._comparison,
            budget=trials.runs.budget,
            runs=trials.runs.spent,
            gain=gain,
            notes=[*self._notes, *verified.notes],
            interrupted=self._interrupted,
            found=tuple(self._names_of(found)),
        )


# ---Detects whether a step runs compiled code.


#: The depth to which functions that call functions are searched.
_DEPTH = 3


def is_compiled(step: Callable[..., Any], model: nn.Module | None) -> bool:
    """Whether a step calls an object returned by torch.compile, as far as its code shows.

    Args:
        step: The step. Its closure, the globals that its code names, its object and its arguments are searched, and the
            functions among them.
        model: The model, whose modules are searched.

    Example:
        >>> is_compiled(lambda: 0.0, nn.Linear(2, 2))
        False
    """
    if model is not None and _has_compiled_modules(model):
        return True
    return any(map(_is_compiled, _reached(step, _DEPTH, set())))


def _is_compiled(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return _has_compiled_modules(value)
    return callable(value) and hasattr(value, "_torchdynamo_orig_callable")


def _has_compiled_modules(model: nn.Module) -> bool:
    return any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in model.modules())


def _reached(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yields an object and the objects that it refers to."""
    if id(value) in seen or inspect.ismodule(value) or isinstance(value, type):
        return
    seen.add(id(value))
    yield value
    if not depth:
        return
    inner: list[Any] = []
    if isinstance(value, functools.partial):
        inner += [value.func, *value.args, *value.keywords.values()]
    if not isinstance(value, nn.Module):
        owner = getattr(value, "__self__", None)
        inner += list(getattr(owner, "__dict__", {}).values())
    function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
    if inspect.isfunction(function):
        inner += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        inner += [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    elif not isinstance(value, nn.Module) and inspect.isfunction(call := type(value).__dict__.get("__call__")):
        inner += [call, *getattr(value, "__dict__", {}).values()]
    for one in inner:
        yield from _reached(one, depth - 1, seen)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


_DIRECTIONS = ("accuracy", "speed")
#: Two runs of the reference, one of the policy, one with all candidates in float32, two on held-out batches.
_LEAST = 6


def tune(
    step: Callable[..., Any],
    *,
    model: nn.Module,
    tolerance: float | Mapping[str, float],
    metric: Callable[[Any], Any] | str | None = None,
    batches: int = 1,
    check: Callable[[Any], bool] | None = None,
    budget: int = 60,
    level: Literal["op", "module", "site"] = "op",
    direction: Literal["accuracy", "speed"] = "accuracy",
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
        dtype: The dtype of regions that name none: torch.float16 or torch.bfloat16, or its name.
        seed: Orders candidates that no estimate tells apart.
        resume: A file that keeps each run. A later call with the same arguments goes on from it, in another process,
            too; runs in the file count as part of the budget.
        progress: Whether to show a bar, if stderr is a terminal and rich is installed.
        restore: Other state that the step changes, as in `compare`.

    Returns:
        The tuning. All state is restored. After Ctrl-C, the results so far; during the first three runs there are none,
        and the KeyboardInterrupt propagates.

    Raises:
        OptionError: An argument is invalid, or the file in `resume` belongs to another tuning.
        NoiseFloorError: Two runs of the reference differ by more than the tolerance.
        NothingToTuneError: The policy meets the tolerance without overrides.
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
    _check_choice("level", level, LEVELS)
    _check_choice("direction", direction, _DIRECTIONS)
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be the nn.Module that the step runs, got {model!r}.")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise OptionError(f"seed is an int, got {seed!r}.")
    if dtype is not None:
        dtype = parse_dtype(dtype)
    judge = Judge(tolerance, metric, check)
    compiled = is_compiled(step, model)
    least = _LEAST + compiled + (direction == "speed")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < least:
        raise OptionError(
            f"budget (the maximum number of runs) must be {least} or more, got {budget!r}: two runs of the "
            f"reference, one of the policy, one with all candidates overridden, two on held-out batches"
            f"{', one of the compiled step' if compiled else ''}"
            f"{', one more of the policy to time it' if direction == 'speed' else ''}."
        )
    base = present_policy()
    group = Agreement()
    identity = {
        "torch": str(torch.__version__),
        "policy": base.to_dict(),
        "tolerance": tolerance if not isinstance(tolerance, Mapping) else dict(tolerance),
        "metric": metric if isinstance(metric, str) else getattr(metric, "__qualname__", None),
        "check": getattr(check, "__qualname__", None),
        "batches": batches,
        "level": level,
        "direction": direction,
        "dtype": None if dtype is None else str(dtype),
        "seed": seed,
        "parameters": _digest_of(model),
        "ranks": group.ranks,
    }
    with MeasuredRuns(step, model, judge, budget, batches=batches, restore=restore, dtype=dtype) as runs:
        file = _file(resume, identity, group)
        with show_progress("tune", budget, wanted=progress and group.rank == 0) as show:
            trials = Trials(runs, judge, group, file, show)
            tuner = Tuner(trials, file, base, model, level=level, direction=direction, seed=seed, compiled=compiled)
            return tuner.tune()


def _check_choice(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise OptionError(
            f"{name} is {' or '.join(map(repr, legal))}, got {value!r}.{did_you_mean(str(value), legal, 1)}"
        )


def _digest_of(model: nn.Module) -> str:
    """A digest of the names and shapes of a model's parameters."""
    shapes = [(name, list(one.shape), str(one.dtype)) for name, one in model.named_parameters()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _file(path: str | os.PathLike[str] | None, identity: Mapping[str, Any], group: Agreement) -> ResumeFile:
    """The file, which rank 0 reads and writes."""
    file, error = ResumeFile(None, identity), None
    if group.rank == 0:
        try:
            file = ResumeFile(path, identity)
        except TorchPromoteError as raised:
            error = raised
    kept, error = group.of_first_rank((file.kept, error))
    if error is not None:
        raise error
    file.kept = kept
    return file
