"""Exports a report in the trace event format of Perfetto and chrome://tracing.

NOTE [ Time base ]
torch.profiler counts microseconds from `baseTimeNanoseconds`: the current time rounded down to a multiple of 7,889,238
seconds (libkineto, ChromeTraceBaseTime). These events use the same origin, so they line up with a profiler's trace of
the same block. Perfetto ignores `baseTimeNanoseconds` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch_promote.observe.events import Call
from torch_promote.reference.dtypes import dtype_name

if TYPE_CHECKING:
    from torch_promote.observe.events import Recording

__all__ = ["perfetto_trace"]


_PERIOD = 7_889_238 * 10**9
_PROCESS = "torch_promote trace"


def perfetto_trace(report: Recording) -> dict[str, Any]:
    """Returns the report as a trace: a slice for each call on the track of its thread, and a counter of cast bytes.

    A call that casts has the category "cast", and its name contains the target dtype, so that Perfetto gives it a
    separate colour.

    Args:
        report: The report.
    """
    calls = sorted(report.calls, key=lambda call: (call.start, -call.duration))
    base = calls[0].start // _PERIOD * _PERIOD if calls else 0
    threads = dict.fromkeys(call.thread for call in calls)
    events: list[dict[str, Any]] = [_named("process_name", 0, _PROCESS)]
    events += [_named("thread_name", thread, f"thread {thread}") for thread in threads]
    events += [_slice(call, base) for call in calls]
    events += _counter(calls, base)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "traceEvents": events,
        "otherData": {"torch": report.torch_version, "dropped calls": report.dropped, "not seen": report.not_seen},
    }


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _slice(call: Call, base: int) -> dict[str, Any]:
    to = ", ".join(dict.fromkeys(dtype_name(cast.to_dtype) for cast in call.casts))
    event = {
        "ph": "X",
        "cat": "cast" if call.casts else "composite op" if call.composite else "op",
        "name": f"{call.name} [cast to {to}]" if to else call.name,
        "pid": _PROCESS,
        "tid": call.thread,
        "ts": _microseconds(call.start - base),
        "dur": _microseconds(call.duration),
        "args": {name: text for name, text in _arguments(call) if text},
    }
    if call.casts:
        event["cname"] = "bad"  # orange in chrome://tracing
    return event


def _arguments(call: Call) -> Iterator[tuple[str, Any]]:
    yield "dtypes", call.dtypes
    yield "module", call.module
    yield "phase", call.phase
    yield "line", call.line
    yield "policy", call.policy_name
    yield "said by", call.said_by
    yield "casts", [str(cast) for cast in call.casts]
    yield "cast time (us)", _microseconds(call.cast_time)
    yield "inputs", [str(info) for info in call.inputs]
    yield "ran with", [] if call.ran_with == call.inputs else [str(info) for info in call.ran_with]
    yield "outputs", [str(info) for info in call.outputs]
    yield "autocast", {device: dtype_name(dtype) for device, dtype in call.autocast}
    yield "raised", call.error


def _counter(calls: list[Call], base: int) -> Iterator[dict[str, Any]]:
    made = 0
    for call in calls:
        size = sum(cast.bytes for cast in call.casts if not cast.reused)
        if size:
            made += size
            ts = _microseconds(call.start - base)
            yield {"ph": "C", "name": "bytes cast", "pid": _PROCESS, "tid": 0, "ts": ts, "args": {"bytes": made}}


def _microseconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 3)
