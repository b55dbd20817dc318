"""The report of `tune`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch_promote.numerics.tuning.tuning_data import FORMAT, VERSION, fields_from_dict, tuning_to_dict
from torch_promote.numerics.tuning.tuning_page import embed_tuning, make_tuning_page
from torch_promote.numerics.tuning.tuning_plot import plot_tuning
from torch_promote.numerics.tuning.tuning_records import Candidate, Certificate, Trial, TuningRecords
from torch_promote.numerics.tuning.tuning_text import tuning_text
from torch_promote.observe.findings import count
from torch_promote.observe.pages import read_json, save_as, to_json
from torch_promote.policy.files import to_toml

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Candidate", "Certificate", "Trial", "Tuning"]

_MEANINGS = {".toml": "the policy", ".html": "a page", ".json": "to read it again"}


class Tuning(TuningRecords):
    """The report of `tune`. `TuningRecords` describes its attributes.

    `str` returns a summary of 80 columns; a notebook displays the page.
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON-compatible values. Infinite numbers and NaN are strings: "inf", "nan".

        `save("NAME.json")` writes them, and `load` reads that file.
        """
        return tuning_to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tuning:
        """Returns the result from the data of `to_dict`.

        Raises:
            KeyError, TypeError, PolicyError: The data is incomplete or was changed.
        """
        return cls(**fields_from_dict(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the policy, or the report as a page or as data, depending on the file extension.

        Args:
            path: The file: "mine.toml", which `Policy.load` and `my_autocast(policy=...)` read; "run.html", a page that
                needs no network; "run.json", which `load` reads.

        Raises:
            OptionError: The name has another ending, or the file cannot be written (for example because its folder does
                not exist). It is a ValueError. An existing file is then unchanged.
            MissingPackageError: A page needs jinja2, which is not installed. It is an ImportError.
        """
        formats = {
            ".toml": lambda: to_toml(self.policy.to_dict()),
            ".html": lambda: make_tuning_page(self),
            ".json": lambda: to_json(self.to_dict()),
        }
        save_as(path, "the tuning", formats, _MEANINGS)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tuning:
        """Reads a result that `save` wrote as .json.

        Args:
            path: The file.

        Raises:
            OptionError: The file cannot be read, is not such a result, or was written by an incompatible version. It is
                a ValueError.
        """
        loaded: Tuning = read_json(path, "tuning", FORMAT, VERSION, cls.from_dict)
        return loaded

    def plot(self) -> Figure:
        """Plots the error of each trial against its number of overrides, and the best errors.

        Returns:
            A matplotlib figure, which a notebook displays.

        Raises:
            MissingPackageError: matplotlib is not installed. It is an ImportError.
        """
        return plot_tuning(self)

    def __str__(self) -> str:
        return tuning_text(self)

    def __repr__(self) -> str:
        met, runs = "met" if self.met else "not met", count(self.budget, "run")
        return f"<Tuning: {count(len(self.overrides), 'override')}, {met}, {self.runs:,} of {runs}>"

    def _repr_html_(self) -> str:
        return embed_tuning(self, str(self))
