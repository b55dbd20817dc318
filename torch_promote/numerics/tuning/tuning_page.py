"""The page of a tuning. This module passes plain values to the template tuning.html.j2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch_promote.numerics.comparing.heat import heat_tree
from torch_promote.numerics.tuning.tuning_charts import frontier_chart, prediction_chart
from torch_promote.numerics.tuning.tuning_findings import (
    about_tuning,
    chosen_candidates,
    marked_modules,
    over_tolerance,
    spell_overrides,
    spell_use,
    tuning_verdict,
)
from torch_promote.numerics.tuning.tuning_records import Trial, TuningRecords
from torch_promote.observe.findings import size
from torch_promote.observe.pages import Tile, cut_list, embed, render_page, spell_number, spell_op, spell_tolerance
from torch_promote.policy.files import to_toml

__all__ = ["embed_tuning", "make_tuning_page"]

_MOST_CANDIDATES, _MOST_TRIALS, _MOST_NAMES = 300, 1_000, 12


def make_tuning_page(tuning: TuningRecords) -> str:
    """Returns the page of a tuning.

    Args:
        tuning: The result of `tune`.

    Raises:
        MissingPackageError: jinja2 is not installed. It is an ImportError.
    """
    return render_page("tuning/tuning.html.j2", "a tuning", _content(tuning))


def embed_tuning(tuning: TuningRecords, text: str) -> str:
    """Returns the page in a frame, for a notebook; without jinja2, the text.

    Args:
        tuning: The result of `tune`.
        text: The result as text.
    """
    return embed("tuning", lambda: make_tuning_page(tuning), lambda: text)


def _content(tuning: TuningRecords) -> dict[str, Any]:
    certificate, comparison = tuning.certificate, tuning.comparison
    chosen = chosen_candidates(tuning)
    return {
        "about": about_tuning(tuning),
        "verdict": tuning_verdict(tuning),
        "met": tuning.met,
        "numbers": list(_tiles(tuning)),
        "overrides": list(spell_overrides(tuning)),
        "toml": to_toml(tuning.policy.to_dict()),
        "use": spell_use(tuning),
        "for_model": bool(tuning.policy.modules),
        "metrics": [_metric(tuning, name) for name in tuning.tolerance],
        "certificate": certificate,
        "violations": cut_list(certificate.violations),
        "tree": heat_tree(comparison.sites, comparison.modules),
        "marked": marked_modules(tuning),
        "charts": [chart for chart in (frontier_chart(tuning), prediction_chart(tuning)) if chart],
        "tolerance": tuning.tolerance,
        "trials": [_trial(trial, tuning) for trial in tuning.trials[:_MOST_TRIALS]],
        "more_trials": max(0, len(tuning.trials) - _MOST_TRIALS),
        "candidates": [(one, one in chosen) for one in tuning.candidates[:_MOST_CANDIDATES]],
        "more_candidates": max(0, len(tuning.candidates) - _MOST_CANDIDATES),
        "notes": cut_list([*tuning.notes, *comparison.notes]),
        "not_seen": cut_list([*comparison.not_aligned, *comparison.not_seen]),
    }


def _tiles(tuning: TuningRecords) -> Iterator[Tile]:
    name, limit = next(iter(tuning.tolerance.items()), ("error", 0.0))
    yield Tile("Overrides", f"{len(chosen_candidates(tuning)):,}", f"of {len(tuning.candidates):,} candidates")
    yield Tile(f"Error of {name}", spell_number(tuning.errors.get(name)), f"allowed {spell_tolerance(limit)}")
    if tuning.certificate.held_out is not None:
        yield Tile("On held-out batches", spell_number(tuning.certificate.held_out.get(name)), f"error of {name}")
    if tuning.certificate.compiled is not None:
        yield Tile("Compiled", spell_number(tuning.certificate.compiled.get(name)), f"error of {name}")
    if "bytes" in tuning.gain:
        yield Tile("Saved", size(tuning.gain["bytes"]), "casts and saved activations")
    if "seconds" in tuning.gain:
        yield Tile("Saved", f"{spell_number(tuning.gain['seconds'])} s", "of a run")
    yield Tile("Runs", f"{tuning.runs:,}", f"of {tuning.budget:,}, {_seconds(tuning)}")


def _seconds(tuning: TuningRecords) -> str:
    seconds = sum(trial.seconds for trial in tuning.trials)
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _metric(tuning: TuningRecords, name: str) -> dict[str, Any]:
    certificate = tuning.certificate

    def cell(label: str, errors: Mapping[str, float] | None) -> tuple[str, float | None, bool]:
        known = {} if errors is None else errors
        return label, known.get(name), bool(over_tolerance({name: known.get(name, 0.0)}, tuning.tolerance))

    return {
        "name": name,
        "tolerance": tuning.tolerance[name],
        "errors": [
            cell("search", tuning.errors),
            cell("held out", certificate.held_out),
            cell("compiled", certificate.compiled),
        ],
        "noise": tuning.noise_floor.get(name),
    }


def _trial(trial: Trial, tuning: TuningRecords) -> dict[str, Any]:
    return {
        "why": trial.why,
        "number": len(trial.overrides),
        "names": ", ".join(map(spell_op, trial.overrides[:_MOST_NAMES])),
        "more": max(0, len(trial.overrides) - _MOST_NAMES),
        "errors": [(name, trial.errors.get(name)) for name in tuning.tolerance],
        "predicted": trial.predicted,
        "passed": trial.passed,
        "seconds": trial.seconds,
        "error": trial.error,
    }
