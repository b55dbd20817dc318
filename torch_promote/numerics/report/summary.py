"""The summary of a trace for the terminal: the verdict, the numbers, and the ten most important rows."""

from __future__ import annotations

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
    """Returns the summary as plain text, laid out for 100 columns. Nothing is cut.

    Args:
        report: The report.
    """
    return "\n".join("".join(text for text, _ in line).rstrip() for line in _lines(report, _WIDTH))


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
    return [Text.assemble(*line) for line in _lines(report, width)]


def _lines(report: TraceRecords, width: int | None) -> Iterator[list[tuple[str, str]]]:
    """Yields lines, each of them parts with their styles."""

    def sentence(text: str, style: str = "", indent: str = "") -> Iterator[list[tuple[str, str]]]:
        yield from ([(line, style)] for line in wrapped(text, width, indent, indent and f"{indent}  "))

    def table(lines: list[list[Piece]], style: Callable[[Piece], str]) -> Iterator[list[tuple[str, str]]]:
        yield from ([(piece.text, style(piece)) for piece in line] for line in lines)

    yield from sentence(_title(report), "dim")
    yield from sentence(verdict(report), "bold")
    yield []
    figures = lay_out(("", "text"), numbers(report), width, prose=["text"], show_header=False)
    yield from table(figures, lambda piece: "" if piece.column else "dim")
    rows = _rows(report)
    if rows:

        def style(piece: Piece) -> str:
            if piece.row < 0:
                return "bold"
            return _STYLES.get(piece.column, "") if rows[piece.row][_CASTS] != "0" else ""

        yield []
        yield from table(lay_out(_COLUMNS, rows, width, prose=["dtypes"], note="policy", align_numbers=True), style)
        yield from ([(line, "dim")] for line in _left_out(report))
    for title, sentences in _lists(report):
        yield []
        yield [(title, "bold")]
        for each in sentences:
            yield from sentence(each, indent="  ")


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
