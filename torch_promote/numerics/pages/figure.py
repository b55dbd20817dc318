"""Shared by the plots of reports: figures for notebooks, style, and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_promote.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FAINT", "INK", "decorate", "figure_of", "label_of", "new_figure", "write_empty"]

INK, FAINT = "#1f2933", "#d9dee3"
_LONGEST = 44


def new_figure(inches: tuple[float, float]) -> Figure:
    """Returns an empty figure that a notebook shows, without pyplot.

    Args:
        inches: Its width and height.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingPackageError("the plots of a report need matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=inches, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def figure_of(axes: Axes) -> Figure:
    """Returns the figure of the axes."""
    return axes.get_figure()  # type: ignore[return-value]  # a SubFigure, if the caller passed axes of one


def decorate(axes: Axes, title: str) -> None:
    """Sets the title and the common style of axes."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def write_empty(axes: Axes, text: str) -> Figure:
    """Writes a text into empty axes, and returns their figure."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=9, color=INK)
    axes.set_xticks([])
    axes.set_yticks([])
    return figure_of(axes)


def label_of(path: str) -> str:
    r"""Returns a module's path as a label, with dollar signs escaped: matplotlib would start a formula.

    Example:
        >>> label_of("blocks.$0"), len(label_of("x" * 100))
        ('blocks.\\$0', 44)
    """
    short = path if len(path) <= _LONGEST else f"...{path[3 - _LONGEST :]}"
    return short.replace("$", r"\$")
