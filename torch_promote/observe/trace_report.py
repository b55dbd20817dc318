"""`TraceReport`: the report of `trace`."""

from __future__ import annotations

import csv
import dataclasses
import functools
import html
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch_promote.errors import MissingPackageError, OptionError
from torch_promote.observe.diff import TraceDiff, compare_traces
from torch_promote.observe.events import Call, CallGroup, CastGroup, Totals, TraceRecords
from torch_promote.observe.explanation import Explanation, explain
from torch_promote.observe.findings import (
    OTHER,
    ModuleTree,
    RepeatedCast,
    Saving,
    by_weight,
    count,
    exponent_rows,
    module_tree,
    most_of,
    percent,
    repeated_casts,
    result_dtype,
    result_dtypes,
    savings,
    short_dtype,
    size,
    time_in_casts,
    verdict,
)
from torch_promote.observe.pages import (
    INK,
    Tile,
    decorate,
    embed,
    figure_of,
    label_of,
    new_figure,
    read_json,
    render_page,
    save_as,
    to_json,
    write_empty,
)
from torch_promote.observe.perfetto import perfetto_trace
from torch_promote.observe.places import shorten
from torch_promote.observe.policy_sources import STOCK, UnusedOverride, unused_overrides
from torch_promote.observe.values import Values
from torch_promote.text_layout import Piece, lay_out, text_table, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.text import Text

    from torch_promote.observe.events import TraceRecords

__all__ = [
    "FORMAT",
    "VERSION",
    "GroupTable",
    "TraceReport",
    "drawings",
    "embed_page",
    "fill_from_dict",
    "load",
    "make_page",
    "plot_casts",
    "plot_dtypes",
    "plot_trace",
    "report_to_dict",
    "save",
    "summarize",
]


# ---The summary of a trace for the terminal: the verdict, the numbers, and the ten most important rows.


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


# ---A list of groups of calls that prints as a table.


_GROUP_TABLE_ROWS = 40
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
        left = len(self) - _GROUP_TABLE_ROWS
        more = f"\n... and {count(left, 'more row')}" if left > 0 else ""
        return f"{text_table(_HEADER, rows)}{more}" if rows else "no calls"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEADER)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._rows())
        left = len(self) - _GROUP_TABLE_ROWS
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
            for group in self[:_GROUP_TABLE_ROWS]
        ]


_HEADER = ("", "calls", "casts", "reused", "bytes", "dtypes", "ms")


def _cut(key: str) -> str:
    """Cuts a long path at its beginning, because its end is more informative."""
    return key if len(key) <= _MOST else f"...{key[3 - _MOST :]}"


# ---The page of a trace. This module passes plain values to the template page.html.j2.


_MOST_OPS, _MOST_CASTS, _MOST_REPEATED = 600, 30, 60


def make_page(report: TraceRecords) -> str:
    """Returns the page of a report.

    Args:
        report: The report.

    Raises:
        MissingPackageError: jinja2 is not installed. It is an ImportError.
    """
    return render_page("report/page.html.j2", "a trace", _content(report))


def embed_page(report: TraceRecords) -> str:
    """Returns the page in a frame, for a notebook; without jinja2, the summary as text.

    Args:
        report: The report.
    """
    return embed("trace", lambda: make_page(report), lambda: str(report))


def _content(report: TraceRecords) -> dict[str, Any]:
    total, ops, casts, repeated = report.total, by_weight(report.by_op()), report.casts(), repeated_casts(report)
    tree = module_tree(report.by_module())
    exponents = exponent_rows(report.calls)
    return {
        "verdict": verdict(report),
        "about": _about(report),
        "numbers": _numbers(report, tree),
        "dtypes": result_dtypes(total.dtypes),
        "calls": total.calls,
        "tree": tree,
        "outside_dtypes": result_dtypes(tree.outside.dtypes) if tree.outside else {},
        "ops": [_op(group) for group in ops[:_MOST_OPS]],
        "more_ops": max(0, len(ops) - _MOST_OPS),
        "repeated": repeated[:_MOST_REPEATED],
        "more_repeated": max(0, len(repeated) - _MOST_REPEATED),
        "repeated_casts": total.repeated,
        "savings": savings(report),
        "casts": [_cast(group) for group in casts[:_MOST_CASTS]],
        "more_casts": max(0, len(casts) - _MOST_CASTS),
        "exponents": exponents,
        "not_seen": what_was_not_seen(report),
    }


def _about(report: TraceRecords) -> list[str]:
    steps = [count(report.steps, "optimizer step")] if report.steps else []
    return [f"torch {report.torch_version}", *steps, *report.device_names]


def _numbers(report: TraceRecords, tree: ModuleTree) -> list[Tile]:
    total = report.total
    phases = ", ".join(f"{calls:,} {phase}" for phase, calls in sorted(total.phases.items(), reverse=True))
    threads = len({call.thread for call in report.calls})
    found = [
        Tile("Calls", f"{total.calls:,}", phases),
        Tile("Casts", f"{total.casts:,}", f"{total.reused:,} more from a cache"),
        Tile("Bytes cast", size(total.bytes)),
        Tile("Repeated casts", f"{total.repeated:,}", f"{size(total.repeated_bytes)} of {size(total.bytes)}"),
    ]
    share = time_in_casts(report)
    if share is not None:
        found.append(Tile("Time in casts", percent(share), "of the calls' time on the host"))
    if tree.islands:
        found.append(Tile("Float32 islands", str(tree.islands), "modules, marked below"))
    if threads > 1:
        found.append(Tile("Threads", str(threads)))
    if total.errors:
        found.append(Tile("Errors", f"{total.errors:,}", "calls that raised"))
    return found


def _op(group: CallGroup) -> dict[str, Any]:
    return {
        "name": group.key,
        "calls": group.calls,
        "dtypes": group.dtypes.most_common(),
        "casts": group.casts,
        "reused": group.reused,
        "bytes": group.bytes,
        "repeated": group.repeated,
        "policies": [(*text.partition(": ")[::2], calls) for text, calls in group.policies.most_common()],
        "errors": group.errors,
        "milliseconds": group.duration / 1e6,
    }


def _cast(group: CastGroup) -> dict[str, Any]:
    return group.to_dict()


# ---File formats of reports: JSON (can be loaded), CSV, a page, and a trace for Perfetto.
#
# NOTE [ Tensors in JSON ]
# A program has few kinds of tensors, and calls ops on them repeatedly. So the file lists each `TensorInfo` once, under
# "tensors", and calls refer to them by index.


FORMAT = "torch_promote trace"
VERSION = 1
_TENSORS = ("inputs", "ran_with", "outputs")


def report_to_dict(report: TraceRecords) -> dict[str, Any]:
    """Returns a report as JSON-compatible values.

    Args:
        report: The report.

    Returns:
        A dict with "format", "version", "torch_version", "steps", "dropped", "not_seen", "totals" (of all calls),
        "tensors", "calls" (as in `Call.to_dict`, but inputs, ran_with and outputs are indices into "tensors"), "groups"
        (the calls by op, module and line) and "casts" (by argument, op, module and line).
    """
    tensors: dict[str, int] = {}

    def place_of(info: dict[str, Any]) -> int:
        return tensors.setdefault(json.dumps(info), len(tensors))

    calls = [call.to_dict() for call in list(report.calls)]
    for call in calls:
        for name in _TENSORS:
            call[name] = [place_of(info) for info in call[name]]
    return {
        "format": FORMAT,
        "version": VERSION,
        "torch_version": report.torch_version,
        "steps": report.steps,
        "dropped": report.dropped,
        "device_names": list(report.device_names),
        "not_seen": list(report.not_seen),
        "asked": list(report.asked),
        "totals": report.total.to_dict(),
        "tensors": [json.loads(text) for text in tensors],
        "calls": calls,
        "groups": report._totals.to_list(),
        "casts": [group.to_dict() for group in report.casts()],
    }


def fill_from_dict(report: TraceRecords, data: dict[str, Any]) -> None:
    """Fills an empty report with the data of `report_to_dict`.

    Args:
        report: The report.
        data: The dict.
    """
    for one in data["calls"]:
        named = {name: [data["tensors"][place] for place in one[name]] for name in _TENSORS}
        call = Call.from_dict({**one, **named})
        report.add(dataclasses.replace(call, values=tuple(Values.from_dict(values) for values in one["values"])))
    if data["dropped"]:
        report._sums, report._summed = Totals.from_lists(data["groups"], data["casts"]), len(report.calls)
    for name in ("torch_version", "steps", "dropped", "device_names", "not_seen", "asked"):
        setattr(report, name, data[name])


def save(report: TraceRecords, path: str | os.PathLike[str]) -> None:
    """Writes a report to a file; see `TraceReport.save`."""
    formats = {ending: functools.partial(make, report) for ending, make in _MAKERS.items()}
    save_as(path, "the trace", formats, _MEANINGS)


def load(report: TraceRecords, path: str | os.PathLike[str]) -> None:
    """Reads a report that `save` wrote as .json into an empty one; see `TraceReport.load`."""
    read_json(path, "trace", FORMAT, VERSION, lambda data: fill_from_dict(report, data))


def _json(report: TraceRecords) -> str:
    return to_json(report_to_dict(report))


def _perfetto(report: TraceRecords) -> str:
    return json.dumps(perfetto_trace(report), separators=(",", ":")) + "\n"


_SCALARS = ("op", "overload", "module", "phase", "line")
_FILES_COLUMNS = (
    *_SCALARS,
    *_TENSORS,
    *("casts", "cast_bytes", "policy", "said_by", "composite", "error", "autocast"),
    *("thread", "start", "duration", "cast_time"),
)


def _csv(report: TraceRecords) -> str:
    calls = list(report.calls)
    measured = list(dict.fromkeys(name for call in calls for values in call.values for name in _numbers_of(values)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_FILES_COLUMNS, *measured])
    for call in calls:
        made = sum(cast.bytes for cast in call.casts if not cast.reused)
        autocast = _joined(f"{device}: {str(dtype).removeprefix('torch.')}" for device, dtype in call.autocast)
        row: list[Any] = [_as_text(getattr(call, name)) for name in _SCALARS]
        row += [_joined(getattr(call, name)) for name in _TENSORS]
        names = (_as_text(name) for name in (call.policy_name, call.said_by))
        row += [_joined(call.casts), made, *names, call.composite, call.error, autocast]
        row += [call.thread, call.start, call.duration, call.cast_time]
        numbers = [_numbers_of(values) for values in call.values]
        writer.writerow([*row, *(_joined(one.get(name, "") for one in numbers) for name in measured)])
    return text.getvalue()


def _numbers_of(values: Values) -> dict[str, Any]:
    """The numbers of a `Values`, without its histogram."""
    return {name: value for name, value in values.to_dict().items() if name != "exponents"}


def _as_text(name: str) -> str:
    """Escapes a name that a spreadsheet would read as a formula, such as the file name "=1+1.py"."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


def _joined(parts: Iterable[object]) -> str:
    return "; ".join(str(part) for part in parts)


_MAKERS: dict[str, Callable[[TraceRecords], str]] = {
    ".trace.json": _perfetto,
    ".json": _json,
    ".csv": _csv,
    ".html": make_page,
}

_MEANINGS = {
    ".html": "a page",
    ".json": "to read it again",
    ".trace.json": "for Perfetto",
    ".csv": "a row for each call",
}


# ---Plots of a trace for a notebook: the dtypes over time, and the bytes of casts by module.


# Okabe and Ito's colour-blind safe palette, as in page.css.
_COLORS = {
    "float64": "#56b4e9",
    "float32": "#0072b2",
    "bfloat16": "#e69f00",
    "float16": "#d55e00",
    "float8": "#cc79a7",
    OTHER: "#b4b8bf",
}
_COMPLEX = "#009e73"
_PHASES = {"forward": "#ffffff", "backward": "#eceff3", "recompute": "#dde3ea"}
_BINS = 80
_MODULES = 16


def plot_trace(report: TraceRecords) -> Figure:
    """Plots both: the dtypes over time above, the bytes of casts by module below.

    Args:
        report: The report.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    modules = min(_MODULES, max(1, sum(bool(group.bytes) for group in report.by_module())))
    figure = new_figure((9.0, 3.6 + 0.6 + 0.27 * modules))
    above, below = figure.subplots(2, 1, height_ratios=[3.0, 0.6 + 0.27 * modules])
    plot_dtypes(report, above)
    plot_casts(report, below)
    return figure


def plot_dtypes(report: TraceRecords, axes: Axes | None = None) -> Figure:
    """Plots the share of calls by the dtype of their results over time. Backward and recomputation are shaded.

    Args:
        report: The report. Calls that it does not store individually are not in the plot.
        axes: The axes to draw on. Default: a new figure.

    Returns:
        The figure.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    axes = new_figure((9.0, 3.4)).subplots() if axes is None else axes
    calls = sorted(report.calls, key=lambda call: call.start)
    decorate(axes, "Dtypes of results over time")
    if not calls:
        return write_empty(axes, "no call was recorded")
    first = calls[0].start
    span = max(call.start for call in calls) - first or 1
    names = list(result_dtypes(report.total.dtypes))
    shares = {name: [0.0] * _BINS for name in names}
    for call in calls:
        shares[result_dtype(call.dtypes)][min(_BINS - 1, (call.start - first) * _BINS // span)] += 1
    sums = [sum(parts) for parts in zip(*shares.values(), strict=True)]
    edges = [index * span / _BINS / 1e6 for index in range(_BINS + 1)]
    bottom = [0.0] * _BINS
    for name, parts in shares.items():
        heights = [100 * part / whole if whole else 0.0 for part, whole in zip(parts, sums, strict=True)]
        color = _COMPLEX if "complex" in name else _COLORS[name]
        axes.bar(edges[:-1], heights, span / _BINS / 1e6, bottom, align="edge", color=color, label=name, linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _shade_phases(axes, calls, first)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, 112)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"], fontsize=8, color=INK)
    axes.set_xlabel("milliseconds since the first call, on the host", fontsize=8.5, color=INK)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=8, labelcolor=INK, handlelength=1.0
    )
    return figure_of(axes)


def _shade_phases(axes: Axes, calls: list[Call], first: int) -> None:
    """Shades the area above the bars by phase, with a span for each run of calls of one phase."""
    runs = [(phase, list(run)) for phase, run in groupby(calls, key=lambda call: call.phase)]
    ends = [run[0].start for _, run in runs[1:]] + [calls[-1].start]
    whole = ends[-1] - first or 1
    for (phase, run), end in zip(runs, ends, strict=True):
        left, right = (run[0].start - first) / 1e6, (end - first) / 1e6
        axes.axvspan(left, right, color=_PHASES[phase], zorder=0, linewidth=0)
        if (end - run[0].start) / whole > 0.08:
            axes.text((left + right) / 2, 106, phase, ha="center", va="center", fontsize=8, color=INK)
        if left:
            axes.axvline(left, color=INK, linewidth=0.7, alpha=0.5)


def plot_casts(report: TraceRecords, axes: Axes | None = None) -> Figure:
    """Plots the bytes of the casts made, for the modules with most bytes.

    Args:
        report: The report.
        axes: The axes to draw on. Default: a new figure.

    Returns:
        The figure.

    Raises:
        MissingPackageError: matplotlib is not installed. It is an ImportError.
    """
    groups = [group for group in report.by_module() if group.bytes]
    shown = groups[:_MODULES]
    axes = new_figure((9.0, 0.9 + 0.27 * max(1, len(shown)))).subplots() if axes is None else axes
    left_out = f", the first {len(shown)} of {count(len(groups), 'module')}" if len(groups) > len(shown) else ""
    decorate(axes, f"Bytes of casts by module{left_out}")
    if not shown:
        return write_empty(axes, "no casts were made")
    rows = range(len(shown))
    again = [group.repeated_bytes for group in shown]
    once = [group.bytes - group.repeated_bytes for group in shown]
    axes.barh(rows, once, height=0.62, color=_COLORS["float32"], label="made once")
    axes.barh(rows, again, height=0.62, left=once, color=_COLORS["bfloat16"], label="repeated")
    for row, group in enumerate(shown):
        place = (group.bytes, row)
        axes.annotate(size(group.bytes), place, (5, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    labels = [label_of(group.key) or "(outside of modules)" for group in shown]
    axes.set_yticks(rows, labels, fontsize=8, color=INK)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * max(group.bytes for group in shown))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if any(again):
        axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK, handlelength=1.0)
    return figure_of(axes)


class TraceReport(TraceRecords):
    """The report of `trace`: its calls, their sums, and methods to query and save them.

    Its attributes `calls`, `dropped`, `device_names`, `torch_version`, `not_seen` and `steps`, and its tables
    `by_op()`, `by_module()`, `by_line()` and `casts()` are those of `TraceRecords`.
    """

    def by_op(self) -> GroupTable:
        """Returns the calls by op and overload, most cast bytes first: a list that prints as a table."""
        return GroupTable(super().by_op())

    def by_module(self) -> GroupTable:
        """Returns the calls by module, most cast bytes first: a list that prints as a table."""
        return GroupTable(super().by_module())

    def by_line(self) -> GroupTable:
        """Returns the calls by source line, most cast bytes first: a list that prints as a table."""
        return GroupTable(super().by_line())

    def explain(self, pattern: str) -> Explanation:
        """Explains the calls of a module, an op or a line: dtypes, casts, policies, and suggested changes.

        Args:
            pattern: A module's path ("blocks.3.attn"), an op ("softmax", "aten::softmax.int") or a line
                ("train.py:41").

        Raises:
            OptionError: Nothing in the trace matches. It is a ValueError.
        """
        return explain(self, pattern)

    def diff(self, other: TraceReport) -> TraceDiff:
        """Compares with another trace call by call, aligned by module, overload and running number.

        Args:
            other: The other trace, which ran later or under other policies. `TraceReport.load` reads one from a file.

        Raises:
            OptionError: `other` is not a report of `trace`. It is a ValueError.
        """
        if not isinstance(other, TraceReport):
            raise OptionError(
                f"diff() expects another report of trace(), got {other!r}. For a file, pass TraceReport.load(file)."
            )
        return compare_traces(self, other)

    def unused_overrides(self) -> list[UnusedOverride]:
        """Returns the overrides of regions and modules that no call in the block used, with their sources."""
        return unused_overrides(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-compatible values. `save("NAME.json")` writes them, and `load` reads that file."""
        return report_to_dict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the report. The extension selects the format: "run.html", "run.json", "run.csv", "run.trace.json".

        Args:
            path: The file. An .html file is a page; `load` and `torch-promote explain` read .json; .csv has a row for
                each call; .trace.json opens in Perfetto, next to a trace of torch.profiler.

        Raises:
            OptionError: The name has another ending, or the file cannot be written (for example because its folder does
                not exist). It is a ValueError. An existing file is then unchanged.
            MissingPackageError: A page needs jinja2, which is not installed. It is an ImportError.

        Example:
            >>> import tempfile, torch, torch_promote as tp
            >>> with tp.trace() as report, tp.my_autocast("cpu"):
            ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.save(f"{folder}/run.json")
            ...     TraceReport.load(f"{folder}/run.json").total == report.total
            True
        """
        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TraceReport:
        """Reads a report that `save` wrote as .json.

        Args:
            path: The file.

        Raises:
            OptionError: The file cannot be read, is not such a report, or was written by an incompatible version. It is
                a ValueError.
        """
        report = cls(max_calls=sys.maxsize)
        load(report, path)
        return report

    def plot(self) -> Figure:
        """Plots the dtypes over time, and the bytes of casts by module.

        Returns:
            A matplotlib figure, which a notebook displays.

        Raises:
            MissingPackageError: matplotlib is not installed. It is an ImportError.
        """
        return plot_trace(self)

    def __str__(self) -> str:
        return summarize(self)

    def __repr__(self) -> str:
        return f"<TraceReport: {self.total.calls:,} calls, {self.total.casts:,} casts>"

    def _repr_html_(self) -> str:
        return embed_page(self)
