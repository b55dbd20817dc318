"""Reports as text: for a terminal, with rich's colours, and for `str`, plain."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torch_promote.errors import printable
from torch_promote.report.base import NUMERIC, Code, Content, Kind, Listing, Part, Table, spell, visible_columns

_UNLIMITED = 100_000
#: Only names that are longer break within a table.
_LONG_NAME = 30
_GAP = 2
_STYLES: dict[Kind, str] = {"name": "bold", "dtypes": "cyan"}
_VERDICT = {True: "bold green", False: "bold red", None: "bold"}


def render(content: Content) -> RenderableType:
    """Returns a report as something that rich prints, as wide as the console."""
    return Group(*_blocks(content))


def to_text(content: Content | Table, width: int | None = 100) -> str:
    """Returns a report, or a table of one, as plain text. Long names are wrapped; if the width is None, nothing is."""
    text = io.StringIO()
    # In a notebook, rich would show the text instead of writing it.
    console = Console(
        file=text, width=width or _UNLIMITED, color_system=None, legacy_windows=False, force_jupyter=False
    )
    shown = _table(content) if isinstance(content, Table) else _blocks(content, plain=True)
    console.print(Group(*shown), crop=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _text(text: str, style: str = "", **options: Any) -> Text:
    """A text without markup and control characters: names of modules and files may contain anything."""
    return Text(printable(text), style, **options)


def _blocks(content: Content, plain: bool = False) -> Iterator[RenderableType]:
    yield _text(content.title, "dim")
    yield _Folded(content.verdict, _VERDICT[content.good])
    if content.facts:
        grid = table.Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        for name, value, *note in content.facts:
            grid.add_row(_text(name), _Folded(f"{value} ({note[0]})" if note and note[0] else value))
        yield Text()
        yield grid
    for part in content.parts_for("terminal"):
        lines = list(_part(part, plain))
        if lines:
            yield Text()
            yield from lines


def _part(part: Part, plain: bool) -> Iterator[RenderableType]:
    if isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, Listing) and part.lines:
        yield from _title(part.title)
        for line in part.lines[: part.most]:
            if plain and not part.wrap:
                yield _text(textwrap.indent(line, "  "), no_wrap=True, overflow="ignore")
            else:
                yield Padding(_Folded(line), (0, 0, 0, 2)) if part.title else _Folded(line)
        yield from _left_out(len(part.lines) - part.most)
    elif isinstance(part, Code):
        yield from _title(part.title)
        yield Padding(_Folded(part.text), (0, 0, 0, 2))


def _table(shown: Table) -> Iterator[RenderableType]:
    columns = visible_columns(shown, "terminal")
    if not columns:
        return
    yield from _title(shown.title)
    rows = [[spell(row[index], kind) or "-" for index, _, kind in columns] for row in shown.rows[: shown.most]]
    names = [printable(name) for _, name, _ in columns]
    styles = [[_STYLES.get(kind, "") for _, _, kind in columns]] * len(rows)
    yield Grid(names, [list(map(printable, row)) for row in rows], styles, [kind in NUMERIC for _, _, kind in columns])
    yield from _left_out(len(shown.rows) - shown.most)


@dataclass
class Grid:
    """A table as wide as the console, with whole words: see `_fit`; if it is too narrow, a text for each row."""

    names: Sequence[str]  # of the columns; all empty for a table without a header
    rows: Sequence[Sequence[str]]
    styles: Sequence[Sequence[str]]  # of the cells
    right: Sequence[bool]  # whether a column is aligned to the right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = list(zip(self.names, *self.rows, strict=True))
        widths = _fit(columns, options.max_width - _GAP * (len(columns) - 1))
        if widths is None:
            yield from self._records(options.max_width)
            return
        shown = table.Table(
            box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_header=any(self.names)
        )
        for name, width, right in zip(self.names, widths, self.right, strict=True):
            shown.add_column(Text(_wrapped(name, width)), width=width, justify="right" if right else "left")
        for row, styles in zip(self.rows, self.styles, strict=True):
            texts = zip(row, widths, styles, strict=True)
            shown.add_row(*(Text(_wrapped(text, width), style) for text, width, style in texts))
        yield shown

    def _records(self, width: int) -> Iterator[RenderableType]:
        said = ""
        for row, styles in zip(self.rows, self.styles, strict=True):
            first, *values = zip(self.names, row, styles, strict=True)
            if first[1] not in ("", said):  # else it is one more line of that name
                said = first[1]
                yield _Folded(" ".join(filter(None, first[:2])), first[2] or "bold")
            shown = [(name, _wrapped(text, width - 2), style) for name, text, style in values if text != "-"]
            texts = [Text.assemble(f"{name} ", (text, style)) for name, text, style in shown]
            yield Padding(Text("; ").join(texts), (0, 0, 0, 2))


@dataclass
class _Folded:
    """A text as wide as its place, in which words longer than a line break after separators."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(_wrapped(printable(self.text), options.max_width), self.style)


def _fit(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Returns the widths of columns of texts, which break between words, then in names; None if there is no room."""
    widths = [max(cell_len(line) for text in texts for line in text.split("\n")) for texts in columns]
    for parts in (_words, _parts):
        least = [max((cell_len(part) for text in texts for part in parts(text)), default=0) for texts in columns]
        if sum(least) > room and parts is _words:
            continue
        while sum(widths) > room and widths != least:
            widest = max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))
            widths[widest] -= 1
    return widths if sum(widths) <= room else None


def _words(text: str) -> list[str]:
    """The words of a text, of which a dtype and what it becomes are one: "fp32 -> fp16"."""
    return re.findall(r"\S+ -> \S+|\S+", text)


def _parts(text: str) -> list[str]:
    """The parts of the words of a text: those of long paths and lists, and other words as they are."""
    return [
        part
        for word in _words(text)
        for part in (re.findall(r"[^./,]*[./,]*", word) if cell_len(word) > _LONG_NAME else [word])
    ]


def _pieces(word: str, width: int) -> Iterator[str]:
    """The parts of a word that is longer than a line; those that are too long themselves break after "_" and "::"."""
    for part in _parts(word):
        yield from re.findall(r"(?:(?!_|::).)*(?:_|::)*", part) if cell_len(part) > width else [part]


def _wrapped(text: str, width: int) -> str:
    """Breaks the words of a text that are longer than a line; rich breaks between words."""
    lines: list[str] = []
    for given in text.split("\n"):
        lines.append("")
        for word in re.split("( )", given):
            for part in _pieces(word, width) if cell_len(word) > width else [word]:
                if cell_len(word) > width and cell_len(lines[-1] + part) > width:
                    lines.append("")
                lines[-1] += part
    return "\n".join(line.rstrip(" ") for line in lines)


def _title(title: str) -> Iterator[RenderableType]:
    if title:
        yield _Folded(title, "bold")


def _left_out(number: int) -> Iterator[RenderableType]:
    if number > 0:
        yield _text(f"... {number:,} more", "dim")
