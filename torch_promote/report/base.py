"""`Report`, the base class of all reports, and the records of which a report's content consists.

A report returns its `Content` once. terminal.py (rich), page.py (Jinja2) and plot.py (matplotlib) render it; they are
imported when they are used, and MissingPackageError is raised here if jinja2 or matplotlib is not installed.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from torch_promote.errors import MissingPackageError, OptionError, check_path
from torch_promote.policy.files import write_atomically
from torch_promote.report.codec import WRONG_DATA, decode_fields, encode, place_of, refuse_constant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell: TypeAlias = str | float | int | Sequence[str] | Mapping[str, int] | None
"""A value of a table. Of several texts, the terminal shows the first and how many there are; of a mapping, which counts
texts, the most frequent. The page shows all of them."""

Fact: TypeAlias = tuple[str, str] | tuple[str, str, str]
"""A number with its name, and optionally a remark: ("casts", "12", "3 more from a cache")."""

Where: TypeAlias = Literal["all", "terminal", "page"]
"""The renderers that show a part or a column. "terminal" includes `str(report)`."""

Kind: TypeAlias = Literal[
    "", "text", "name", "code", "dtypes", "policy", "line", "count", "bytes", "number", "percent", "ms"
]
NUMERIC = ("count", "bytes", "number", "percent", "ms")


@dataclass(frozen=True)
class Column:
    """A column of a table. A column without any value is not shown.

    The kind says how its values are written. "text"; "name": an op, a module or a parameter; "code"; "dtypes":
    "float32 -> bfloat16"; "policy": "fp32: region at train.py:41"; "line": "/path/train.py:41"; "count": an int;
    "bytes"; "number": an error, with two digits; "percent": a share from 0 to 1; "ms": milliseconds. The last five are
    aligned to the right. "" chooses "count", "number" or "text" by the values.
    """

    name: str
    kind: Kind = ""
    where: Where = "all"


@dataclass(frozen=True)
class Table:
    """A table. Without rows, it is not shown."""

    title: str
    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Cell]]
    most: int = 10  # how many rows the terminal shows; the page shows all, sortable
    note: str = ""  # for the page
    where: Where = "all"


@dataclass(frozen=True)
class Listing:
    """A list of sentences. Without any, it is not shown."""

    title: str
    lines: Sequence[str]
    most: int = 10  # how many of them the terminal shows
    where: Where = "all"
    wrap: bool = True  # False for lines that people search or copy, such as file names


@dataclass(frozen=True)
class Code:
    """A text to copy, such as a policy file."""

    title: str
    text: str
    note: str = ""
    where: Where = "page"


@dataclass(frozen=True)
class Series:
    """The values of one name in a chart."""

    name: str
    y: Sequence[float]
    x: Sequence[float] = ()  # the positions of the values; empty for charts whose rows have labels
    color: str = "ink"  # a dtype's name, "passed", "failed" or "ink"
    mark: Literal["o", "x", "line", "steps"] = "o"  # how a scatter chart draws it: points "o" or "x", a line, or steps
    note: str = ""  # shown by a histogram next to the name
    scale: tuple[float, float] | None = None  # the ends of the scale of colours in a heat chart: see `heat_shares`


@dataclass(frozen=True)
class Chart:
    """A chart, which matplotlib draws: for `Report.plot()` if it is for "all", and as an inline SVG image in the page.

    "scatter": points and lines. "bars": a horizontal bar for each label, of one part for each series. "stacked": the
    shares of the series over x, which are the left edges of equal intervals. "heat": a row for each label and a column
    for each series, coloured on a logarithmic scale. "histograms": a panel for each series, with bars of width 1 at x.

    The scale "count" is logarithmic above 1, with 0. On a logarithmic axis, infinite values are drawn at the upper end,
    zeros at the lower.
    """

    title: str
    kind: Literal["scatter", "bars", "stacked", "heat", "histograms"]
    series: Sequence[Series]
    labels: Sequence[str] = ()  # of the rows of "bars" and "heat"
    x_label: str = ""
    y_label: str = ""
    x_scale: Literal["linear", "log", "count"] = "linear"
    y_scale: Literal["linear", "log", "count"] = "linear"
    unit: Kind = "number"  # of the values of "bars"
    lines: Sequence[tuple[str, float]] = ()  # horizontal lines, as (name, y)
    # Shaded intervals of x, as (name, start, end). Those of a histogram have the name of a dtype.
    spans: Sequence[tuple[str, float, float]] = ()
    note: str = ""  # for the page
    where: Where = "all"


@dataclass(frozen=True)
class Branch:
    """A module in a tree. `tag` is a mark such as "float32 island", `note` a remark on it."""

    path: str  # "blocks.0.attn"; "" as in `module_name`
    cells: Sequence[Cell]  # one for each column of the tree
    # For each view of the tree, the parts of its bar with their widths: {"float32": 3, "bfloat16": 7}, or {"heat": 0.4}
    # for a bar whose length and colour show a position of `heat_shares`.
    bars: Sequence[Mapping[str, float]]
    tag: str = ""
    note: str = ""


@dataclass(frozen=True)
class Tree:
    """The modules of a model with a bar for each, in order, for the page; parents without a branch get one."""

    title: str
    columns: Sequence[Column]  # after the bar
    branches: Sequence[Branch]
    views: Sequence[str] = ("dtypes",)  # the names of the bars; with several, the page has a switch
    note: str = ""
    where: Where = "page"


@dataclass(frozen=True)
class Sides:
    """Two lists side by side, with lines between rows that belong together, for the page."""

    title: str
    names: tuple[str, str]
    rows: tuple[Sequence[tuple[str, ...]], Sequence[tuple[str, ...]]]  # the texts of each row
    links: Sequence[tuple[int, int, str]]  # pairs of rows, with a kind: "same", "reordered", "wrong"
    wrong: tuple[Sequence[int], Sequence[int]]  # the rows to mark
    note: str = ""
    where: Where = "page"


Part: TypeAlias = Table | Listing | Code | Chart | Tree | Sides


@dataclass(frozen=True)
class Content:
    """All that a report says."""

    title: str  # what it is, and of what: "trace: torch 2.13.0, 2 optimizer steps"
    verdict: str  # the result, in a sentence or two
    facts: Sequence[Fact] = ()  # its most important numbers
    parts: Sequence[Part] = ()  # most important first
    good: bool | None = None  # whether the verdict is good, for its colour; None: neither

    def parts_for(self, where: Where) -> list[Part]:
        """Returns the parts that a renderer shows."""
        return [part for part in self.parts if part.where in ("all", where)]


class Report:
    """Base class of reports. A subclass defines `content` and the class attributes; the base has all formats.

    `print(report)` writes plain text of 100 columns; `rich.print(report)` adapts to the terminal and has colours; a
    notebook shows the page.
    """

    NOUN: ClassVar[str] = "report"  # what errors call it
    FORMAT: ClassVar[str] = "torch_promote report"  # in its JSON, with the version
    VERSION: ClassVar[int] = 1
    NOT_LOADED: ClassVar[str] = ""  # why `load` reads no such report, with "{path}" for the file; "" if it does

    def content(self) -> Content:
        """Returns all that the report says to people."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-compatible values. `save("NAME.json")` writes them, and `load` reads them.

        Infinite numbers and NaN become strings: "inf", "nan".
        """
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses or override this
        data = {field.name: encode(getattr(self, field.name)) for field in fields}
        return {"format": self.FORMAT, "version": self.VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the report whose `to_dict` returned the data.

        Raises:
            KeyError, TypeError, ValueError: The data is incomplete or was changed.
        """
        report: Self = decode_fields(cls, data)
        return report

    def formats(self) -> dict[str, tuple[str, Callable[[], str]]]:
        """Returns the formats of `save`: the purpose of each, and a function that makes the text of the file."""
        return {
            ".html": ("a page", lambda: str(load_renderer("page").render(self.content()))),
            ".json": ("to read it again", lambda: to_json(self.to_dict())),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the report. The file extension selects the format: ".html" (a page), ".json" (`load` reads it), ...

        Args:
            path: The file.

        Raises:
            OptionError: The extension is unknown, or the file cannot be written (for example because its folder does
                not exist). It is a ValueError. An existing file is then unchanged.
            MissingPackageError: A page needs jinja2 and matplotlib, and one is not installed. It is an ImportError.
        """
        target, formats = Path(check_path("path", path)), self.formats()
        make = next((make for end, (_, make) in formats.items() if target.name.lower().endswith(end)), None)
        cannot = f"cannot save the {self.NOUN} as {str(target)!r}:"
        if make is None:
            legal = ", ".join(f"{end} ({purpose})" for end, (purpose, _) in formats.items())
            raise OptionError(f"{cannot} the file extension selects the format. Legal: {legal}.")
        if target.is_dir():
            raise OptionError(f"{cannot} it is a folder. Name a file in it.")
        if not target.parent.is_dir():
            raise OptionError(f"{cannot} there is no folder {str(target.parent)!r}. Create it first.")
        text = make()
        try:
            write_atomically(target, text, errors="backslashreplace")
        except OSError as error:
            raise OptionError(f"{cannot} {error.strerror or error}.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a report that `save` wrote as .json.

        Args:
            path: The file.

        Raises:
            OptionError: The file cannot be read, is not such a report, or was written by an incompatible version. It is
                a ValueError.
        """
        if cls.NOT_LOADED:
            raise OptionError(cls.NOT_LOADED.format(path=repr(os.fspath(path))))
        cannot = f"cannot read the {cls.NOUN} {os.fspath(path)!r}:"
        saved = 'Pass a file that report.save("NAME.json") wrote.'
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse_constant)
        except OSError as error:
            raise OptionError(f"{cannot} {error.strerror or error}. {saved}") from error
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{cannot} it is not JSON ({error}). {saved}") from error
        found = data.get("format") if isinstance(data, dict) else None
        if found != cls.FORMAT:
            raise OptionError(f'{cannot} its "format" is {found!r}, not {cls.FORMAT!r}. {saved}')
        if data.get("version") != cls.VERSION:
            raise OptionError(
                f"{cannot} its version is {data.get('version')!r}, and this torch_promote reads version {cls.VERSION}. "
                "Read it with the torch_promote that wrote it, or create it again."
            )
        try:
            return cls.from_dict(data)
        except WRONG_DATA as error:
            at = place_of(error)
            broken = f"it is incomplete or was changed ({type(error).__name__}: {error}{f', at {at}' if at else ''})"
            raise OptionError(f"{cannot} {broken}. {saved}") from error

    def plot(self) -> Figure:
        """Plots the report's charts.

        Returns:
            A matplotlib figure, which a notebook displays.

        Raises:
            MissingPackageError: matplotlib is not installed. It is an ImportError.
        """
        charts = [part for part in self.content().parts if isinstance(part, Chart) and part.where == "all"]
        figure: Figure = load_renderer("plot").draw(charts)
        return figure

    def text(self, width: int | None = 100) -> str:
        """Returns the report as plain text.

        Args:
            width: The width of a line, in characters. Longer names are wrapped. None: nothing is wrapped.
        """
        return str(load_renderer("terminal").to_text(self.content(), width))

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> Any:
        return load_renderer("terminal").render(self.content())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.content().verdict}>"

    def _repr_html_(self) -> str:
        content = self.content()
        try:
            return str(load_renderer("page").render_frame(content))
        except MissingPackageError:
            return f"<pre>{html.escape(str(self))}</pre>"


def load_renderer(name: Literal["terminal", "page", "plot"]) -> Any:
    """Imports the module of a renderer. Raises MissingPackageError if its package is not installed."""
    try:
        return importlib.import_module(f"torch_promote.report.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "matplotlib"):
            raise
        what = {"page": "the page of a report", "plot": "the plot of a report"}[name]
        raise MissingPackageError(
            f"{what} needs jinja2 and matplotlib, and {error.name} is not installed: pip install "
            "'torch-promote[trace]'. The text and the other formats work without them."
        ) from error


def to_json(data: Any) -> str:
    """Returns the text of a JSON file, in one line."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def visible_columns(table: Table, where: Where) -> list[tuple[int, str, Kind]]:
    """Returns the columns that a renderer shows, as (index, name, kind)."""
    found: list[tuple[int, str, Kind]] = []
    for index, one in enumerate(table.columns):
        column = Column(one) if isinstance(one, str) else one
        values = [row[index] for row in table.rows if row[index] not in (None, "", {}, (), [])]
        if values and column.where in ("all", where):
            found.append((index, column.name, column.kind or _kind_of(values)))
    return found


def table_html(table: Table) -> str:
    """Returns a table as HTML for a notebook, which has styles of its own."""
    columns = visible_columns(table, "page")
    # Notebooks align cells to the right.
    styles = ["" if kind in NUMERIC else ' style="text-align:left"' for _, _, kind in columns]
    names = "".join(f"<th{style}>{html.escape(name)}</th>" for style, (_, name, _) in zip(styles, columns, strict=True))
    lines = [[html.escape(spell(row[index], kind)) for index, _, kind in columns] for row in table.rows[: table.most]]
    cells = ("".join(f"<td{style}>{cell}</td>" for style, cell in zip(styles, line, strict=True)) for line in lines)
    rows = "".join(f"<tr>{line}</tr>" for line in cells)
    more = len(table.rows) - table.most
    left_out = f"<p>... {more:,} more</p>" if more > 0 else ""
    return f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>{left_out}"


def _kind_of(values: Sequence[Cell]) -> Kind:
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return "text"
    return "count" if all(isinstance(value, int) for value in values) else "number"


def texts_of(cell: Cell) -> list[tuple[str, int]]:
    """Returns the texts of a cell with their counts, most frequent first. A text that is not counted has 0."""
    if isinstance(cell, Mapping):
        return sorted(cell.items(), key=lambda item: -item[1])
    if isinstance(cell, list | tuple):
        return [(text, 0) for text in cell]
    return [] if cell is None or cell == "" else [(str(cell), 0)]


def spell(value: Cell, kind: Kind) -> str:
    """Returns a value as text; "" for None."""
    if value is None:
        return ""
    if isinstance(value, Mapping | list | tuple):
        texts = texts_of(value)
        more = f"; {len(texts) - 1} more" if len(texts) > 1 else ""
        return f"{spell(texts[0][0], kind)}{more}" if texts else ""
    if not isinstance(value, float | int):
        return _SPELL_TEXT[kind](str(value)) if kind in _SPELL_TEXT else str(value)
    return _SPELL_NUMBER.get(kind, str)(value)


def size(number: float) -> str:
    """Spells a number of bytes."""
    units = ["B", "KiB", "MiB", "GiB"]
    power = min(max(0, int(number).bit_length() - 1) // 10, len(units) - 1)
    number /= 1024**power
    spelt = f"{number:.1f}".removesuffix(".0") if number < 10 else f"{number:,.0f}"
    return f"{spelt} {units[power]}"


def percent(part: float, whole: float = 1.0) -> str:
    """Spells a share: "0.4 %", "27 %"."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.05:
        return "< 0.1 %"
    return f"{share:.1f}".removesuffix(".0") + " %" if share < 9.95 else f"{share:.0f} %"


def spell_number(value: float | None) -> str:
    """Spells an error with two digits; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{'-' if power[0] == '-' else '+'}{power[1:].lstrip('0')}"


_DECADES = 6.0
#: The position of infinity on the scale of heat, which ends at 1.
_INFINITE_HEAT = 1.5


def heat_shares(values: Sequence[float], scale: tuple[float, float] | None = None) -> list[float]:
    """Returns the positions of values on a logarithmic scale from 0.05 to 1; 0 for zeros and NaN, 1.5 for infinity."""
    powers = [math.log10(value) for value in scale or values if 0 < value < math.inf]
    top = max(powers, default=0.0)
    low = max(min(powers, default=0.0), top - _DECADES)

    def share(value: float) -> float:
        if not value > 0:
            return 0.0
        if value == math.inf:
            return _INFINITE_HEAT
        if top == low:
            return 1.0
        return 0.05 + 0.95 * min(1.0, max(0.0, (math.log10(value) - low) / (top - low)))

    return [share(value) for value in values]


def module_name(path: str) -> str:
    """Returns the name of a module in reports: "(model)" for "", the model itself and what is outside of modules."""
    return path or "(model)"


def ancestors(path: str) -> list[str]:
    """Returns the paths of the modules that a module is in, and its own: "a.b" is in "" and "a"."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def some_of(texts: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """Returns the first texts, and how many more there are: "a, b, and 3 more"."""
    shown = list(texts)
    return separator.join(shown[:most]) + f", and {len(shown) - most:,} more" * (len(shown) > most)


def short_line(line: str) -> str:
    """Returns a source line without its folders: "train.py:41"."""
    return line.replace("\\", "/").rpartition("/")[2]


def _short_dtypes(text: str) -> str:
    """Returns the floating dtypes of "float32, int64 -> bfloat16, int64 -> bfloat16" by their short names."""
    parts = []
    for part in text.split(" -> "):
        names = part.split(", ")
        floating = [name for name in names if "float" in name or "complex" in name] or names
        parts.append(_FLOATING.sub(lambda name: _SHORT_DTYPES[name[0]], ", ".join(floating)))
    return " -> ".join(parts[:1] + parts[2:] if len(parts) == 3 and parts[1] == parts[2].partition(";")[0] else parts)


def _short_policy(text: str) -> str:
    """Returns a policy, and its source unless that is PyTorch's table: "fp32 (region at train.py:41)"."""
    policy, _, source = text.partition(": ")
    head, at, place = source.rpartition(" at ")
    source = f"{head}{at}{short_line(place)}" if "region" in head else source
    return f"{policy} ({source})" if source not in ("", "PyTorch's table") else policy


_FLOATING = re.compile(r"\b(?:b?float16|float32|float64)\b")
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_SPELL_TEXT: dict[Kind, Callable[[str], str]] = {
    "dtypes": _short_dtypes,
    "policy": _short_policy,
    "line": short_line,
    "name": lambda text: text.removeprefix("aten::"),
}
_SPELL_NUMBER: dict[Kind, Callable[[float], str]] = {
    "count": lambda value: f"{value:,}",
    "bytes": size,
    "number": spell_number,
    "percent": percent,
    "ms": lambda value: f"{value:.2f}",
}
