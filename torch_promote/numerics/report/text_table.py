"""Tables as plain text, for `str` of what a report returns."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["text_table"]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns rows in columns as wide as they need. Columns of numbers are flush right; "-" is none.

    Example:
        >>> print(text_table(["op", "calls"], [["mm", "12"], ["softmax", "4"]]))
        op       calls
        mm          12
        softmax      4
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    numbers = [_are_numbers([row[column] for row in rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in lines
    )


_NO_NUMBER = ("", "-")


def _are_numbers(cells: Sequence[str]) -> bool:
    present = [cell for cell in cells if cell not in _NO_NUMBER]
    return bool(present) and all(map(_is_number, present))


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "").partition(" ")[0])
    except ValueError:
        return False
    return True
