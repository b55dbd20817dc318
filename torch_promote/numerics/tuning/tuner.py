"""A tuning, from the first runs to the result."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import nn

from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.numerics.pages.spelling import spell_op
from torch_promote.numerics.tuning import gates
from torch_promote.numerics.tuning.candidates import bytes_of, overridable, rank_candidates, sites_of
from torch_promote.numerics.tuning.certificate import certify
from torch_promote.numerics.tuning.overriding import Overriding
from torch_promote.numerics.tuning.patterns import compress
from torch_promote.numerics.tuning.prediction import Prediction
from torch_promote.numerics.tuning.resume import ResumeFile
from torch_promote.numerics.tuning.search import Memo, OutOfBudgetError, minimise
from torch_promote.numerics.tuning.trials import Trials
from torch_promote.numerics.tuning.tuning import Candidate, Certificate, Trial, Tuning
from torch_promote.numerics.tuning.verify import Verified, verify, verify_compiled
from torch_promote.policy.policy import Policy

__all__ = ["Tuner"]

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
        self._comparison, self._noise, untuned = gates.first_runs(
            trials, self._file, self._base, after + 1 + self._is_speed
        )
        gates.check_noise(self._noise, trials.judge, self._comparison.notes)
        sites, others = overridable(self._comparison.sites, self._overriding.value, self._overriding.closed)
        others += self._overriding.choose_from(sites)
        ranked = rank_candidates(self._overriding.sites, self._level, self._seed, by_bytes=self._is_speed)
        order = trials.group.order([one.name for one in ranked])
        by_name = {one.name: one for one in ranked}
        self._candidates = [by_name[name] for name in order]
        self._names = order
        gates.check_untuned(untuned, trials.judge, self._direction, len(order), self._comparison.notes)
        if not order:
            gates.check_full(None, trials.judge, 0, others, self._comparison.not_aligned)
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
            gates.check_full(full, self._trials.judge, len(everything), self._others, self._comparison.not_aligned)
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
