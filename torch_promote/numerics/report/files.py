"""File formats of reports: JSON (can be loaded), CSV, a page, and a trace for Perfetto.

NOTE [ Tensors in JSON ]
A program has few kinds of tensors, and calls ops on them repeatedly. So the file lists each `TensorInfo` once, under
"tensors", and calls refer to them by index.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch_promote.numerics.pages.saving import read_json, save_as, to_json
from torch_promote.numerics.ranges.values import Values
from torch_promote.numerics.records.calls import Call
from torch_promote.numerics.records.groups import Totals
from torch_promote.numerics.report.page import make_page
from torch_promote.numerics.report.perfetto import perfetto_trace

if TYPE_CHECKING:
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["FORMAT", "VERSION", "fill_from_dict", "load", "report_to_dict", "save"]

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
        report._totals = Totals.from_lists(data["groups"], data["casts"])
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
_COLUMNS = (
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
    writer.writerow([*_COLUMNS, *measured])
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
