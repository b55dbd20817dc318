"""The table of `torch-promote bench --device cuda-stand-in`: kernels, casts and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_promote.cli.terminal import Table

__all__ = ["FOOTNOTE", "CountTable", "column"]

_HEAD = (
    "            ---- kernels ---- ------------- casts ----------- ------ KiB ------",
    "contender     all copies cast    w    a    g forward backward moved alloc  peak",
)
#: Explains the columns.
FOOTNOTE = (
    "kernels: all of one run, after a first one in the same region; of these, those that copy, and of these, those "
    "that cast. casts: of weights, activations and gradients; narrowing + widening in the forward and in the "
    "backward. KiB: moved by the casts, allocated, and the peak of two runs."
)
#: The headers of the same columns on a terminal that is too narrow for the head.
_COLUMNS = (
    *("case: contender", "all kernels", "kernels copy", "kernels cast", "casts w", "casts a", "casts g"),
    *("casts forward", "casts backward", "KiB moved", "KiB alloc", "KiB peak"),
)
_PHASES = ("forward", "backward")
#: The widths of the columns after the first.
_WIDTHS = (6, 7, 5, 5, 5, 5, 8, 9, 6, 6, 6)


class CountTable:
    """The table: the head and, under each case, a line for each contender.

    Args:
        results: Results as plain data; torch_promote.bench documents the format.
    """

    def __init__(self, results: Sequence[Mapping[str, Any]]) -> None:
        self._results = results

    def lines(self, width: int | None) -> Iterator[Any]:
        """Returns the lines for a terminal."""
        if width is not None and width < len(_HEAD[1]):
            listing = Table(*_COLUMNS)
            for case, name, cells in self._rows():
                listing.add_row(f"{case}: {name}", *cells)
            yield from listing.lines(width)
            return
        yield from _HEAD
        last = None
        for case, name, cells in self._rows():
            if case != last:
                yield case
            last = case
            yield f"{name:11}{''.join(f'{cell:>{each}}' for cell, each in zip(cells, _WIDTHS, strict=True))}"

    def _rows(self) -> Iterator[tuple[str, str, list[str]]]:
        for result in self._results:
            for name in filter(result["kernels"].__contains__, ("stock", "ours", "hand", "already_cast", "plain")):
                casts, copies = result["casts"][name], result["copies"][name]
                kinds = (casts[kind] for kind in ("weights", "activations", "gradients"))
                phases = (f"{copies[phase]['narrowing']}+{copies[phase]['widening']}" for phase in _PHASES)
                sizes = (copies["moved_bytes"], copies["allocated_bytes"], result["peak_bytes"][name])
                kernels = (result["kernels"][name], copies["kernels"], copies["cast_kernels"])
                cells = (*map(str, (*kernels, *kinds)), *phases, *map(_kib, sizes))
                yield result["case"], column(name), list(cells)


def _kib(size: int) -> str:
    return f"{size / 1024:.1f}" if size < 100 * 1024 else f"{size / 1024:.0f}"


def column(contender: str) -> str:
    """Returns the name of a contender for readers."""
    return "cast before" if contender == "already_cast" else contender
