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
    known = {
        "dtypes": call.dtypes,
        **{name: getattr(call, name) for name in ("module", "phase", "line")},
        "policy": call.policy_name,
        "said by": call.said_by,
        "casts": list(map(str, call.casts)),
        "cast time (us)": call.cast_time / 1000,
        "inputs": list(map(str, call.inputs)),
        "ran with": [] if call.ran_with == call.inputs else list(map(str, call.ran_with)),
        "outputs": list(map(str, call.outputs)),
        "autocast": {device: dtype_name(dtype) for device, dtype in call.autocast},
        "raised": call.error,
    }
    return {
        "ph": "X",
        "cat": "cast" if call.casts else "composite op" if call.composite else "op",
        "name": f"{call.name} [cast to {to}]" if to else call.name,
        "pid": _PROCESS,
        "tid": call.thread,
        "ts": (call.start - base) / 1000,
        "dur": call.duration / 1000,
        "args": {name: value for name, value in known.items() if value},
        **({"cname": "bad"} if to else {}),  # orange in chrome://tracing
    }


def _counter(calls: list[Call], base: int) -> Iterator[dict[str, Any]]:
    made = 0
    for call in calls:
        size = sum(cast.bytes for cast in call.casts if not cast.reused)
        made += size
        if size:
            ts = (call.start - base) / 1000
            yield {"ph": "C", "name": "bytes cast", "pid": _PROCESS, "tid": 0, "ts": ts, "args": {"bytes": made}}
