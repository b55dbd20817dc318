"""Facts for the summary, the page and the plot of a tuning: the verdict, and the most important trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from torch_promote.numerics.tuning.tuning_records import Candidate, Trial, TuningRecords
from torch_promote.observe.findings import count, size
from torch_promote.observe.pages import spell_number, spell_op, spell_tolerance

__all__ = [
    "about_tuning",
    "chosen_candidates",
    "error_of",
    "frontier",
    "marked_modules",
    "over_tolerance",
    "spell_overrides",
    "spell_runs",
    "spell_use",
    "tolerance_line",
    "tuning_verdict",
]

#: The purposes of runs of the final policy, which are not part of the search.
FINAL = ("held out", "compiled")
_NAMED = 3


def tuning_verdict(tuning: TuningRecords) -> str:
    """Returns the result of `tune` in one sentence.

    Args:
        tuning: The result.
    """
    proof = {"minimum": "the minimum", "1-minimal": "1-minimal"}.get(tuning.certificate.kind, "")
    if tuning.direction == "speed":
        proof = ""
    what, verb = _subject(tuning), "meets" if len(chosen_candidates(tuning)) < 2 else "meet"
    if tuning.met:
        text = f"{what} {verb} the tolerance: {_figures(tuning.errors, tuning.tolerance)}"
        text += f", saving {_gain(tuning.gain)}" if any(value > 0 for value in tuning.gain.values()) else ""
        text += f" ({', '.join(filter(None, [proof, spell_runs(tuning)]))})."
    else:
        text = f"{_failure(tuning, what, verb)} ({spell_runs(tuning)})."
    return f"Interrupted: {text[0].lower()}{text[1:]}" if tuning.interrupted else text


def _subject(tuning: TuningRecords) -> str:
    chosen = chosen_candidates(tuning)
    if not chosen:
        return "The policy without overrides"
    if len(chosen) <= _NAMED:
        names = [_spell_candidate(one.op, one.module, tuning) for one in chosen]
    else:
        names = [
            _spell_candidate(", ".join(value) if isinstance(value, Mapping) else name, name, tuning)
            for name, value in tuning.overrides.items()
        ]
    # At level "site", a name stands for a table with several overrides.
    noun = "more table" if tuning.level == "site" and len(chosen) > _NAMED else ""
    return f"{count(len(chosen), 'override')}, {_names(names, noun)},"


def _spell_candidate(op: str, module: str, tuning: TuningRecords) -> str:
    place = module or "the model itself"
    return {"op": spell_op(op), "module": place}.get(tuning.level, f"{spell_op(op)} in {place}")


def _names(names: Iterable[str], noun: str = "") -> str:
    shown = list(names)
    if (more := len(shown) - _NAMED) > 0:
        return f"{', '.join(shown[:_NAMED])} and {count(more, noun) if noun else f'{more} more'}"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _failure(tuning: TuningRecords, what: str, verb: str) -> str:
    final = {"on held-out batches": tuning.certificate.held_out, "in the compiled step": tuning.certificate.compiled}
    for where, errors in final.items():
        if over := over_tolerance(errors or {}, tuning.tolerance):
            fail = "fails" if verb == "meets" else "fail"
            figures = _figures(over, tuning.tolerance)
            return f"{what} {verb} the tolerance in the search and {fail} {where}: {figures}"
    if over := over_tolerance(tuning.errors, tuning.tolerance):
        figures = _figures(over, tuning.tolerance)
        return f"No set of overrides was found that meets the tolerance; the best one has {figures}"
    if not tuning.overrides:
        return "No set of overrides is known to meet the tolerance"
    return "The overrides found did not pass the check in every run"


def over_tolerance(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> dict[str, float]:
    """Returns the errors that are over their tolerances."""
    return {name: error for name, error in errors.items() if name in tolerance and not error <= tolerance[name]}


def _figures(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> str:
    worst = sorted(tolerance, key=lambda name: -_ratio(errors.get(name, 0.0), tolerance[name]))
    text = "; ".join(
        f"{name} {spell_number(errors.get(name))}, allowed {spell_tolerance(tolerance[name])}"
        for name in worst[:2]
        if name in errors
    )
    return text + (f"; and {len(errors) - 2} more" if len(errors) > 2 else "")


def _gain(gain: Mapping[str, float]) -> str:
    return " and ".join(
        size(value) if name == "bytes" else f"{spell_number(value)} {'s' if name == 'seconds' else name}"
        for name, value in gain.items()
        if value > 0  # no saving otherwise
    )


def spell_runs(tuning: TuningRecords) -> str:
    """Returns the number of runs made: "17 of 60 runs"."""
    return f"{tuning.runs:,} of {count(tuning.budget, 'run')}"


def about_tuning(tuning: TuningRecords) -> list[str]:
    """Returns the settings and the effort of the search.

    Args:
        tuning: The result.
    """
    torch = tuning.comparison.torch_version
    return [
        *([f"torch {torch}"] if torch else []),
        {"accuracy": "fewest overrides", "speed": "largest gain"}.get(tuning.direction, tuning.direction),
        f"level {tuning.level}",
        count(len(tuning.candidates), "candidate"),
        spell_runs(tuning),
    ]


def spell_overrides(tuning: TuningRecords) -> Iterator[tuple[str, str]]:
    """Yields the overrides: a name, and its policy or table.

    Args:
        tuning: The result.
    """
    for name, value in tuning.overrides.items():
        if isinstance(value, Mapping):
            table = ", ".join(f"{spell_op(op)}: {getattr(policy, 'value', policy)}" for op, policy in value.items())
            yield name or "the model", table
        else:
            yield spell_op(name), str(getattr(value, "value", value))


def marked_modules(tuning: TuningRecords) -> dict[str, str]:
    """Returns the modules that have an override, with their text for the page.

    Args:
        tuning: The result.
    """
    value = "fp32" if tuning.direction == "accuracy" else "lower"
    chosen = {(one.op, one.module) for one in chosen_candidates(tuning)}
    marked: dict[str, dict[str, None]] = {}
    for site in tuning.comparison.sites:
        text = value if tuning.level == "module" else f"{spell_op(site.op)}: {value}"
        key = {"op": (site.op, ""), "module": ("", site.module)}.get(tuning.level, (site.op, site.module))
        if key in chosen:
            marked.setdefault(site.module, {})[text] = None
    return {module: ", ".join(texts) for module, texts in marked.items()}


def spell_use(tuning: TuningRecords) -> str:
    """Returns Python code that uses the saved policy.

    Args:
        tuning: The result.
    """
    if tuning.policy.modules:
        return (
            'policy = torch_promote.Policy.load("mine.toml")\n'
            "policy.apply_to(model)\n"
            "torch_promote.install(policy=policy)"
        )
    return 'torch_promote.install(policy="mine.toml")'


def error_of(errors: Mapping[str, float], tuning: TuningRecords) -> float:
    """Returns the error to plot: that of the only metric, or the largest relative to its tolerance.

    Args:
        errors: The errors of a trial. Without any, the step raised, and the error is infinite.
        tuning: The result.
    """
    if not errors:
        return math.inf
    if len(tuning.tolerance) == 1:
        return next((errors[name] for name in tuning.tolerance if name in errors), math.inf)
    return max((_ratio(errors[name], limit) for name, limit in tuning.tolerance.items() if name in errors), default=0.0)


def tolerance_line(tuning: TuningRecords) -> float:
    """Returns the tolerance on the scale of `error_of`."""
    return next(iter(tuning.tolerance.values())) if len(tuning.tolerance) == 1 else 1.0


def _ratio(error: float, limit: float) -> float:
    if error != error:
        return math.inf
    return error / limit if limit else (math.inf if error else 0.0)


def frontier(tuning: TuningRecords) -> list[Trial]:
    """Returns the trials that are better than all trials with fewer overrides (for "speed", with more).

    A trial that passed is better than one that failed; otherwise, a smaller error is better.

    Args:
        tuning: The result.

    Returns:
        The trials, the fewest overrides first; for "speed", the most first.
    """
    sign = -1 if tuning.direction == "speed" else 1
    best: list[Trial] = []
    trials = [trial for trial in tuning.trials if trial.why not in FINAL]
    for trial in sorted(trials, key=lambda one: (sign * len(one.overrides), _rank(one, tuning))):
        if not best or _rank(trial, tuning) < _rank(best[-1], tuning):
            best.append(trial)
    return best


def _rank(trial: Trial, tuning: TuningRecords) -> tuple[bool, float]:
    return not trial.passed, error_of(trial.errors, tuning)


def chosen_candidates(tuning: TuningRecords) -> list[Candidate]:
    """Returns the candidates that have an override, in the order of the search.

    Args:
        tuning: The result.
    """
    found = set(tuning.found)
    return [one for one in tuning.candidates if one.name in found]
