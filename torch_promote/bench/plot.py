"""Plots the ratios of a run: a panel for each suite, a dot with quartiles for each case, and a line at 1."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_promote.bench.cases import Settings
from torch_promote.bench.results import Result, report
from torch_promote.errors import TorchPromoteError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PlotError", "check_plot", "draw", "save_plot"]

_FASTER, _SLOWER, _EVEN = "#1b7f79", "#c8553d", "#6b7280"
_INK, _FAINT = "#1f2933", "#d9dee3"

_ROW_INCHES, _PANEL_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.27, 0.62, 1.25, 10.0


class PlotError(TorchPromoteError):
    """The plot cannot be drawn in this installation, or cannot be written to this file."""


def check_plot(path: Path) -> None:
    """Checks that the plot can be drawn and written. Call it before the measurement, which takes a long time.

    Raises:
        PlotError: matplotlib is not installed, or the file is not a .png file, or cannot be written.
    """
    try:
        import matplotlib  # noqa: F401 (checks that it is installed)
    except ModuleNotFoundError as error:
        raise PlotError("--plot needs matplotlib: pip install matplotlib.") from error
    if path.suffix.lower() != ".png":
        raise PlotError(f"--plot {path} is not a PNG file. Expected a name that ends in .png.")
    there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error.strerror}.") from error
    if not there:
        path.unlink()


def save_plot(path: Path, results: Sequence[Result], settings: Settings) -> None:
    """Plots the cases that have a ratio, into a file.

    Args:
        path: A PNG file.
        results: The results of a run, suite by suite.
        settings: The settings of the run.

    Raises:
        PlotError: The file cannot be written, or no case has a ratio.
    """
    figure = draw(results, settings)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error.strerror}.") from error


def draw(results: Sequence[Result], settings: Settings) -> Figure:
    """Plots the cases that have a ratio.

    Args:
        results: The results of a run, suite by suite.
        settings: The settings of the run.

    Raises:
        PlotError: No case has a ratio.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [result for result in results if result.main_ratio]
    if not shown:
        raise PlotError("there is nothing to plot: no case has a ratio.")
    suites = [list(group) for _, group in itertools.groupby(shown, lambda result: result.case.suite)]
    heights = [_PANEL_INCHES + _ROW_INCHES * len(suite) for suite in suites]
    size = (_WIDTH_INCHES, _HEAD_INCHES + sum(heights))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(suites), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, suite in zip(panels, suites, strict=True):
        _draw_suite(panel, suite)
    _draw_scale(panels[-1], shown)
    where = report([], settings)["device_name"]
    figure.suptitle(
        f"Time under my_autocast / time under torch.autocast: left of the line is faster\n"
        f"torch {torch.__version__}, {where}, threads: {settings.threads}, rounds: {settings.rounds}",
        fontsize=11,
        color=_INK,
    )
    return figure


def _draw_suite(panel: Axes, suite: Sequence[Result]) -> None:
    panel.axvline(1.0, color=_INK, linewidth=1.2, zorder=1)
    for row, result in enumerate(suite):
        assert result.main_ratio is not None
        ratio, against_stock = result.main_ratio, result.ratio is not None
        color = _FASTER if ratio.high < 1 else _SLOWER if ratio.low > 1 else _EVEN
        panel.plot([ratio.low, ratio.high], [row, row], color=color, linewidth=4, alpha=0.35, solid_capstyle="round")
        face = color if against_stock else "white"
        panel.plot(ratio.median, row, "o", color=color, markerfacecolor=face, markersize=6.5, zorder=3)
        panel.annotate(
            f"{ratio.median:.2f}",
            (1.0, row),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=color,
            annotation_clip=False,
        )
    panel.set_yticks(range(len(suite)), [_label(result) for result in suite], fontsize=8, color=_INK)
    panel.set_ylim(len(suite) - 0.4, -0.6)
    panel.set_title(suite[0].case.suite, loc="left", fontsize=10, fontweight="bold", color=_INK)
    panel.grid(axis="x", which="both", color=_FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


def _label(result: Result) -> str:
    return result.case.name if result.ratio else f"{result.case.name} *"


def _draw_scale(panel: Axes, shown: Sequence[Result]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    ends: list[Any] = [
        end for result in shown if result.main_ratio for end in (result.main_ratio.low, result.main_ratio.high)
    ]
    low, high = min(0.5, *ends) * 0.9, max(1.25, *ends) * 1.1
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    marks = [mark for mark in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10) if low <= mark <= high]
    panel.xaxis.set_major_locator(FixedLocator(marks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda mark, _: f"{mark:g}")
    note = (
        ""
        if all(result.ratio for result in shown)
        else "\n* and hollow: ratio to casts by hand, because stock lacks the feature"
    )
    panel.set_xlabel(f"ratio, log scale; dot: median, bar: quartiles{note}", fontsize=8.5, color=_INK)
