"""`TraceReport`, the report of `trace`, and its file formats.

NOTE [ Time base of Perfetto ]
torch.profiler counts microseconds from `baseTimeNanoseconds`: the current time rounded down to a multiple of 7,889,238
seconds (libkineto, ChromeTraceBaseTime). The events for Perfetto use the same origin, so they line up with a profiler's
trace of the same block. Perfetto ignores `baseTimeNanoseconds` itself.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, get_args

from torch_promote.errors import OptionError
from torch_promote.observe.difference import Difference
from torch_promote.observe.events import (
    COMPILED,
    COMPILED_CALLS,
    TENSORS,
    Call,
    CallGroup,
    CastGroup,
    Phase,
    Place,
    Recording,
    Source,
    Step,
    TensorInfo,
)
from torch_promote.observe.explanation import Explanation, describe_call, explain
from torch_promote.observe.findings import (
    OPTIMIZER,
    by_weight,
    casts_chart,
    dtypes_chart,
    exponents_chart,
    float8_table,
    module_tree,
    modules_and_optimizer,
    result_dtypes,
    savings,
    time_in_casts,
)
from torch_promote.observe.policy_sources import UnusedOverride
from torch_promote.observe.recording_file import check_reads, is_recording, read_recording
from torch_promote.observe.values import NonfiniteValues, Values
from torch_promote.observe.verdict import compare_traces
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import (
    Column,
    Content,
    Fact,
    Listing,
    Part,
    Report,
    Table,
    module_name,
    percent,
    size,
    to_csv,
    to_json,
)
from torch_promote.report.codec import WRONG_DATA, decode, decode_list, decode_record, encode

__all__ = ["TraceReport"]


class TraceReport(Recording, Report):
    """The report of `trace`: its calls, their sums, and methods to query and save them.

    Attributes:
        calls: The first `max_calls` calls, in the order in which they ended: an op after the ops that it calls.
        dropped: The number of calls after those. Sums and tables include them.
        device_names: The names of the GPUs that were used.
        torch_version: PyTorch's version.
        not_seen: Computations of the block that are not in the report, one sentence each.
        steps: The number of optimizer steps that ended in the block.
        nonfinite: With `values=True`, the losses that are inf or NaN, and the call that made the first of these values.
        first_nonfinite: That `Call`, or None.
        sources: With `values=True`, the tensors that no recorded call made: a list of `Source`.
        ends: With `values=True`, the losses, gradients and parameters at the end of each step: a list of `Step`.
        environment: With `values=True`, what results may depend on: versions, devices, threads, settings, by name.
        total: The sums over all calls, a `CallGroup`.
    """

    NOUN: ClassVar[str] = "trace"
    FORMAT: ClassVar[str] = "torch_promote trace"
    VERSION: ClassVar[int] = 2

    def explain(self, pattern: str) -> Explanation:
        """Explains the calls of a module, an op or a line: dtypes, casts, policies, and suggested changes.

        Args:
            pattern: A module's path ("blocks.3.attn"), including its submodules, or "(model)": the calls of the model
                itself and outside of modules; an op ("softmax", "aten::softmax", "aten::softmax.int"); or the end of a
                line ("train.py:41", "train.py"). If it is ambiguous, add a prefix: "module=softmax", "op=softmax".

        Raises:
            OptionError: The pattern matches nothing in the trace, or is ambiguous. It is a ValueError.
        """
        return explain(self, pattern)

    def diff(self, other: TraceReport) -> Difference:
        """Compares with another trace: the first call that differs and why, and where errors grow.

        With values in both traces, contents are compared; otherwise dtypes, policies and casts.

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

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a report that `save` wrote as .json, or a recording of `trace(record="NAME.jsonl.gz")`.

        A recording has no times, and of the values only digests, norms, sketches and the numbers of inf and NaN.

        Args:
            path: The file.

        Raises:
            OptionError: The file cannot be read, is neither of these, or was written by an incompatible version. It is
                a ValueError.
        """
        if not is_recording(path):
            return super().load(path)
        report = cls(max_calls=sys.maxsize)
        try:
            read_recording(path, report)
        except OptionError:
            raise
        except (OSError, *WRONG_DATA) as error:
            text = error.strerror or error if isinstance(error, OSError) else error
            raise OptionError(f"cannot read the recording {os.fspath(path)!r}: {text}.") from error
        return report

    def unused_overrides(self) -> list[UnusedOverride]:
        """Returns the overrides of regions and modules that no call in the block used, with their sources.

        An override that repeats the op's existing policy counts as unused.
        """
        names = ("op", "device", "policy", "said_by")
        return [UnusedOverride(*(one[name] for name in names)) for one in self.asked if not one["used"]]

    def content(self) -> Content:
        """Returns the verdict, the numbers, the ops, casts and suggestions, and for the page modules and charts."""
        steps = f", optimizer steps: {self.steps:,}" if self.steps else ""
        title = f"trace: torch {self.torch_version}{steps}{''.join(f', {name}' for name in self.device_names)}"
        losses = self.nonfinite.about_losses(self.steps)
        if not losses and (self.nonfinite.losses or not self.nonfinite.nan_calls):
            return Content(title, self._verdict(), list(self._facts()), list(self._parts()))
        what = losses or f"NaN in results of {self.nonfinite.nan_calls:,} calls"
        verdict = f"{what[0].upper()}{what[1:]}. {self._first_nonfinite()} {self._verdict()}"
        return Content(f"{title}, {what}", verdict, list(self._facts()), list(self._parts()), good=False)

    def _first_nonfinite(self) -> str:
        first = self.first_nonfinite
        if first is None:
            return "The call that made the first of these values is not in this report."
        return f"The first inf or NaN: {describe_call(first, self.nonfinite.call_step)}."

    def _verdict(self) -> str:
        total = self._total_of_model()
        if not total.calls:
            return "Only optimizers called ops." if self.total.calls else "No call was recorded."
        raised = f" Calls that raised: {total.errors:,}." if total.errors else ""
        having = total.policies.total()
        if not having and (total.rules[COMPILED] or any(one.startswith(COMPILED_CALLS) for one in self.not_seen)):
            return (
                f"Autocast had no policy for the calls in this trace ({total.calls:,}). The casts of compiled "
                f"functions are part of their graphs.{raised}"
            )
        if not having:
            return (
                f"Autocast was off or had no policy for all calls ({total.calls:,}), which kept their dtypes.{raised}"
            )
        casts = f"Casts made: {total.casts:,} ({size(total.bytes)}), {total.repeated:,} of them repeated."
        return f"Autocast had a policy for {having:,} of {total.calls:,} calls. {casts}{raised}"

    def _total_of_model(self) -> CallGroup:
        """The sums without the calls of optimizers, which run in the dtypes of the weights."""
        total = CallGroup("")
        for group in modules_and_optimizer(self):
            if group.key != OPTIMIZER:
                total.merge(group)
        return total

    def _facts(self) -> Iterable[Fact]:
        total, of_model, nonfinite = self.total, self._total_of_model(), self.nonfinite
        if nonfinite.kind:
            yield "losses", f"{nonfinite.nans + nonfinite.infs:,} of {nonfinite.losses:,} {nonfinite.kind}"
        if nonfinite.calls:
            first = self.first_nonfinite
            where = "" if first is None else f"first: {describe_call(first, nonfinite.call_step)}"
            yield "calls with inf or NaN", f"{nonfinite.calls:,}", where
        phases = (f"{total.phases[phase]:,} {phase}" for phase in get_args(Phase) if total.phases[phase])
        yield "calls", f"{total.calls:,}", ", ".join(phases)
        results = sorted(result_dtypes(of_model.dtypes).items(), key=lambda item: -item[1])
        shares = [f"{percent(calls, of_model.calls)} {name}" for name, calls in results]
        if shares:
            yield "results", shares[0], ", ".join(shares[1:])
        yield "casts", f"{total.casts:,}", f"{size(total.bytes)}; {total.reused:,} more reused from a cache"
        if total.repeated:
            yield "repeated casts", f"{total.repeated:,}", size(total.repeated_bytes)
        share = time_in_casts(self)
        if share is not None:
            yield "time in casts", percent(share), "of the calls' time on the host"
        threads = len({call.thread for call in self.calls})
        if threads > 1:
            yield "threads", f"{threads:,}"
        if total.errors:
            yield "errors", f"{total.errors:,}", "calls that raised"

    def _parts(self) -> Iterable[Part]:
        yield module_tree(modules_and_optimizer(self))
        yield self._ops()
        yield self._casts()
        columns = Column("change", "code"), Column("casts", "count"), Column("bytes", "bytes"), "effect"
        yield Table("Fewer casts", columns, savings(self.calls), most=5)
        unused = [(one.op, one.policy, one.device, one.said_by) for one in self.unused_overrides()]
        yield Table("No call used these overrides", (Column("op", "name"), "policy", "device", "set by"), unused)
        yield casts_chart(self.by_module())
        yield dtypes_chart(self)
        exponents = exponents_chart(self.calls)
        if exponents is not None:
            yield exponents
        yield float8_table(self.calls)
        dropped = f"Calls after the first {len(self.calls):,}, which only sums and tables include: {self.dropped:,}."
        yield Listing("Not in this report", [*self.not_seen, *([dropped] if self.dropped else [])])

    def _ops(self) -> Table:
        rows = [
            (
                group.key,
                group.calls,
                group.dtypes,
                group.casts or None,
                group.reused or None,
                group.bytes or None,
                group.policies,
                group.errors or None,
                group.duration / 1e6,
            )
            for group in by_weight(self.by_op())
        ]
        columns = (
            Column("op", "name"),
            Column("calls", "count"),
            Column("dtypes", "dtypes"),
            Column("casts", "count"),
            Column("reused", "count", "page"),
            Column("bytes", "bytes"),
            Column("policy", "policy"),
            Column("errors", "count", "page"),
            Column("ms", "ms", "page"),
        )
        note = (
            "Dtypes of inputs, of inputs after casts, and of outputs. A composite op and the ops that it calls are "
            "separate calls."
        )
        return Table("Ops", columns, rows, note=note)

    def _casts(self) -> Table:
        rows = [
            (
                f"{one.from_dtype} -> {one.to_dtype}",
                f"{one.argument} ({one.kind})",
                one.op,
                module_name(one.module),
                one.line or None,
                one.made,
                one.reused or None,
                one.bytes,
                one.repeated or None,
                one.repeated_bytes or None,
            )
            for one in sorted(self.casts(), key=lambda one: -one.repeated_bytes)
        ]
        columns = (
            Column("cast", "dtypes"),
            "argument",
            Column("op", "name", "page"),
            Column("module", "name", "page"),
            Column("at", "line"),
            "made",
            Column("reused", "count"),
            Column("bytes", "bytes"),
            "repeated",
            Column("bytes again", "bytes"),
        )
        note = "Repeated: of a tensor that was cast to that dtype before, without a change in between."
        return Table("Where casts are made", columns, rows, most=5, note=note)

    def formats(self) -> dict[str, tuple[str, Callable[[], str]]]:
        """Returns the formats of `save`: "run.html", "run.json", "run.csv" (a row for each call), "run.trace.json"."""
        return {
            ".trace.json": ("for Perfetto", self._perfetto),
            **super().formats(),
            ".csv": ("a row for each call", self._csv),
        }

    def _perfetto(self) -> str:
        """A slice for each call on the track of its thread, and a counter of cast bytes.

        A call that casts has the category "cast", and its name contains the target dtype, so that Perfetto gives it a
        separate colour.
        """
        calls = sorted(self.calls, key=lambda call: (call.start, -call.duration))
        base = calls[0].start // _PERIOD * _PERIOD if calls else 0
        names = [("process_name", 0, _PROCESS)]
        names += [("thread_name", thread, f"thread {thread}") for thread in {call.thread: None for call in calls}]
        events = [{"ph": "M", "name": n, "pid": _PROCESS, "tid": thread, "args": {"name": v}} for n, thread, v in names]
        made = 0
        for call in calls:
            ts = (call.start - base) / 1000
            events.append(_slice(call, ts))
            size = sum(cast.bytes for cast in call.casts if not cast.reused)
            made += size
            if size:
                counter = {"ph": "C", "name": "bytes cast", "tid": 0, "args": {"bytes": made}}
                events.append({**counter, "pid": _PROCESS, "ts": ts})
        data = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base,
            "traceEvents": events,
            "otherData": {"torch": self.torch_version, "dropped calls": self.dropped, "not seen": self.not_seen},
        }
        return to_json(data)

    def _csv(self) -> str:
        measured = list(dict.fromkeys(name for call in self.calls for one in call.values for name in _numbers_of(one)))
        scalars = ("op", "overload", "module", "phase", "line")
        rows = []
        for call in list(self.calls):
            autocast = (f"{device}: {dtype_name(dtype)}" for device, dtype in call.autocast)
            numbers = [_numbers_of(values) for values in call.values]
            rows.append(
                [
                    *(getattr(call, name) for name in scalars),
                    *(_joined(getattr(call, name)) for name in TENSORS),
                    _joined(call.casts),
                    sum(cast.bytes for cast in call.casts if not cast.reused),
                    call.policy_name,
                    call.said_by,
                    call.composite,
                    call.error,
                    _joined(autocast),
                    call.thread,
                    call.start,
                    call.duration,
                    call.cast_time,
                    *(_joined(one.get(name, "") for one in numbers) for name in measured),
                ]
            )
        header = (
            *scalars,
            *TENSORS,
            "casts",
            "cast_bytes",
            "policy",
            "said_by",
            "composite",
            "error",
            "autocast",
            "thread",
            "start",
            "duration",
            "cast_time",
            *measured,
        )
        return to_csv(header, rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-compatible values. `save("NAME.json")` writes them, and `load` reads that file.

        Returns:
            A dict with "format", "version", "torch_version", "steps", "dropped", "device_names", "not_seen", "asked"
            (the overrides that were asked for), "nonfinite", "sources", "ends", "environment", "totals" (of all calls),
            "tensors", "calls" (as in `Call.to_dict`, but inputs, ran_with and outputs are indices into "tensors",
            because a program has few kinds of tensors), "groups" (the calls by op, module and line) and "casts" (by
            argument, op, module and line).
        """
        tensors: dict[TensorInfo, int] = {}
        calls = [call.to_dict(lambda info: tensors.setdefault(info, len(tensors))) for call in list(self.calls)]
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            **{name: encode(getattr(self, name)) for name in (*_PLAIN, *_RECORDED, "asked")},
            "totals": encode(self.total),
            "tensors": encode(list(tensors)),
            "calls": calls,
            "groups": [
                {"op": op, "module": module, "line": line, **_without_key(encode(group))}
                for (op, module, line), group in self.groups().items()
            ],
            "casts": encode(self.casts()),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the report whose `to_dict` returned the data.

        Raises:
            KeyError, TypeError, ValueError: The data is incomplete or was changed.
        """
        report = cls(max_calls=sys.maxsize)
        sums = {"totals": CallGroup, "casts": list[CastGroup]}
        read = decode_record({**_PLAIN, **_RECORDED, **sums, "tensors": list[TensorInfo]}, data)

        def tensor(index: Any) -> TensorInfo:
            if decode(int, index) not in range(len(read["tensors"])):
                raise ValueError(f"there is no tensors[{index}]")
            return read["tensors"][index]  # type: ignore[no-any-return]

        def group(one: Any) -> tuple[Place, CallGroup]:
            place = decode_record(dict.fromkeys(("op", "module", "line"), str), one)
            return (place["op"], place["module"], place["line"]), decode(CallGroup, {"key": "", **one})

        for call in decode_list(data, "calls", lambda one: Call.from_dict(one, tensor)):
            report.add(call)
        groups = dict(decode_list(data, "groups", group))
        if read["dropped"]:
            report._summed = len(report.calls)
            report._by_place.update(groups)
            for casts in read["casts"]:
                report._casts_by_place[tuple(map(str, dataclasses.astuple(casts)[:7]))] = casts
        for name in (*_PLAIN, *_RECORDED):
            setattr(report, name, read[name])
        report.asked = decode_list(data, "asked", lambda one: decode_record(_ASKED, one))
        _ = report.first_nonfinite  # raises IndexError if there is no such call
        check_reads(report)
        return report

    def __repr__(self) -> str:
        return f"<TraceReport: {self.total.calls:,} calls, {self.total.casts:,} casts>"


def _numbers_of(values: Values) -> dict[str, Any]:
    """The numbers of a `Values`, without its histogram and sketch."""
    return {name: value for name, value in values.to_dict().items() if name not in ("exponents", "sketch")}


def _joined(parts: Iterable[object]) -> str:
    return "; ".join(map(str, parts))


def _without_key(group: dict[str, Any]) -> dict[str, Any]:
    """A group's record without the key, which its op, module and line tell."""
    return {name: value for name, value in group.items() if name != "key"}


#: The attributes of a report that its JSON has as they are.
_PLAIN = {"torch_version": str, "steps": int, "dropped": int, "device_names": list[str], "not_seen": list[str]}
#: Those that `values=True` fills.
_RECORDED = {
    "nonfinite": NonfiniteValues,
    "sources": list[Source],
    "ends": list[Step],
    "environment": dict[str, str],
}
#: The fields of an override that was asked for.
_ASKED = {**dict.fromkeys(("op", "device", "policy", "said_by"), str), "used": bool}
_PERIOD = 7_889_238 * 10**9
_PROCESS = "torch_promote trace"


def _slice(call: Call, ts: float) -> dict[str, Any]:
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
        "ts": ts,
        "dur": call.duration / 1000,
        "args": {name: value for name, value in known.items() if value},
        **({"cname": "bad"} if to else {}),  # orange in chrome://tracing
    }
