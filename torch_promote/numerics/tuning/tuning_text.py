"""The result of `tune` as text for the terminal: the verdict, the overrides, and the ten most important trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch_promote.numerics.tuning.tuning_findings import (
    about_tuning,
    error_of,
    frontier,
    spell_overrides,
    tuning_verdict,
)
from torch_promote.numerics.tuning.tuning_records import TuningRecords
from torch_promote.observe.pages import (
    STR,
    Layout,
    fitted_table,
    list_of,
    report_text,
    spell_number,
    spell_op,
    spell_tolerance,
    wrapped,
)

__all__ = ["tuning_text"]

_ROWS, _NAMED = 10, 2


def tuning_text(tuning: TuningRecords, layout: Layout = STR) -> str:
    """Returns the summary as plain text.

    Args:
        tuning: The result.
        layout: The layout.
    """
    return report_text(
        f"tuning: {', '.join(about_tuning(tuning))}", tuning_verdict(tuning), _parts(tuning, layout), layout
    )


def _parts(tuning: TuningRecords, layout: Layout) -> Iterator[list[str]]:
    certificate = tuning.certificate
    yield fitted_table(
        ("override", "policy"), list(spell_overrides(tuning)), most=_ROWS, noun="override", layout=layout
    )
    yield fitted_table(
        ("metric", "tolerance", "error", "held out", "compiled", "noise"),
        [
            (
                name,
                spell_tolerance(tolerance),
                *(_cell(errors, name) for errors in (tuning.errors, certificate.held_out, certificate.compiled)),
                _cell(tuning.noise_floor, name),
            )
            for name, tolerance in tuning.tolerance.items()
        ],
        most=_ROWS,
        noun="metric",
        layout=layout,
    )
    one = len(tuning.tolerance) == 1
    yield fitted_table(
        ("overrides", "error" if one else "error / tolerance", "passed", "run for", "which"),
        [
            (
                f"{len(trial.overrides):,}",
                spell_number(error_of(trial.errors, tuning)),
                "yes" if trial.passed else "no",
                trial.why,
                _spell_names(trial.overrides),
            )
            for trial in frontier(tuning)[-_ROWS:]
        ],
        most=_ROWS,
        noun="trial",
        layout=layout,
        prose=("which",),
    )
    yield wrapped(certificate.text, layout)
    yield list_of("Not monotone:", certificate.violations, layout)
    yield list_of("Notes:", tuning.notes, layout)


def _spell_names(names: Sequence[str]) -> str:
    shown = ", ".join(map(spell_op, names if len(names) <= _NAMED else names[:1]))
    return shown + (f" (+{len(names) - 1})" if len(names) > _NAMED else "") or "-"


def _cell(errors: Mapping[str, float] | None, name: str) -> str:
    return spell_number(None if errors is None else errors.get(name))
