"""A list of groups of calls that prints as a table."""

from __future__ import annotations

import html

from torch_promote.numerics.records.groups import CallGroup
from torch_promote.numerics.report.findings import count, most_of, size
from torch_promote.text_layout import text_table

__all__ = ["GroupTable"]

_ROWS = 40
_MOST = 60


class GroupTable(list[CallGroup]):
    """The result of `by_op()`, `by_module()` and `by_line()`: a list that `str` and notebooks show as a table.

    Example:
        >>> groups = GroupTable([CallGroup("aten::mm", calls=2, casts=1, bytes=1536, duration=2_000_000)])
        >>> print(groups)
                  calls  casts  reused    bytes  dtypes    ms
        aten::mm      2      1       0  1.5 KiB          2.00
        >>> groups == list(groups)
        True
    """

    def __str__(self) -> str:
        rows = self._rows()
        left = len(self) - _ROWS
        more = f"\n... and {count(left, 'more row')}" if left > 0 else ""
        return f"{text_table(_HEADER, rows)}{more}" if rows else "no calls"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEADER)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._rows())
        left = len(self) - _ROWS
        more = f"<p>... and {count(left, 'more row')}</p>" if left > 0 else ""
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>{more}"

    def _rows(self) -> list[list[str]]:
        return [
            [
                _cut(group.key) or "(none)",
                f"{group.calls:,}",
                f"{group.casts:,}",
                f"{group.reused:,}",
                size(group.bytes),
                most_of(group.dtypes),
                f"{group.duration / 1e6:.2f}",
            ]
            for group in self[:_ROWS]
        ]


_HEADER = ("", "calls", "casts", "reused", "bytes", "dtypes", "ms")


def _cut(key: str) -> str:
    """Cuts a long path at its beginning, because its end is more informative."""
    return key if len(key) <= _MOST else f"...{key[3 - _MOST :]}"
