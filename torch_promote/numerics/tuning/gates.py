"""The runs before a search, and the errors that can end it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_promote.errors import Fp32FailsError, NoiseFloorError, NothingToTuneError, OptionError
from torch_promote.numerics.comparing.compare import REFERENCE, compare_runs
from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.numerics.comparing.rounds import DIFFER
from torch_promote.numerics.tuning.resume import Kept, ResumeFile, digest
from torch_promote.numerics.tuning.trials import Trials
from torch_promote.numerics.tuning.tuning import Trial
from torch_promote.numerics.tuning.verdict import Judge, Results, describe
from torch_promote.policy.policy import Policy

__all__ = ["check_full", "check_noise", "check_untuned", "first_runs"]

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
