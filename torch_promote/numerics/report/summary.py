"""The summary of a trace for the terminal: the verdict, the numbers, and the ten most important rows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch_promote.errors import MissingPackageError
from torch_promote.numerics.observing.places import shorten
from torch_promote.numerics.observing.policy_sources import STOCK
from torch_promote.numerics.report.findings import (
    RepeatedCast,
    by_weight,
    count,
    most_of,
    percent,
    repeated_casts,
    result_dtypes,
    short_dtype,
    size,
    time_in_casts,
    verdict,
)
from torch_promote.numerics.report.savings import Saving, savings
from torch_promote.numerics.report.unused import unused_overrides
from torch_promote.text_layout import Piece, lay_out, wrapped

if TYPE_CHECKING:
    from rich.text import Text

    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["drawings", "summarize"]

_WIDTH = 100
_ROWS = 10
_REPEATED = 5
_COLUMNS = ("op", "calls", "dtypes", "casts", "bytes", "policy")
_CASTS = 3
#: The styles of columns in rows with casts.
_STYLES = {0: "bold", 2: "cyan"}


def summarize(report: TraceRecords) -> str:
    """Returns the summary as plain text of at most 100 columns.

    Args:
        report: The report.
    """
    lines = [_title(report), *textwrap.wrap(verdict(report), _WIDTH), ""]
    for label, text in numbers(report):
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=f"{label:<9}", subsequent_indent=" " * 9, break_on_hyphens=False
        )
    rows = [_COLUMNS, *_rows(report)]
    if rows[1:]:
        lines += ["", *_aligned(rows)]
        lines += _left_out(report)
    for title, sentences in _lists(report):
        lines += ["", title]
        for sentence in sentences:
            lines += textwrap.wrap(
                sentence,
                _WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
    return "\n".join(line.rstrip() for line in lines)


def drawings(report: TraceRecords, width: int | None) -> list[Text]:
    """Returns the summary in colours, as lines of rich. Nothing is cut.

    Args:
        report: The report.
        width: The width of a line, in characters. None: lines are not wrapped.

    Raises:
        MissingPackageError: rich is not installed. It is an ImportError.
    """
    try:
        from rich.text import Text
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "the summary of a trace in colours needs rich: pip install rich. str(report) works without it."
        ) from error

    def sentence(text: str, style: str = "", indent: str = "") -> list[Text]:
        return [Text(line, style=style) for line in wrapped(text, width, indent, indent and f"{indent}  ")]

    def table(lines: list[list[Piece]], style: Callable[[Piece], str]) -> list[Text]:
        return [Text.assemble(*((piece.text, style(piece)) for piece in line)) for line in lines]

    figures = lay_out(("", "text"), numbers(report), width, prose=["text"], show_header=False)
    drawn = [*sentence(_title(report), "dim"), *sentence(verdict(report), "bold"), Text()]
    drawn += table(figures, lambda piece: "" if piece.column else "dim")
    rows = _rows(report)
    if rows:

        def style(piece: Piece) -> str:
            if piece.row < 0:
                return "bold"
            return _STYLES.get(piece.column, "") if rows[piece.row][_CASTS] != "0" else ""

        ops = lay_out(_COLUMNS, rows, width, prose=["dtypes"], note="policy", align_numbers=True)
        drawn += [Text(), *table(ops, style), *(Text(line, style="dim") for line in _left_out(report))]
    for title, sentences in _lists(report):
        drawn += [Text(), Text(title, style="bold")]
        drawn += [line for each in sentences for line in sentence(each, indent="  ")]
    return drawn


def numbers(report: TraceRecords) -> list[tuple[str, str]]:
    """Returns the numbers of a report with their labels."""
    total = report.total
    phases = ", ".join(f"{calls:,} {phase}" for phase, calls in sorted(total.phases.items(), reverse=True))
    found = [("calls", f"{total.calls:,} ({phases})" if phases else "0")]
    counted = result_dtypes(total.dtypes)
    if counted:
        shares = ", ".join(f"{percent(calls, total.calls)} {name}" for name, calls in counted.items())
        found.append(("results", shares))
    again = f", {total.repeated:,} repeated ({size(total.repeated_bytes)})" if total.repeated else ""
    found.append(("casts", f"{total.casts:,} ({size(total.bytes)}){again}, {total.reused:,} reused from a cache"))
    share = time_in_casts(report)
    if share is not None:
        found.append(("time", f"{percent(share)} of the calls' time on the host, for casts"))
    if total.errors:
        found.append(("errors", f"{count(total.errors, 'call')} raised"))
    return found


def _left_out(report: TraceRecords) -> list[str]:
    left = len(report.by_op()) - _ROWS
    return [f"... and {count(left, 'more op')}: see report.by_op(), or the JSON of the trace"] if left > 0 else []


def _title(report: TraceRecords) -> str:
    steps = f", {count(report.steps, 'optimizer step')}" if report.steps else ""
    return f"trace: torch {report.torch_version}{steps}"


_RIGHT = (1, 3, 4)


def _rows(report: TraceRecords) -> list[tuple[str, ...]]:
    return [
        (
            group.key.removeprefix("aten::"),
            f"{group.calls:,}",
            most_of(group.dtypes, _short_dtypes),
            f"{group.casts:,}",
            size(group.bytes) if group.casts else "",
            most_of(group.policies, _short_policy),
        )
        for group in by_weight(report.by_op())[:_ROWS]
    ]


def _short_dtypes(text: str) -> str:
    """The floating dtypes of "float32, int64 -> bfloat16, int64 -> bfloat16": "fp32 -> bf16"."""
    parts = []
    for part in text.split(" -> "):
        names = part.split(", ")
        floating = [name for name in names if "float" in name or "complex" in name] or names
        parts.append(", ".join(short_dtype(name) for name in floating))
    if len(parts) == 3 and parts[1] == parts[2]:
        parts.pop()
    return " -> ".join(parts)


def _short_policy(text: str) -> str:
    """A policy, and its source unless that is PyTorch's table: "fp32 (region at train.py:41)"."""
    policy, _, source = text.partition(": ")
    head, region, place = source.partition("region at ")
    source = f"{head}{region}{shorten(place, folders=False)}" if region else source
    return policy if source == STOCK else f"{policy} ({source})"


_WIDTHS = (30, 7, 20, 6, 8, 0)  # the maximum widths; the last column gets the rest


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [min(max(len(row[i]) for row in rows), most) for i, most in enumerate(_WIDTHS)]
    widths[-1] = _WIDTH - sum(widths[:-1]) - 2 * (len(widths) - 1)
    for row in rows:
        cells = [_fit(cell, width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(
            cell.rjust(width) if index in _RIGHT else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )


def _fit(text: str, width: int) -> str:
    """Cuts a cell at a blank; within a word only if the word itself is too wide."""
    if len(text) <= width:
        return text
    cut = text[: width - 3]
    return f"{cut if text[width - 3] == ' ' or ' ' not in cut else cut.rpartition(' ')[0]}..."


def _lists(report: TraceRecords) -> Iterator[tuple[str, list[str]]]:
    repeated = repeated_casts(report)
    if repeated:
        left = len(repeated) - _REPEATED
        more = [f"... and {left:,} more"] if left > 0 else []
        yield "Casts of the same tensor:", [*(_repeated(one) for one in repeated[:_REPEATED]), *more]
    saved = savings(report)
    if saved:
        yield "Fewer casts:", [_saving(one) for one in saved[:_REPEATED]]
    unused = unused_overrides(report)
    if unused:
        more = [f"and {len(unused) - _ROWS} more"] if len(unused) > _ROWS else []
        yield "No call used these overrides:", [*map(str, unused[:_ROWS]), *more]
    not_seen = what_was_not_seen(report)
    if not_seen:
        yield "Not in this report:", not_seen


def what_was_not_seen(report: TraceRecords) -> list[str]:
    """Returns sentences about unrecorded computations, and about calls missing from the lists."""
    dropped = (
        f"{count(report.dropped, 'call')} after the first {len(report.calls):,}: only sums and tables include them."
    )
    return [*report.not_seen, *([dropped] if report.dropped else [])]


def _repeated(one: RepeatedCast) -> str:
    lines = dict.fromkeys(shorten(line, folders=False) for _, _, line in one.places if line)
    places = ", ".join(lines) or "unknown lines"
    tensors = f", {one.tensors:,} tensors" if one.tensors > 1 else ""
    what = f"{one.from_dtype}{list(one.shape)} -> {one.to_dtype}"
    return f"{what} ({one.kind}{tensors}): {one.made:,} casts, {size(one.repeated_bytes)} again, at {places}"


def _saving(one: Saving) -> str:
    return f"{one.remedy}: {count(one.casts, 'cast')}, {size(one.bytes)}. {one.effect}"
