"""Reports as text, in which no word or number is broken.

`str(report)` has at most 80 columns, and cuts names that are longer than that. A command prints a report as wide as the
terminal, and cuts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch_promote import text_layout
from torch_promote.numerics.pages.spelling import shorten
from torch_promote.numerics.report.findings import count
from torch_promote.text_layout import are_numbers, text_table

__all__ = ["STR", "Layout", "fitted_table", "list_of", "report_text", "wrapped"]


class Layout(NamedTuple):
    """How a report is laid out.

    Attributes:
        width: The width of a line, in characters. None: lines are not wrapped.
        cuts: Whether names that are longer than a line are cut.
    """

    width: int | None
    cuts: bool = False


#: What `str` of a report has.
STR = Layout(80, cuts=True)

_MOST_SENTENCES = 10
_NARROWEST = 10


def report_text(title: str, verdict: str, parts: Iterable[Sequence[str]], layout: Layout = STR) -> str:
    """Returns a report.

    Args:
        title: The first line.
        verdict: What the report shows, in a sentence or two.
        parts: The lines of each part; empty parts are left out.
        layout: The layout of the title and the verdict.
    """
    lines = [*wrapped(title, layout), *wrapped(verdict, layout)]
    for part in parts:
        lines += ["", *part] if part else []
    return "\n".join(lines)


def wrapped(text: str, layout: Layout = STR, indent: str = "", indent_after: str | None = None) -> list[str]:
    """Returns a text in lines, which break at blanks alone."""
    after = indent if indent_after is None else indent_after
    if layout.cuts and layout.width is not None:
        text = " ".join(shorten(word, layout.width - len(after)) for word in text.split())
    return text_layout.wrapped(text, layout.width, indent, after)


def list_of(title: str, sentences: Sequence[str], layout: Layout = STR) -> list[str]:
    """Returns sentences under a title; nothing without any."""
    if not sentences:
        return []
    more = len(sentences) - _MOST_SENTENCES
    shown = [*sentences[:_MOST_SENTENCES], *([f"... and {more:,} more"] if more > 0 else [])]
    return [title, *(line for sentence in shown for line in wrapped(sentence, layout, "  ", "    "))]


def fitted_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    most: int,
    noun: str,
    layout: Layout = STR,
    prose: Collection[str] = (),
) -> list[str]:
    """Returns the first rows of a table, and how many more there are.

    Args:
        header: The names of the columns.
        rows: The rows. If there are none, nothing is returned.
        most: The maximum number of rows shown.
        noun: What a row is.
        layout: The layout. If it cuts, it cuts long names, and no numbers.
        prose: The names of columns that may wrap, if it does not cut.
    """
    if not rows:
        return []
    shown = [list(row) for row in rows[:most]]
    if layout.cuts and layout.width is not None:
        _cut(header, shown, layout.width)
    lines = text_table(header, shown, None if layout.cuts else layout.width, prose).splitlines()
    left = len(rows) - most
    return lines + ([f"... and {count(left, f'more {noun}')}"] if left > 0 else [])


def _cut(header: Sequence[str], shown: list[list[str]], width: int) -> None:
    whole = [tuple(row) for row in shown]
    names = [column for column in range(len(header)) if not are_numbers([row[column] for row in whole])]
    while (over := max(map(len, text_table(header, shown).splitlines())) - width) > 0:
        widths = {column: max(len(row[column]) for row in shown) for column in names}
        widest = max(names, key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= _NARROWEST:
            break
        # Narrow the widest column first, to the width of the next.
        second = max([_NARROWEST, *(width for column, width in widths.items() if column != widest)])
        to = max(widths[widest] - over, min(second, widths[widest] - 1))
        # Cut the whole name: `shorten` would take the dots of an earlier cut for those of a path.
        for row, names_of_row in zip(shown, whole, strict=True):
            row[widest] = shorten(names_of_row[widest], to)
