"""Charts of reports, drawn by matplotlib: as one figure for `Report.plot()`, or each as an SVG image for the page.

The SVG images inherit the colours of the page: each colour of the palette is replaced by a CSS variable, and the colour
of texts and axes by `currentColor`, so they are readable in light and dark.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from torch_promote.errors import printable
from torch_promote.report.base import Chart, heat_shares, spell, spell_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Okabe and Ito's colour-blind safe palette, and the CSS variables of page.css.
_PALETTE = {
    "float64": ("#56b4e9", "--float64"),
    "float32": ("#0072b2", "--float32"),
    "bfloat16": ("#e69f00", "--bfloat16"),
    "float16": ("#d55e00", "--float16"),
    "float8": ("#cc79a7", "--float8"),
    "complex": ("#009e73", "--complex"),
    "other": ("#b4b8bf", "--other"),
    "passed": ("#0072b3", "--float32"),
    "failed": ("#d55e01", "--float16"),
    "hot": ("#c8321b", "--hot"),
    "infinite": ("#3b0f70", "--infinite"),
    "on colour": ("#fffffe", "--surface"),
    "ink": ("#1f2933", ""),
    "faint": ("#d9dee3", "--line"),
}
_INK, _FAINT = _PALETTE["ink"][0], _PALETTE["faint"][0]
#: Of a heat map: small values let the ground through, light or dark. Infinity has a colour of its own: the end of the
#: scale is the largest finite value.
_HEAT = LinearSegmentedColormap.from_list("heat", [(_PALETTE["hot"][0], 0.08), _PALETTE["hot"][0]]).with_extremes(
    over=_PALETTE["infinite"][0]
)
_MOST_ROWS, _MOST_PANELS, _LONGEST_LABEL, _MANY = 24, 40, 44, 60
#: In inches; an image in a page is narrower, so that its texts can be read on a phone.
_WIDTH, _PAGE_WIDTH, _ROW_HEIGHT = 7.7, 5.2, 0.26
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "font.size": 9, "axes.linewidth": 0.8, "text.parse_math": False}


class ReportFigure(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png", dpi=144)
        return image.getvalue()


def draw(charts: Sequence[Chart]) -> ReportFigure:
    """Draws charts below each other."""
    heights = [_height(chart) for chart in charts] or [1.0]
    figure = ReportFigure(figsize=(_WIDTH, sum(heights)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    with matplotlib.rc_context(_STYLE):
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, chart in zip(parts, charts, strict=False):
            _DRAWERS[chart.kind](part, chart)
    return figure


def to_svg(chart: Chart) -> str:
    """Returns a chart as an SVG image without a title that inherits the colours of the page."""
    figure, text = _figure_of_page(chart), io.StringIO()
    # The salt makes the ids of the image unique in its page, and the same in each run.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart.title}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser draws the texts, in fonts of its own
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in _PALETTE.values():
        svg = svg.replace(color, f"var({variable})" if variable else "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)


def _figure_of_page(chart: Chart) -> Figure:
    """Draws a chart as a page shows it: its title is a heading of the page."""
    figure = Figure(figsize=(_PAGE_WIDTH, _height(chart)), layout="constrained")
    with matplotlib.rc_context(_STYLE):
        _DRAWERS[chart.kind](figure, chart)
    for axes in figure.axes[: chart.kind != "histograms"]:
        axes.set_title("", loc="left")
    return figure


def color_of(name: str) -> str:
    """Returns the colour of a series."""
    return _PALETTE[name if name in _PALETTE else "complex" if "complex" in name else "other"][0]


def _height(chart: Chart) -> float:
    rows = min(_MOST_ROWS, max(1, len(chart.labels)))
    if chart.kind == "histograms":
        return 1.5 * max(1, math.ceil(min(len(chart.series), _MOST_PANELS) / 2))
    return {"bars": 0.7 + _ROW_HEIGHT * rows, "heat": 0.9 + _ROW_HEIGHT * rows, "stacked": 3.0}.get(chart.kind, 3.6)


def _axes(figure: Figure, chart: Chart) -> Axes:
    axes: Axes = figure.subplots()
    axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold", color=_INK)
    axes.set_xlabel(chart.x_label, color=_INK)
    axes.set_ylabel(chart.y_label, color=_INK)
    _decorate(axes)
    if not any(len(series.y) for series in chart.series):
        axes.text(0.5, 0.5, "no values", ha="center", va="center", transform=axes.transAxes, color=_INK)
        axes.set_xticks([])
        axes.set_yticks([])
    return axes


def _decorate(axes: Axes) -> None:
    axes.patch.set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8, width=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)


def _label(path: str, longest: int = _LONGEST_LABEL) -> str:
    path = printable(path)
    return path if len(path) <= longest else f"...{path[3 - longest :]}"


def _legend(figure: Figure, axes: Axes) -> None:
    """Names the series below the axes, where no point, bar or title is."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        style: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": _INK, "handlelength": 1.2}
        figure.legend(handles, names, loc="outside lower left", ncols=4, **style)


def _draw_bars(figure: Figure, chart: Chart) -> None:
    axes, count = _axes(figure, chart), min(_MOST_ROWS, len(chart.labels))
    rows, ends = range(count), [0.0] * count
    for series in chart.series if count else ():
        color = color_of(series.color)
        axes.barh(rows, series.y[:count], height=0.62, left=ends, color=color, label=series.name)
        ends = [end + value for end, value in zip(ends, series.y, strict=False)]
    if not count:
        return
    for row, end in enumerate(ends):
        text = spell(end, chart.unit)
        axes.annotate(text, (end, row), (5, 0), textcoords="offset points", va="center", fontsize=8, color=_INK)
    axes.set_yticks(rows, [_label(name) for name in chart.labels[:count]])
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xlim(0, 1.16 * (max(ends) or 1.0))
    axes.set_xticks([])
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if len(chart.series) > 1:
        _legend(figure, axes)


def _draw_stacked(figure: Figure, chart: Chart) -> None:
    axes = _axes(figure, chart)
    if not chart.series or len(chart.series[0].x) < 2:
        return
    edges = chart.series[0].x
    width = edges[1] - edges[0]
    wholes = [sum(parts) for parts in zip(*(series.y for series in chart.series), strict=True)]
    bottom = [0.0] * len(edges)
    for series in chart.series:
        shares = [100 * part / whole if whole else 0.0 for part, whole in zip(series.y, wholes, strict=True)]
        color = color_of(series.color)
        axes.bar(edges, shares, width, bottom, align="edge", color=color, ec=color, lw=0.3, label=series.name)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    end = edges[-1] + width
    for name, left, right in chart.spans:
        if left > edges[0]:
            axes.axvline(left, color=_INK, linewidth=0.7, alpha=0.5)
        if (right - left) / (end - edges[0]) > 0.08:
            axes.text((left + right) / 2, 106, name, ha="center", va="center", fontsize=8, color=_INK)
    axes.set_xlim(edges[0], end)
    axes.set_ylim(0, 112)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
    _legend(figure, axes)


def _draw_heat(figure: Figure, chart: Chart) -> None:
    axes, count = _axes(figure, chart), min(_MOST_ROWS, len(chart.labels))
    if not count:
        return
    shares = [heat_shares(series.y[:count], series.scale) for series in chart.series]
    image = [[column[row] for column in shares] for row in range(count)]
    axes.pcolormesh(image, cmap=_HEAT, vmin=0, vmax=1.15)  # infinity is beyond
    for number, series in enumerate(chart.series):
        for row in range(count):
            ink = _PALETTE["on colour"][0] if shares[number][row] > 0.6 else _INK
            text = spell_number(None if math.isnan(series.y[row]) else series.y[row])
            axes.text(number + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks([number + 0.5 for number in range(len(shares))], [series.name for series in chart.series])
    axes.set_yticks([row + 0.5 for row in range(count)], [_label(name) for name in chart.labels[:count]])
    axes.invert_yaxis()
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[["bottom", "left"]].set_visible(False)


def _draw_scatter(figure: Figure, chart: Chart) -> None:
    axes = _axes(figure, chart)
    xs = [x for series in chart.series for x in series.x]
    ys = [*(y for series in chart.series for y in series.y), *(y for _, y in chart.lines)]
    if not xs:
        return
    place_x, place_y = _scale(axes, "x", chart.x_scale, xs), _scale(axes, "y", chart.y_scale, ys)
    for series in chart.series:
        x, y, color = list(map(place_x, series.x)), list(map(place_y, series.y)), color_of(series.color)
        label = series.name or None
        if series.mark in ("steps", "line"):
            style: dict[str, Any] = {"drawstyle": "steps-post"} if series.mark == "steps" else {"linestyle": "--"}
            axes.plot(x, y, color=color, linewidth=1, alpha=0.6, label=label, **style)
        else:
            axes.scatter(
                x,
                y,
                28 if len(x) < _MANY else 9,
                color,
                marker=series.mark,
                linewidths=1.5,
                zorder=3,
                clip_on=False,
                label=label,
            )
    for name, height in chart.lines:
        axes.axhline(height, color=_INK, linewidth=0.9, linestyle="--", alpha=0.7)
        axes.annotate(
            name, (1, height), (0, 3), ("axes fraction", "data"), "offset points", ha="right", color=_INK, fontsize=8
        )
    if len(chart.series) > 1:
        _legend(figure, axes)


def _scale(axes: Axes, which: str, scale: str, values: Sequence[float]) -> Callable[[float], float]:
    """Sets the scale of an axis, and returns a function that moves values into its range."""
    set_scale: Any = axes.set_xscale if which == "x" else axes.set_yscale
    axis, limit = (axes.xaxis, axes.set_xlim) if which == "x" else (axes.yaxis, axes.set_ylim)
    if scale == "linear":
        return float
    if scale == "count":
        most = max(1.0, *values)
        set_scale("symlog", linthresh=1.0)
        ticks = [number for number in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if number <= most]
        axis.set_ticks(ticks, [f"{number:,}" for number in ticks])
        axis.set_ticks([], minor=True)
        limit(-0.2, most * 1.1)
        return float
    finite = [value for value in values if 0 < value < math.inf] or [1.0]
    low, high = max(min(finite) / 5, 1e-300), min(max(finite) * 5, 1e300)  # within the range that an axis can show
    set_scale("log")
    axis.set_major_formatter(lambda value, _: spell_number(value))
    axis.set_minor_formatter(NullFormatter())
    limit(low, high)
    return lambda value: min(max(value, low), high) if value == value else high


def _draw_histograms(figure: Figure, chart: Chart) -> None:
    shown = chart.series[:_MOST_PANELS]
    panels = figure.subplots(max(1, math.ceil(len(shown) / 2)), 2, sharex=True, squeeze=False).flatten()
    low = min((series.x[0] for series in shown if series.x), default=0.0)
    high = max((series.x[-1] + 1 for series in shown if series.x), default=1.0)
    for axes, series in zip(panels, shown, strict=False):
        for name, start, end in chart.spans:
            axes.axvspan(max(start, low), min(end, high), color=color_of(name), alpha=0.18, linewidth=0)
        counts = dict(zip(series.x, series.y, strict=True))
        edges = range(int(min(counts)), int(max(counts)) + 2)
        axes.stairs([counts.get(place, 0.0) for place in edges[:-1]], list(edges), fill=True, color=_INK)
        name = _label(spell(series.name, "name"), _LONGEST_LABEL - 14)
        axes.set_title(name, loc="left", fontsize=8, fontweight="bold", color=_INK, pad=14)
        axes.annotate(series.note, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=7, color=_INK)
        _decorate(axes)
        axes.spines["left"].set_visible(False)
        axes.set_yticks([])
        axes.set_xlim(low, high)
        axes.tick_params(labelsize=7, labelbottom=True)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)


_DRAWERS: dict[str, Callable[[Figure, Chart], None]] = {
    "bars": _draw_bars,
    "heat": _draw_heat,
    "histograms": _draw_histograms,
    "scatter": _draw_scatter,
    "stacked": _draw_stacked,
}
