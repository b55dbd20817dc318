"""The file of a recording, NAME.jsonl.gz: written as the program runs, or by `TraceReport.save`, and read by `load`.

NOTE [ The format ]
A gzip file of JSON lines (`zcat NAME.jsonl.gz` shows it). The first line is a dict with "format" and "version". A list
that begins with a text defines something, numbered from 0 by its kind, so that what repeats is written once:

    ["module", PATH]   ["tensor", {...}]   ["kind", {...}]   ["arguments", {...}]   ["values", [...]]
    ["source", {...}]  ["name", [source, kind, name]]   ["state", {...}]   ["step", {...}]   ["environment", {...}]

A list that begins with an int is a call: [kind, module, times, arguments, values, reads, draw, cast numbers]. `reads`
has [writer, ...] or [digest, writer, ...] for each input: writers are calls, counted backwards from this one, or -1 - i
for a source; without a digest, it is that of the only writer's only result. A dict at the end has what is known then.
Each step ends with a flush, so the file of a killed run can be read up to there. Nothing in a file is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import operator
import os
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_promote.errors import OptionError, say, shown
from torch_promote.observe.call import TENSORS, Call, TensorInfo, Unseen, arguments_of
from torch_promote.recording import SUFFIX
from torch_promote.recording.recording import Failure, OptimizerState, Read, Recording, Source, Step
from torch_promote.recording.values import NonfiniteValues, Values
from torch_promote.report.codec import decode, decode_record, encode, refuse_constant

__all__ = ["CALLS_TO_WRITE", "SUFFIX", "RecordingFile", "read_recording", "write_recording"]

_FORMAT, _VERSION = "torch_promote recording", 2
_GZIP = 31  # zlib's number for gzip files
#: After so many calls without an optimizer step, a file is flushed.
CALLS_TO_WRITE = 4096
#: The fields of a call that its kind does not have.
_OWN_FIELDS: dict[str, Any] = {
    "module": "",
    "thread": 0,
    "arguments": (),
    "start": 0,
    "duration": 0,
    "cast_time": 0,
}
#: The fields that are equal in all calls of a kind, besides the records of tensors.
_KIND_FIELDS = tuple(one.name for one in dataclasses.fields(Call) if one.name not in {*_OWN_FIELDS, "casts", *TENSORS})
_kind_fields_of = operator.attrgetter(*_KIND_FIELDS)
#: The number of definitions of a kind that the writer knows. A program has few modules and shapes, but ever new values.
_MOST_KNOWN = 8192


class RecordingFile:
    """Writes a recording, of which it keeps no more than the last definitions. The first write replaces a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise OptionError(f'`record` is the name of a file, "NAME{SUFFIX}", or None, got {shown(path)}.')
        self._path = Path(path)
        cannot = f"cannot record to {os.fspath(path)!r}:"
        if not self._path.name.endswith(SUFFIX):
            raise OptionError(f"{cannot} the name of a recording has to end in {SUFFIX}.")
        if self._path.is_dir():
            raise OptionError(f"{cannot} it is a folder. Name a file in it.")
        if not self._path.parent.is_dir():
            raise OptionError(f"{cannot} there is no folder {str(self._path.parent)!r}. Create it first.")
        self._path = self._path.absolute()  # the program may change the working directory
        self._prefixes = _prefixes()
        self._process = os.getpid()
        self._compressor = zlib.compressobj(wbits=_GZIP)
        self._file: Any = None
        self._old = _stamp(self._path) if self._path.exists() else None
        self._lines: list[str] = []
        self._numbers: dict[str, dict[Any, int]] = defaultdict(dict)
        self._values: dict[int, tuple[int, Values]] = {}  # by id, with their numbers
        self._next: dict[str, int] = {}
        self._kinds: dict[Any, tuple[int, Call]] = {}  # with a call that keeps the records of its tensors
        self._digests: dict[int, str] = {}  # of the calls with one result, the latest ones
        self._source_digests: dict[int, str] = {}
        self._environment: dict[str, str] = {}
        self._started = 0

    def add(
        self, number: int, call: Call, reads: Sequence[Read] = (), values: Sequence[Values] = (), draw: str = ""
    ) -> None:
        """Adds a call."""
        started, self._started = self._started, call.start
        if len(values) == 1:
            _keep(self._digests, number, values[0].digest)
        kind = self._number_of_kind(call)
        module, thread = self._number("module", call.module), self._number("thread", call.thread, lambda _: 0)
        # By their texts, since 1 == True and 0.0 == -0.0.
        arguments = self._number("arguments", repr(call.arguments), lambda _: encode(dict(call.arguments)))
        line = f"[{kind},{module},[{call.start - started},{call.duration},{call.cast_time},{thread}]"
        numbers = ",".join([str(self._number_of_values(one)) for one in values])
        read = ",".join([self._read(number, one) for one in reads])
        if draw or call.casts or read:
            line += f",{arguments},[{numbers}],[{read}]"
            line += f",{_json(draw)}" if draw or call.casts else ""
            line += f",{_json([(one.tensor, one.earlier) for one in call.casts])}" if call.casts else ""
        elif numbers or arguments:
            line += f",{arguments},[{numbers}]" if numbers else f",{arguments}"
        self._lines.append(f"{line}]")

    def _read(self, number: int, read: Read) -> str:
        written_by, digest = read
        if len(written_by) == 1:
            (writer,) = written_by
            if writer < 0:
                return f"[{writer}]" if digest == self._source_digests.get(writer) else f'["{digest}",{writer}]'
            counted = number - writer
            return f"[{counted}]" if digest == self._digests.get(writer) else f'["{digest}",{counted}]'
        writers = ",".join([str(one if one < 0 else number - one) for one in written_by])
        return f'["{digest}",{writers}]' if writers else f'["{digest}"]'

    def add_source(self, source: Source) -> None:
        """Adds a source."""
        number = self._next["source"] = self._next.get("source", 0) + 1
        _keep(self._source_digests, -number, source.values.digest)
        info, values = self._number_of_tensor(source.info), self._number_of_values(source.values)
        self._lines.append(_json(["source", {**_fields(source), "info": info, "values": values}]))

    def name_source(self, number: int, kind: str, name: str) -> None:
        """Names a source, -1 - i, that was added before its name was known."""
        self._lines.append(_json(["name", [-1 - number, kind, name]]))

    def add_state(self, state: OptimizerState) -> None:
        """Adds a state of the optimizers."""
        tensors = {name: self._number_of_values(values) for name, values in state.tensors.items()}
        self._lines.append(_json(["state", {"step": state.step, "tensors": tensors, "numbers": encode(state.numbers)}]))

    def add_step(self, step: Step) -> None:
        """Adds the end of a step."""
        parts = {
            "gradients": {name: self._number_of_values(values) for name, values in step.gradients.items()},
            "parameters": {name: self._number_of_values(values) for name, values in step.parameters.items()},
            "losses": [self._number_of_values(values) for values in step.losses],
        }
        self._lines.append(_json(["step", {"calls": step.calls, "rng": step.rng, **parts}]))

    def add_environment(self, environment: Mapping[str, str]) -> None:
        """Adds what results depend on, which the first line has as it is known then."""
        self._lines.append(_json(["environment", environment]))

    def flush(self, report: Recording, last: bool = False) -> None:
        """Writes what was added, and the `last` time the end. If the disk refuses, the report says so."""
        try:
            self.write(report, last)
        except OSError as error:
            self._close()
            self._process = -1  # what is in the file can be read
            text = f"The file of the recording ends before the run: {error.strerror or error}."
            report.not_seen.append(Unseen("unknown", 0, text))

    def write(self, report: Recording, last: bool) -> None:
        """The same; raises OSError if the disk refuses."""
        lines, self._lines = self._lines, []
        if os.getpid() != self._process:  # a forked process does not write its parent's file
            return
        if lines and self._file is None:
            header = {"format": _FORMAT, "version": _VERSION, "torch_version": report.torch_version, "rng": report.rng}
            lines.insert(0, _json({**header, "environment": report.environment}))
            self._file = self._open(report)
        elif lines and report.environment != self._environment:
            lines.append(_json(["environment", report.environment]))
        if lines:
            self._environment = dict(report.environment)
            self._put(lines, zlib.Z_SYNC_FLUSH)
        if last and self._file is not None:
            end = {name: encode(getattr(report, name)) for name in _END if name != "asked"}
            asked = [{**one, "policy_source": self._portable(one["policy_source"])} for one in report.asked]
            self._put([_json({**end, "asked": asked})], zlib.Z_FINISH)
            self._close()

    def _open(self, report: Recording) -> Any:
        """Opens the file, or one named after this process, if since this recording began another one has written it."""
        file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (open to the end of the trace)
        is_written = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_written = True
        except OSError:  # a file system without locks
            pass
        size = os.fstat(file.fileno()).st_size
        if is_written or (size and _stamp(self._path) != self._old):
            file.close()
            rank = report.environment.get("rank")
            tag, taken = f"pid{self._process}" if rank is None else f"rank{rank}", self._path
            self._path = taken.with_name(f"{taken.name.removesuffix(SUFFIX)}.{tag}{SUFFIX}")
            say(f"torch-promote: another recording has been written to {taken} meanwhile, so this one is {self._path}.")
            return open(self._path, "wb", buffering=0)
        if size:
            file.truncate(0)
        return file

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # which a forked process, such as a data worker, would keep
            self._file.close()
            self._file = None

    def _put(self, lines: Sequence[str], mode: int) -> None:
        data = "".join([f"{line}\n" for line in lines]).encode()
        self._file.write(self._compressor.compress(data) + self._compressor.flush(mode))

    def _number(self, kind: str, key: Any, data: Callable[[Any], Any] = encode) -> int:
        """The number of a definition, which is written if it is new."""
        number = self._numbers[kind].get(key)
        if number is None:
            number = self._next.get(kind, 0)
            self._next[kind] = number + 1
            _keep(self._numbers[kind], key, number)
            self._lines.append(_json([kind, data(key)]))
        return number

    def _number_of_kind(self, call: Call) -> int:
        tensors = id(call.inputs), id(call.ran_with), id(call.outputs)  # shared records, whose hashes would take long
        key = *tensors, *_kind_fields_of(call)
        if call.casts:
            key += tuple([(one.argument, one.to_dtype, one.reused, one.cache, one.avoidable) for one in call.casts])
        known = self._kinds.get(key)
        if known is not None:
            return known[0]
        unnumbered = tuple(dataclasses.replace(cast, tensor=0, earlier=0) for cast in call.casts)
        kind = dataclasses.replace(call, casts=unnumbered, **_OWN_FIELDS)
        number = self._number("kind", kind, self._kind)
        _keep(self._kinds, key, (number, call))
        return number

    def _kind(self, call: Call) -> dict[str, Any]:
        data = call.to_dict(self._number_of_tensor)
        data |= {name: self._portable(data[name]) for name in ("line", "policy_source")}
        return {name: value for name, value in data.items() if name not in _OWN_FIELDS}

    def _number_of_tensor(self, info: TensorInfo) -> int:
        return self._number("tensor", info)

    def _number_of_values(self, values: Values) -> int:
        known = self._values.get(id(values))
        if known is not None and known[1] is values:
            return known[0]
        number = self._next.get("values", 0)
        self._next["values"] = number + 1
        _keep(self._values, id(values), (number, values))
        self._lines.append(_json(["values", values.to_json()]))
        return number

    def _portable(self, text: str) -> str:
        """A line, or who set a policy, without the folders around the program and the packages."""
        for prefix in self._prefixes:
            text = text.replace(prefix, "")
        return re.sub(r"(^|(?<= ))(?:[A-Za-z]:)?[/\\]\S*[/\\]", "", text)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds to a dict of bounded size."""
    if len(known) >= _MOST_KNOWN:
        for old in list(known)[: _MOST_KNOWN // 2]:
            del known[old]
    known[key] = value


def _fields(record: Any) -> dict[str, Any]:
    return {
        one.name: encode(getattr(record, one.name))
        for one in dataclasses.fields(record)
        if one.name not in ("info", "values")
    }


#: What the end of a file has.
_END = {
    "steps": int,
    "device_names": list[str],
    "not_seen": list[Unseen],
    "nonfinite": NonfiniteValues,
    "asked": list[Any],
    "failure": Failure | None,
    "scaled_step": str,
    "undone": Counter[str],
}
#: The fields of an override that was asked for.
_ASKED = {**dict.fromkeys(("op", "device", "policy", "policy_source"), str), "used": bool}


def _prefixes() -> list[str]:
    folders = {os.path.abspath(one) for one in (os.getcwd(), *sys.path)} - {os.path.abspath(os.sep)}
    return sorted((f"{one}{os.sep}" for one in folders), key=len, reverse=True)


_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def write_recording(path: str | os.PathLike[str], report: Recording) -> None:
    """Writes a report whose block has ended; raises OptionError if the report lacks calls, beyond `max_calls`."""
    if report.dropped:
        raise OptionError(
            f"cannot save {report.dropped:,} calls beyond `max_calls`, which this report only sums up. Record them "
            "with `trace(record=...)`, or raise `max_calls`."
        )
    file = RecordingFile(path)
    file.add_environment(report.environment)  # so that there is a line without a call
    for source in report.sources:
        file.add_source(source)
    for number, call in enumerate(report.calls):
        file.add(
            number, call, report.reads.get(number, ()), report.values.get(number, ()), report.draws.get(number, "")
        )
    for state in report.states:
        file.add_state(state)
    for step in report.ends:
        file.add_step(step)
    file.write(report, last=True)


def read_recording(path: str | os.PathLike[str], report: Recording) -> None:
    """Fills an empty report from a file; raises OptionError if that is no recording of this version."""
    # KeyError, TypeError or ValueError: the file was changed.
    decompressor = zlib.decompressobj(wbits=_GZIP)
    try:
        data = decompressor.decompress(Path(path).read_bytes())
    except zlib.error as error:
        raise ValueError(f"it is not a gzip file, or was changed: {error}") from error
    *lines, rest = data.split(b"\n")  # a part of a line is what was written when the program was killed
    header: Any = {}
    with contextlib.suppress(ValueError):  # it is no JSON
        header = json.loads(lines[0]) if lines else {}
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f'its first line does not have "format": "{_FORMAT}"')
    if header.get("version") != _VERSION:
        raise OptionError(
            f"cannot read the recording {os.fspath(path)!r}: its version is {header.get('version')!r}, and this "
            f"torch_promote reads version {_VERSION}. Read it with the torch_promote that wrote it, or record again."
        )
    kinds = {"torch_version": str, "environment": dict[str, str], "rng": dict[str, str]}
    for name, value in decode_record(kinds, header).items():
        setattr(report, name, value)
    end = _Reader(report).read(lines[1:])
    _check(report)
    unset: dict[str, Any] = {"failure": None, "scaled_step": "", "undone": {}}  # in recordings of earlier versions
    for name, value in decode_record(_END, {**unset, **end}).items() if end is not None else ():
        setattr(report, name, value)
    report.asked = [decode_record(_ASKED, one) for one in report.asked]
    first = report.nonfinite.first_call
    if first is not None and not 0 <= first < len(report.calls) + report.dropped:
        raise ValueError(f"there is no call {first}, which made the first inf or NaN")
    if end is None or rest or not decompressor.eof:
        report.steps = len(report.ends)
        text = (
            "The recorded program was killed, or is still running: the file ends after "
            f"{len(report.ends):,} steps and {len(report.calls):,} calls."
        )
        report.not_seen.append(Unseen("unfinished", len(report.ends), text))


def _check(report: Recording) -> None:
    """Raises ValueError if a call or source names what the report does not have."""
    sources, calls = len(report.sources), len(report.calls) + report.dropped
    for number, reads in report.reads.items():
        if any(not -sources <= one < number for read in reads for one in read.written_by):
            raise ValueError(f"call {number} reads what is neither a call before it nor a source")
    for number, source in enumerate(report.sources):
        if any(not -sources <= one < calls for one in source.written_by):
            raise ValueError(f"source {number} was written by what is neither a call nor a source")


class _Reader:
    def __init__(self, report: Recording) -> None:
        self._report = report
        self._modules: list[str] = []
        self._tensors: list[TensorInfo] = []
        self._kinds: list[Call] = []
        self._values: list[Values] = []
        self._arguments: list[tuple[tuple[str, Any], ...]] = []
        self._known: dict[tuple[TensorInfo, ...], tuple[TensorInfo, ...]] = {}
        self._started = 0

    def read(self, lines: list[bytes]) -> dict[str, Any] | None:
        """Reads lines up to the end, which is returned; None if the file was not finished."""
        define: dict[str, Callable[[Any], None]] = {
            "module": lambda data: self._modules.append(decode(str, data)),
            "tensor": lambda data: self._tensors.append(decode(TensorInfo, {"owner": "", **data})),
            "kind": self._read_kind,
            "thread": lambda data: None,  # a call has its number
            "arguments": lambda data: self._arguments.append(arguments_of(decode(Mapping[str, Any], data))),
            "values": lambda data: self._values.append(Values.from_json(data)),
            "source": self._read_source,
            "name": self._read_name,
            "state": self._read_state,
            "step": self._read_step,
            "environment": self._read_environment,
        }
        for number, line in enumerate(lines, 2):
            try:
                data = json.loads(line, parse_constant=refuse_constant)
                if isinstance(data, dict):
                    return data
                if isinstance(data[0], str):
                    define[data[0]](data[1])
                else:
                    self._read_call(*data)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                raise ValueError(f"line {number} is wrong ({type(error).__name__}: {error})") from error
        return None

    def _read_environment(self, data: Any) -> None:
        self._report.environment = decode(dict[str, str], data)

    def _read_kind(self, data: Any) -> None:
        own = {name: encode(value) for name, value in _OWN_FIELDS.items()} | {"arguments": {}}
        call = Call.from_dict({**own, **data}, lambda number: _at(self._tensors, number))
        shared: dict[str, Any] = {name: getattr(call, name) for name in TENSORS}
        shared = {name: self._known.setdefault(infos, infos) for name, infos in shared.items()}
        self._kinds.append(dataclasses.replace(call, **shared))

    def _read_source(self, data: Any) -> None:
        info, values = _at(self._tensors, data["info"]), _at(self._values, data["values"])
        known = {"projections": ("", ""), **data, "info": info, "values": values}
        self._report.sources.append(decode(Source, known))

    def _read_name(self, data: Any) -> None:
        number, kind, name = data
        source = _at(self._report.sources, number)
        known = {one.name: getattr(source, one.name) for one in dataclasses.fields(source)}
        self._report.sources[number] = decode(Source, {**known, "kind": kind, "name": name})

    def _read_state(self, data: Any) -> None:
        tensors = {name: _at(self._values, number) for name, number in data["tensors"].items()}
        numbers = dict(arguments_of(decode(Mapping[str, Any], data["numbers"])))
        self._report.states.append(OptimizerState(decode(int, data["step"]), tensors, numbers))

    def _read_step(self, data: Any) -> None:
        def named(numbers: Mapping[str, int]) -> dict[str, Values]:
            return {name: _at(self._values, number) for name, number in numbers.items()}

        parts = {name: named(data[name]) for name in ("gradients", "parameters")}
        losses = [_at(self._values, number) for number in data["losses"]]
        self._report.ends.append(decode(Step, {**data, **parts, "losses": losses}))

    def _read_call(
        self,
        kind: int,
        module: int = 0,
        times: Any = (0, 0, 0, 0),
        arguments: int = 0,
        values: Any = (),
        reads: Any = (),
        draw: Any = "",
        casts: Any = (),
    ) -> None:
        start, duration, cast_time, thread = decode(tuple[int, int, int, int], times)
        self._started += start
        call = _at(self._kinds, kind)
        pairs = decode(list[tuple[int, int]], casts)
        own = [
            dataclasses.replace(cast, tensor=tensor, earlier=earlier)
            for cast, (tensor, earlier) in zip(call.casts, pairs, strict=True)
        ]
        number = self._report.add(
            dataclasses.replace(
                call,
                module=_at(self._modules, module),
                arguments=_at(self._arguments, arguments),
                casts=tuple(own),
                start=self._started,
                duration=duration,
                cast_time=cast_time,
                thread=thread,
            )
        )
        if number >= len(self._report.calls):
            return  # beyond `max_calls`
        if values:
            self._report.values[number] = tuple([_at(self._values, one) for one in values])
        if reads:
            self._report.reads[number] = tuple([self._read_of(number, one) for one in reads])
        if draw:
            self._report.draws[number] = decode(str, draw)

    def _read_of(self, number: int, data: Any) -> Read:
        digest, writers = (data[0], data[1:]) if data and isinstance(data[0], str) else (None, data)
        found = tuple([one if one < 0 else number - one for one in decode(list[int], writers)])
        if digest is None and len(found) == 1:
            (writer,) = found
            if writer < 0:
                digest = _at(self._report.sources, -1 - writer).values.digest
            else:
                (values,) = self._report.values[writer]
                digest = values.digest
        return Read(found, digest or "")


def _at(found: list[Any], number: Any) -> Any:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(found):
        raise ValueError(f"there is no definition {number!r}")
    return found[number]
