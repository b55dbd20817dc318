"""The plot of a tuning for a notebook: the error of each trial against its number of overrides."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_promote.numerics.tuning.tuning_findings import FINAL, error_of, frontier, tolerance_line
from torch_promote.numerics.tuning.tuning_records import TuningRecords
from torch_promote.observe.pages import (
    FAINT,
    INK,
    decorate,
    figure_of,
    label_of,
    new_figure,
    spell_tolerance,
    write_empty,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_tuning"]

#: The colour, marker and label of trials that passed or failed, in Okabe and Ito's colour-blind safe palette.
_STYLES = {True: ("#0072b2", "o", "passed"), False: ("#d55e00", "x", "failed")}


def plot_tuning(tuning: TuningRecords, axes: Axes | None = None) -> Figure:
    """Plots the trials: the number of overrides and the error, and a line through the best of them.

    Infinite errors are drawn at the upper edge, zeros at the lower edge.

    Args:
        tuning: The result.
        axes: The axes to draw on. Default: a new figure.

    Returns:
        The figure.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    axes = new_figure((7.0, 3.8)).subplots() if axes is None else axes
    decorate(axes, "Overrides against error")
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(FAINT)
    trials = [trial for trial in tuning.trials if trial.why not in FINAL]
    if not trials:
        return write_empty(axes, "no trial was run")
    limit = tolerance_line(tuning)
    errors = [error_of(trial.errors, tuning) for trial in trials]
    finite = [value for value in [*errors, limit] if 0 < value < math.inf] or [1.0]
    low, high = max(min(finite) / 5, 1e-300), min(max(finite) * 5, 1e300)  # within the range that an axis can show

    def drawn(error: float) -> float:
        return min(max(error, low), high) if error == error else high

    for passed, (color, marker, label) in _STYLES.items():
        points = [
            (len(trial.overrides), drawn(error))
            for trial, error in zip(trials, errors, strict=True)
            if trial.passed is passed
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, 28, color=color, marker=marker, linewidths=1.5, zorder=3, clip_on=False, label=label)
    best = [(len(trial.overrides), drawn(error_of(trial.errors, tuning))) for trial in frontier(tuning)]
    axes.step(*zip(*best, strict=True), where="post", color=INK, linewidth=1, alpha=0.6, zorder=2)
    axes.axhline(limit, color=INK, linewidth=0.9, linestyle="--", alpha=0.7)
    one = len(tuning.tolerance) == 1
    text = f"tolerance {spell_tolerance(limit)}" if one else "tolerance"
    axes.annotate(
        text, (1, limit), (0, 3), ("axes fraction", "data"), "offset points", ha="right", fontsize=8, color=INK
    )
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    most = max(len(trial.overrides) for trial in trials)
    axes.set_xscale("symlog", linthresh=1.0)
    ticks = [number for number in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500) if number <= most]
    axes.set_xticks(ticks, [str(number) for number in ticks])
    axes.set_xlim(-0.2, max(most, 1) * 1.1)
    axes.minorticks_off()
    axes.set_xlabel("overrides", fontsize=8.5, color=INK)
    name = label_of(next(iter(tuning.tolerance), ""))
    axes.set_ylabel(f"error of {name}" if one else "largest error / tolerance", fontsize=8.5, color=INK)
    axes.legend(loc="best", frameon=False, fontsize=8, labelcolor=INK)
    return figure_of(axes)
