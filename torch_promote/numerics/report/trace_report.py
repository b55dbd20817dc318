"""`TraceReport`: the report of `trace`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from torch_promote.errors import OptionError
from torch_promote.numerics.records.trace_records import TraceRecords
from torch_promote.numerics.report.diff import TraceDiff, compare_traces
from torch_promote.numerics.report.explanation import Explanation, explain
from torch_promote.numerics.report.files import load, report_to_dict, save
from torch_promote.numerics.report.group_table import GroupTable
from torch_promote.numerics.report.page import embed_page
from torch_promote.numerics.report.plots import plot_trace
from torch_promote.numerics.report.summary import summarize
from torch_promote.numerics.report.unused import UnusedOverride, unused_overrides

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TraceReport"]


class TraceReport(TraceRecords):
    """The report of `trace`: its calls, their sums, and methods to query and save them.

    Its attributes `calls`, `dropped`, `device_names`, `torch_version`, `not_seen` and `steps`, and its tables
    `by_op()`, `by_module()`, `by_line()` and `casts()` are those of `TraceRecords`.
    """

    def by_op(self) -> GroupTable:
        """Returns the calls by op and overload, most cast bytes first: a list that prints as a table."""
        return GroupTable(super().by_op())

    def by_module(self) -> GroupTable:
        """Returns the calls by module, most cast bytes first: a list that prints as a table."""
        return GroupTable(super().by_module())

    def by_line(self) -> GroupTable:
        """Returns the calls by source line, most cast bytes first: a list that prints as a table."""
        return GroupTable(super().by_line())

    def explain(self, pattern: str) -> Explanation:
        """Explains the calls of a module, an op or a line: dtypes, casts, policies, and suggested changes.

        Args:
            pattern: A module's path ("blocks.3.attn"), an op ("softmax", "aten::softmax.int") or a line
                ("train.py:41").

        Raises:
            OptionError: Nothing in the trace matches. It is a ValueError.
        """
        return explain(self, pattern)

    def diff(self, other: TraceReport) -> TraceDiff:
        """Compares with another trace call by call, aligned by module, overload and running number.

        Args:
            other: The other trace, which ran later or under other policies. `TraceReport.load` reads one from a file.

        Raises:
            OptionError: `other` is not a report of `trace`. It is a ValueError.
        """
        if not isinstance(other, TraceReport):
            raise OptionError(
                f"diff() expects another report of trace(), got {other!r}. For a file, pass TraceReport.load(file)."
            )
        return compare_traces(self, other)

    def unused_overrides(self) -> list[UnusedOverride]:
        """Returns the overrides of regions and modules that no call in the block used, with their sources."""
        return unused_overrides(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-compatible values. `save("NAME.json")` writes them, and `load` reads that file."""
        return report_to_dict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the report. The extension selects the format: "run.html", "run.json", "run.csv", "run.trace.json".

        Args:
            path: The file. An .html file is a page; `load` and `torch-promote explain` read .json; .csv has a row for
                each call; .trace.json opens in Perfetto, next to a trace of torch.profiler.

        Raises:
            OptionError: The name has another ending, or the file cannot be written (for example because its folder does
                not exist). It is a ValueError. An existing file is then unchanged.
            MissingPackageError: A page needs jinja2, which is not installed. It is an ImportError.

        Example:
            >>> import tempfile, torch, torch_promote as tp
            >>> with tp.trace() as report, tp.my_autocast("cpu"):
            ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.save(f"{folder}/run.json")
            ...     TraceReport.load(f"{folder}/run.json").total == report.total
            True
        """
        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TraceReport:
        """Reads a report that `save` wrote as .json.

        Args:
            path: The file.

        Raises:
            OptionError: The file cannot be read, is not such a report, or was written by an incompatible version. It is
                a ValueError.
        """
        report = cls(max_calls=sys.maxsize)
        load(report, path)
        return report

    def plot(self) -> Figure:
        """Plots the dtypes over time, and the bytes of casts by module.

        Returns:
            A matplotlib figure, which a notebook displays.

        Raises:
            MissingPackageError: matplotlib is not installed. It is an ImportError.
        """
        return plot_trace(self)

    def __str__(self) -> str:
        return summarize(self)

    def __repr__(self) -> str:
        return f"<TraceReport: {self.total.calls:,} calls, {self.total.casts:,} casts>"

    def _repr_html_(self) -> str:
        return embed_page(self)
