"""Tables and sentences as plain text for a given width. No word or number is broken, and nothing is left out.

NOTE [ Tables on a narrow terminal ]
A table that is wider than the terminal changes in this order, as far as it has to:
1. Headers wrap. Columns of prose (meanings, reasons) wrap at blanks.
2. Labels wrap at blanks. A label with a word that is too long for the first column stands on a line of its own, above
   its row.
3. Notes move below their row.
4. The columns are split into several tables, one below the other. Each repeats the labels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Piece", "are_numbers", "html_table", "lay_out", "text_table", "wrapped"]

_GAP = 2
_NARROWEST_LABEL = 18
_NARROWEST_PROSE = 24
_NO_NUMBER = ("", "-")


class Piece(NamedTuple):
    """A part of a line of a table.

    Attributes:
        text: The text, with the blanks that align it.
        row: The index of the row; -1 for the header.
        column: The index of the column.
    """

    text: str
    row: int
    column: int


def wrapped(text: str, width: int | None, indent: str = "", indent_after: str | None = None) -> list[str]:
    """Returns a text in lines, which break at blanks alone. A word that is longer than a line gets a line of its own.

    Args:
        text: The text. Its own line breaks stay.
        width: The width of a line, in characters. None: lines are not wrapped.
        indent: What the first line starts with.
        indent_after: What the other lines start with. None: the same.

    Example:
        >>> wrapped("one two three", 9, indent_after="  ")
        ['one two', '  three']
    """
    after = indent if indent_after is None else indent_after
    lines: list[str] = []
    for line in text.split("\n") or [""]:
        start = after if lines else indent
        if width is None or len(start) + len(line) <= width:
            lines.append(f"{start}{line}")
            continue
        lines += textwrap.wrap(
            line, width, initial_indent=start, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
        )
    return lines


def lay_out(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    *,
    prose: Collection[str] = (),
    note: str | None = None,
    show_header: bool = True,
    align_numbers: bool = False,
) -> list[list[Piece]]:
    """Lays out a table. See NOTE [ Tables on a narrow terminal ].

    Args:
        header: The names of the columns. The first column has the labels of the rows.
        rows: The rows. A row of one cell is a line across all columns.
        width: The width of a line, in characters. None: as wide as the table needs.
        prose: The names of columns that may wrap.
        note: The name of a column that may wrap, and may move below the rows.
        show_header: Whether to return the header.
        align_numbers: Whether columns of numbers are flush right.

    Returns:
        The lines, without trailing blanks.
    """
    table = _Table(header, rows, {header.index(name) for name in prose}, show_header, align_numbers)
    every = list(range(len(header)))
    if width is None or table.width_of([table.natural(column) for column in every]) <= width:
        return list(table.lines(every, [table.natural(column) for column in every], None, None))
    if note is not None:
        column = header.index(note)
        table.prose.add(column)
        if not table.fits(every, width):
            every.remove(column)
            return list(_in_groups(table, every, width, column))
    return list(_in_groups(table, every, width, None))


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, prose: Collection[str] = ()
) -> str:
    """Returns a table as text. Columns of numbers are flush right; "-" is none.

    Example:
        >>> print(text_table(["op", "calls"], [["mm", "12"], ["softmax", "4"]]))
        op       calls
        mm          12
        softmax      4
    """
    lines = lay_out(header, rows, width, prose=prose, align_numbers=True)
    return "\n".join("".join(piece.text for piece in line) for line in lines)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", note: str = "") -> str:
    """Returns a table as HTML, for a notebook. All texts are escaped.

    Args:
        header: The names of the columns.
        rows: The rows. A row of one cell is a line across all columns.
        title: What stands above the table.
        note: What stands below it.

    Example:
        >>> html_table(["a"], [["<b>"]])
        '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    import html

    def cells(tag: str, row: Sequence[str]) -> str:
        across = f' colspan="{len(header)}"' if len(row) == 1 < len(header) else ""
        return "".join(f"<{tag}{across}>{html.escape(cell)}</{tag}>" for cell in row)

    above, below = (f"<p>{html.escape(text)}</p>" if text else "" for text in (title, note))
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"{above}<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>{below}"


def _in_groups(table: _Table, columns: Sequence[int], width: int, note: int | None) -> Iterator[list[Piece]]:
    first = table.labels(columns)
    group, others = list(columns[:first]), list(columns[first:])
    while others:
        if len(group) > first and not table.fits([*group, others[0]], width):
            yield from table.lines(group, table.widths(group, width), width, note)
            yield []
            group, note = list(columns[:first]), None
        group.append(others.pop(0))
    yield from table.lines(group, table.widths(group, width), width, note)


class _Table:
    def __init__(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        prose: set[int],
        show_header: bool,
        align_numbers: bool,
    ) -> None:
        self.header = header
        self.rows = rows
        self.prose = prose
        self.show_header = show_header
        self.right = {column for column in range(len(header)) if align_numbers and are_numbers(self._cells(column))}

    def labels(self, columns: Sequence[int]) -> int:
        """The number of columns that tell the rows apart: two if the first does not."""
        told = [row[columns[0]] for row in self.rows if len(row) > 1]
        return 1 if len(set(told)) == len(told) else min(2, len(columns))

    def _cells(self, column: int) -> list[str]:
        return [row[column] for row in self.rows if len(row) > 1]

    @staticmethod
    def width_of(widths: Sequence[int]) -> int:
        return sum(widths) + _GAP * (len(widths) - 1)

    def natural(self, column: int) -> int:
        """The width of a column in which nothing wraps."""
        return max(_longest(self._cells(column)), len(self.header[column]) * self.show_header)

    def narrowest(self, column: int) -> int:
        """The smallest width of a column."""
        words = _longest(self.header[column].split()) * self.show_header
        cells = self._cells(column)
        natural = _longest(cells)
        if column in self.prose:
            natural = max(min(natural, _NARROWEST_PROSE), _longest(word for cell in cells for word in cell.split()))
        elif column == 0:
            natural = min(natural, _NARROWEST_LABEL)
        return max(natural, words)

    def fits(self, columns: Sequence[int], width: int) -> bool:
        return self.width_of([self.narrowest(column) for column in columns]) <= width

    def widths(self, columns: Sequence[int], width: int) -> list[int]:
        """The widths of columns. What is left goes to labels first, then to headers, then to prose."""
        widths = {column: self.narrowest(column) for column in columns}
        for column in sorted(columns, key=lambda column: (column in self.prose, column)):
            left = width - self.width_of(list(widths.values()))
            widths[column] += max(0, min(left, self.natural(column) - widths[column]))
        return list(widths.values())

    def lines(
        self, columns: Sequence[int], widths: Sequence[int], width: int | None, note: int | None
    ) -> Iterator[list[Piece]]:
        if self.show_header:
            yield from self._row(self.header, -1, columns, widths)
        for number, row in enumerate(self.rows):
            if len(row) == 1:
                yield from ([Piece(line, number, 0)] for line in wrapped(row[0], width, indent_after="  "))
                continue
            yield from self._row(row, number, columns, widths, width)
            if note is not None and row[note]:
                yield from ([Piece(line, number, note)] for line in wrapped(row[note], width, "  ", "    "))

    def _row(
        self, row: Sequence[str], number: int, columns: Sequence[int], widths: Sequence[int], width: int | None = None
    ) -> Iterator[list[Piece]]:
        label = columns[0]
        longest = _longest(row[label].split())
        is_long = number >= 0 and label not in self.prose and longest > widths[0]
        indent = "  " if number >= 0 and longest + 2 <= widths[0] else ""
        if is_long:
            yield from ([Piece(line, number, label)] for line in wrapped(row[label], width, indent_after="  "))
        cells = [
            [""] if is_long and column == label else wrapped(row[column], each, "", indent if column == label else "")
            for column, each in zip(columns, widths, strict=True)
        ]
        if number < 0:  # the last words of all headers stand on one line
            most = max(map(len, cells))
            cells = [[""] * (most - len(cell)) + cell for cell in cells]
        for height in range(max(map(len, cells))):
            line: list[Piece] = []
            for column, each, cell in zip(columns, widths, cells, strict=True):
                text = cell[height] if height < len(cell) else ""
                aligned = text.rjust(each) if column in self.right else text.ljust(each)
                line.append(Piece(f"{' ' * _GAP * bool(line)}{aligned}", number, column))
            yield from _stripped(line, keep_empty=not is_long)


def _stripped(line: list[Piece], keep_empty: bool) -> Iterator[list[Piece]]:
    """A line without the blanks at its end; none if nothing is left and that is not to be kept."""
    while line and not line[-1].text.strip():
        line.pop()
    if line:
        line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
    if line or keep_empty:
        yield line


def _longest(texts: Iterable[str]) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)


def are_numbers(cells: Sequence[str]) -> bool:
    """Whether the cells of a column are numbers; "-" and "" are none."""
    present = [cell for cell in cells if cell not in _NO_NUMBER]
    return bool(present) and all(map(_is_number, present))


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "").partition(" ")[0])
    except ValueError:
        return False
    return True
