"""Reports as text of at most 80 columns, in which no word or number is broken."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from torch_promote.numerics.pages.spelling import shorten
from torch_promote.numerics.report.findings import count
from torch_promote.numerics.report.text_table import text_table

__all__ = ["WIDTH", "fitted_table", "list_of", "report_text", "wrapped"]

WIDTH = 80
_MOST_SENTENCES = 10
_NARROWEST = 12


def report_text(title: str, verdict: str, parts: Iterable[Sequence[str]]) -> str:
    """Returns a report.

    Args:
        title: The first line.
        verdict: What the report shows, in a sentence or two.
        parts: The lines of each part; empty parts are left out.
    """
    lines = [*wrapped(title), *wrapped(verdict)]
    for part in parts:
        lines += ["", *part] if part else []
    return "\n".join(lines)


def wrapped(text: str, indent: str = "", indent_after: str | None = None) -> list[str]:
    """Returns a text in lines, which break at blanks alone. A word that is longer than a line is cut."""
    after = indent if indent_after is None else indent_after
    words = [shorten(word, WIDTH - len(after)) for word in text.split()]
    return textwrap.wrap(
        " ".join(words),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def list_of(title: str, sentences: Sequence[str]) -> list[str]:
    """Returns sentences under a title; nothing without any."""
    if not sentences:
        return []
    more = len(sentences) - _MOST_SENTENCES
    shown = [*sentences[:_MOST_SENTENCES], *([f"... and {more:,} more"] if more > 0 else [])]
    return [title, *(line for sentence in shown for line in wrapped(sentence, "  ", "    "))]


def fitted_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, most: int, noun: str) -> list[str]:
    """Returns the first rows of a table, and how many more there are. Long names are cut, numbers are not.

    Args:
        header: The names of the columns.
        rows: The rows; without any, nothing is returned.
        most: How many are shown.
        noun: What a row is.
    """
    if not rows:
        return []
    shown = [list(row) for row in rows[:most]]
    while (over := max(map(len, text_table(header, shown).splitlines())) - WIDTH) > 0:
        widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
        widest = max(range(len(header)), key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            break
        # The widest one gives way first, down to the next.
        second = max([_NARROWEST, *(width for column, width in enumerate(widths) if column != widest)])
        to = max(widths[widest] - over, min(second, widths[widest] - 1))
        for row in shown:
            row[widest] = shorten(row[widest], to)
    left = len(rows) - most
    return text_table(header, shown).splitlines() + ([f"... and {count(left, f'more {noun}')}"] if left > 0 else [])
