"""Reports as text: for a terminal, with rich's colours, and for `str`, plain."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from typing import Any

from rich import table
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torch_promote.errors import printable
from torch_promote.report.base import NUMERIC, Code, Content, Kind, Listing, Part, Table, spell, visible_columns

__all__ = ["render", "to_text"]

_UNLIMITED = 100_000
#: The width of names and policies up to which other columns are wrapped first, if there are few columns of texts.
_LEAST: dict[Kind, int] = {"name": 28, "policy": 18}
_FEW = 5
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
    yield _text(content.verdict, _VERDICT[content.good])
    if content.facts:
        grid = table.Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        for name, value, *note in content.facts:
            grid.add_row(_text(name), _text(f"{value} ({note[0]})" if note and note[0] else value))
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
                yield Padding(_text(line), (0, 0, 0, 2)) if part.title else _text(line)
        yield from _left_out(len(part.lines) - part.most)
    elif isinstance(part, Code):
        yield from _title(part.title)
        yield Padding(_text(part.text), (0, 0, 0, 2))


def _table(shown: Table) -> Iterator[RenderableType]:
    columns = visible_columns(shown, "terminal")
    if not columns:
        return
    yield from _title(shown.title)
    grid = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    rows = [[spell(row[index], kind) or "-" for index, _, kind in columns] for row in shown.rows[: shown.most]]
    has_few_texts = sum(kind not in NUMERIC for _, _, kind in columns) <= _FEW
    for place, (_, name, kind) in enumerate(columns):
        if kind in NUMERIC:
            grid.add_column(_text(name), justify="right", no_wrap=True)
        else:
            least = has_few_texts and min(_LEAST.get(kind, 0), max(len(row[place]) for row in rows))
            grid.add_column(_text(name), overflow="fold", style=_STYLES.get(kind, ""), min_width=least or None)
    for row in rows:
        grid.add_row(*map(_text, row))
    yield grid
    yield from _left_out(len(shown.rows) - shown.most)


def _title(title: str) -> Iterator[RenderableType]:
    if title:
        yield _text(title, "bold")


def _left_out(number: int) -> Iterator[RenderableType]:
    if number > 0:
        yield _text(f"... {number:,} more", "dim")
