"""The plot of a comparison for a notebook: the errors and the impact of modules, as heat."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_promote.numerics.comparing.comparison_records import ComparisonRecords
from torch_promote.numerics.comparing.heat import MEASURES, module_heats
from torch_promote.observe.findings import count
from torch_promote.observe.pages import INK, decorate, figure_of, label_of, new_figure, spell_number, write_empty

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_comparison"]

_MODULES = 24
_DECADES = 6.0


def plot_comparison(comparison: ComparisonRecords, axes: Axes | None = None) -> Figure:
    """Plots the modules with the largest impact: a row for each, and a column for each measure.

    Each column has its own logarithmic colour scale, and the cells contain the numbers.

    Args:
        comparison: The comparison.
        axes: The axes to draw on. Default: a new figure.

    Returns:
        The figure.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    found = module_heats(comparison.sites)
    modules = dict(list(found.items())[:_MODULES])
    if axes is None:
        axes = new_figure((7.0, 0.9 + 0.27 * max(1, len(modules)))).subplots()
    left_out = f", the first {len(modules)} of {count(len(found), 'module')}" if len(found) > len(modules) else ""
    decorate(axes, f"Errors and impact by module{left_out}")
    axes.spines["bottom"].set_visible(False)
    if not modules:
        return write_empty(axes, "no op was compared")
    columns = [[getattr(heats, measure) for heats in modules.values()] for measure in MEASURES]
    shares = [_shares(column) for column in columns]
    rows = range(len(modules))
    axes.imshow([[column[row] for column in shares] for row in rows], cmap="YlOrRd", vmin=0, vmax=1.15, aspect="auto")
    for number, column in enumerate(columns):
        for row in rows:
            ink = "white" if shares[number][row] > 0.8 else INK
            axes.text(number, row, spell_number(column[row]), ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(len(MEASURES)), ["local error", "accumulated error", "impact"], fontsize=8.5, color=INK)
    axes.set_yticks(rows, [label_of(path) or "(the model itself)" for path in modules], fontsize=8, color=INK)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    return figure_of(axes)


def _shares(values: list[float | None]) -> list[float]:
    """The position of each value between the smallest and the largest, on a logarithmic scale; 0 for no value."""
    finite = [math.log10(value) for value in values if value and math.isfinite(value)]
    top = max(finite, default=0.0)
    low = max(min(finite, default=0.0), top - _DECADES) - 0.3
    return [
        0.0 if not value else 1.0 if not math.isfinite(value) else max(0.0, (math.log10(value) - low) / (top - low))
        for value in values
    ]
