"""The report of `compare`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch_promote.numerics.comparing.comparison_data import (
    FORMAT,
    VERSION,
    comparison_to_dict,
    fields_from_dict,
)
from torch_promote.numerics.comparing.comparison_page import embed_comparison, make_comparison_page
from torch_promote.numerics.comparing.comparison_plot import plot_comparison
from torch_promote.numerics.comparing.comparison_records import ComparisonRecords, GradientError, Metric
from torch_promote.numerics.comparing.comparison_text import comparison_text
from torch_promote.observe.findings import count
from torch_promote.observe.pages import read_json, save_as, to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "GradientError", "Metric"]


class Comparison(ComparisonRecords):
    """The report of `compare`. `ComparisonRecords` describes its attributes.

    `str` returns a summary of 80 columns; a notebook displays the page.
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as JSON-compatible values. Infinite numbers and NaN are strings: "inf", "nan".

        `save("NAME.json")` writes them, and `load` reads that file.
        """
        return comparison_to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Comparison:
        """Returns the comparison whose `to_dict` returned the data.

        Raises:
            KeyError, TypeError, PolicyError: The data is incomplete or was changed.
        """
        return cls(**fields_from_dict(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the comparison as a page or as data, depending on the file extension.

        Args:
            path: The file: "run.html", a page that needs no network, or "run.json", which `load` reads.

        Raises:
            OptionError: The name has another ending, or the file cannot be written (for example because its folder does
                not exist). It is a ValueError. An existing file is then unchanged.
            MissingPackageError: A page needs jinja2, which is not installed. It is an ImportError.

        Example:
            >>> import tempfile, torch, torch_promote as tp
            >>> model = torch.nn.Linear(4, 1)
            >>> def step():
            ...     with tp.my_autocast("cpu"):
            ...         return model(torch.ones(2, 4)).sum()
            >>> comparison = tp.compare(step, model=model)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     comparison.save(f"{folder}/run.json")
            ...     Comparison.load(f"{folder}/run.json").sites == comparison.sites
            True
        """
        formats = {".html": lambda: make_comparison_page(self), ".json": lambda: to_json(self.to_dict())}
        save_as(path, "the comparison", formats, {".html": "a page", ".json": "to read it again"})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """Reads a comparison that `save` wrote as .json.

        Args:
            path: The file.

        Raises:
            OptionError: The file cannot be read, is not a comparison, or was written by an incompatible version. It is
                a ValueError.
        """
        loaded: Comparison = read_json(path, "comparison", FORMAT, VERSION, cls.from_dict)
        return loaded

    def plot(self) -> Figure:
        """Plots the errors and the impact of each module as heat: the modules with the largest impact.

        Returns:
            A matplotlib figure, which a notebook displays.

        Raises:
            MissingPackageError: matplotlib is not installed. It is an ImportError.
        """
        return plot_comparison(self)

    def __str__(self) -> str:
        return comparison_text(self)

    def __repr__(self) -> str:
        return f"<Comparison: {count(len(self.sites), 'site')}, {count(len(self.metrics), 'metric')}>"

    def _repr_html_(self) -> str:
        return embed_comparison(self, str(self))
