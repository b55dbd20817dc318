"""The charts of a tuning's page: predicted vs. measured errors, and errors vs. numbers of overrides."""

from __future__ import annotations

import math

from torch_promote.numerics.tuning.tuning_findings import FINAL, error_of, frontier, tolerance_line
from torch_promote.numerics.tuning.tuning_records import TuningRecords
from torch_promote.observe.findings import count
from torch_promote.observe.pages import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Chart,
    CountAxis,
    LogAxis,
    Mark,
    spell_number,
    spell_op,
    spell_tolerance,
)

__all__ = ["frontier_chart", "prediction_chart"]

_NAMED = 4
_KINDS = {True: "passed", False: "failed"}


def prediction_chart(tuning: TuningRecords) -> Chart | None:
    """Returns the chart of predicted vs. measured errors, or None if nothing was predicted.

    Args:
        tuning: The result.
    """
    points = tuning.predicted_against_measured
    if not points:
        return None
    passed = {frozenset(trial.overrides): trial.passed for trial in tuning.trials if trial.why not in FINAL}
    predictions, measured_ones = [point[1] for point in points], [point[2] for point in points]
    across = LogAxis(predictions, LEFT, RIGHT, scale=measured_ones)
    up = LogAxis(measured_ones, BOTTOM, TOP, scale=predictions)
    line = "L".join(f"{across.place_power(power)} {up.place_power(power)}" for power in (across.low, across.high))
    marks = [
        Mark(
            across.place(predicted),
            up.place(measured),
            _KINDS[passed.get(frozenset(names), False)],
            f"{_spell(names)}: predicted {spell_number(predicted)}, measured {spell_number(measured)}",
        )
        for names, predicted, measured in points
    ]
    note = "Predictions are first order, from the impacts. They only order the search; runs decide."
    return Chart(
        "Predicted against measured",
        note,
        "predicted error",
        "measured error",
        across.ticks,
        up.ticks,
        marks,
        limit=f"M{line}",
        limit_label="equal",
        limit_y=up.place_power(up.high) + 12,
    )


def frontier_chart(tuning: TuningRecords) -> Chart | None:
    """Returns the chart of errors vs. numbers of overrides, or None without trials.

    Args:
        tuning: The result.
    """
    trials = [trial for trial in tuning.trials if trial.why not in FINAL]
    if not trials:
        return None
    limit = tolerance_line(tuning)
    errors = [error_of(trial.errors, tuning) for trial in trials]
    across = CountAxis(max(len(trial.overrides) for trial in trials), LEFT + 8, RIGHT - 8)
    up = LogAxis([*errors, limit], BOTTOM, TOP)
    marks = [
        Mark(
            across.place(len(trial.overrides)),
            up.place(error),
            _KINDS[trial.passed],
            f"{_spell(trial.overrides)}: {spell_number(error)}, {trial.why}",
        )
        for trial, error in zip(trials, errors, strict=True)
    ]
    steps: list[str] = []
    best = math.inf
    for trial in frontier(tuning):
        error = error_of(trial.errors, tuning)
        if error < best:
            x, y = across.place(len(trial.overrides)), up.place(error)
            steps.append(f"H{x}V{y}" if steps else f"M{x} {y}")
            best = error
    if steps:
        steps.append(f"H{LEFT if tuning.direction == 'speed' else RIGHT}")
    more = "more" if tuning.direction == "speed" else "fewer"
    one = len(tuning.tolerance) == 1
    metric = next(iter(tuning.tolerance), "error")
    return Chart(
        "Overrides against error",
        f"Each point is a trial. The line shows the smallest error with that many overrides or {more}.",
        "overrides",
        f"error of {metric}" if one else "largest error / tolerance",
        across.ticks,
        up.ticks,
        marks,
        best="".join(steps),
        limit=f"M{LEFT} {up.place(limit)}H{RIGHT}",
        limit_label=f"tolerance {spell_tolerance(limit)}" if one else "tolerance",
        limit_y=up.place(limit) - 5,
    )


def _spell(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(spell_op, names[:_NAMED]))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{count(len(names), 'override')} ({shown}{more})" if names else "no override"
