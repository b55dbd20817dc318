"""Plots of a trace for a notebook: the dtypes over time, and the bytes of casts by module."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from torch_promote.numerics.pages.figure import INK, decorate, figure_of, label_of, new_figure, write_empty
from torch_promote.numerics.records.calls import Call
from torch_promote.numerics.report.findings import OTHER, count, result_dtype, result_dtypes, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["plot_casts", "plot_dtypes", "plot_trace"]

# Okabe and Ito's colour-blind safe palette, as in page.css.
_COLORS = {
    "float64": "#56b4e9",
    "float32": "#0072b2",
    "bfloat16": "#e69f00",
    "float16": "#d55e00",
    "float8": "#cc79a7",
    OTHER: "#b4b8bf",
}
_COMPLEX = "#009e73"
_PHASES = {"forward": "#ffffff", "backward": "#eceff3", "recompute": "#dde3ea"}
_BINS = 80
_MODULES = 16


def plot_trace(report: TraceRecords) -> Figure:
    """Plots both: the dtypes over time above, the bytes of casts by module below.

    Args:
        report: The report.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    modules = min(_MODULES, max(1, sum(bool(group.bytes) for group in report.by_module())))
    figure = new_figure((9.0, 3.6 + 0.6 + 0.27 * modules))
    above, below = figure.subplots(2, 1, height_ratios=[3.0, 0.6 + 0.27 * modules])
    plot_dtypes(report, above)
    plot_casts(report, below)
    return figure


def plot_dtypes(report: TraceRecords, axes: Axes | None = None) -> Figure:
    """Plots the share of calls by the dtype of their results over time. Backward and recomputation are shaded.

    Args:
        report: The report. Calls that it does not store individually are not in the plot.
        axes: The axes to draw on. Default: a new figure.

    Returns:
        The figure.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    axes = new_figure((9.0, 3.4)).subplots() if axes is None else axes
    calls = sorted(report.calls, key=lambda call: call.start)
    decorate(axes, "Dtypes of results over time")
    if not calls:
        return write_empty(axes, "no call was recorded")
    first = calls[0].start
    span = max(call.start for call in calls) - first or 1
    names = list(result_dtypes(report.total.dtypes))
    shares = {name: [0.0] * _BINS for name in names}
    for call in calls:
        shares[result_dtype(call.dtypes)][min(_BINS - 1, (call.start - first) * _BINS // span)] += 1
    sums = [sum(parts) for parts in zip(*shares.values(), strict=True)]
    edges = [index * span / _BINS / 1e6 for index in range(_BINS + 1)]
    bottom = [0.0] * _BINS
    for name, parts in shares.items():
        heights = [100 * part / whole if whole else 0.0 for part, whole in zip(parts, sums, strict=True)]
        color = _COMPLEX if "complex" in name else _COLORS[name]
        axes.bar(edges[:-1], heights, span / _BINS / 1e6, bottom, align="edge", color=color, label=name, linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _shade_phases(axes, calls, first)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, 112)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"], fontsize=8, color=INK)
    axes.set_xlabel("milliseconds since the first call, on the host", fontsize=8.5, color=INK)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=8, labelcolor=INK, handlelength=1.0
    )
    return figure_of(axes)


def _shade_phases(axes: Axes, calls: list[Call], first: int) -> None:
    """Shades the area above the bars by phase, with a span for each run of calls of one phase."""
    runs = [(phase, list(run)) for phase, run in groupby(calls, key=lambda call: call.phase)]
    ends = [run[0].start for _, run in runs[1:]] + [calls[-1].start]
    whole = ends[-1] - first or 1
    for (phase, run), end in zip(runs, ends, strict=True):
        left, right = (run[0].start - first) / 1e6, (end - first) / 1e6
        axes.axvspan(left, right, color=_PHASES[phase], zorder=0, linewidth=0)
        if (end - run[0].start) / whole > 0.08:
            axes.text((left + right) / 2, 106, phase, ha="center", va="center", fontsize=8, color=INK)
        if left:
            axes.axvline(left, color=INK, linewidth=0.7, alpha=0.5)


def plot_casts(report: TraceRecords, axes: Axes | None = None) -> Figure:
    """Plots the bytes of the casts made, for the modules with most bytes.

    Args:
        report: The report.
        axes: The axes to draw on. Default: a new figure.

    Returns:
        The figure.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    groups = [group for group in report.by_module() if group.bytes]
    shown = groups[:_MODULES]
    axes = new_figure((9.0, 0.9 + 0.27 * max(1, len(shown)))).subplots() if axes is None else axes
    left_out = f", the first {len(shown)} of {count(len(groups), 'module')}" if len(groups) > len(shown) else ""
    decorate(axes, f"Bytes of casts by module{left_out}")
    if not shown:
        return write_empty(axes, "no casts were made")
    rows = range(len(shown))
    again = [group.repeated_bytes for group in shown]
    once = [group.bytes - group.repeated_bytes for group in shown]
    axes.barh(rows, once, height=0.62, color=_COLORS["float32"], label="made once")
    axes.barh(rows, again, height=0.62, left=once, color=_COLORS["bfloat16"], label="repeated")
    for row, group in enumerate(shown):
        place = (group.bytes, row)
        axes.annotate(size(group.bytes), place, (5, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    labels = [label_of(group.key) or "(outside of modules)" for group in shown]
    axes.set_yticks(rows, labels, fontsize=8, color=INK)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * max(group.bytes for group in shown))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if any(again):
        axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK, handlelength=1.0)
    return figure_of(axes)
