"""The file of a recording, NAME.jsonl.gz: small, written as the program runs, and read again by `TraceReport.load`.

NOTE [ The format ]
A gzip file of JSON lines (`zcat NAME.jsonl.gz` shows it). The first line is a dict with "format" and "version". A list
that begins with a text defines something, numbered from 0 by its kind, so that what repeats is written once:

    ["module", PATH]   ["tensor", {...}]   ["kind", {...}]   ["values", ...]   ["source", {...}]   ["step", {...}]

A list that begins with an int is a call: [kind, module, reads, values]. `reads` counts calls backwards from this one;
a source is -1 - i. Only results that calls of the program computed have values, and those of optimizers no sketch: the
parameters in "step" have one. A dict at the end has what is known then. Each step ends with a flush, so the file of a
killed run can be read up to there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_promote.errors import OptionError
from torch_promote.observe.events import UNFINISHED, Call, Recording, Source, Step, TensorInfo
from torch_promote.observe.values import Values, check_sketch
from torch_promote.report.codec import decode, decode_record, encode

__all__ = ["SUFFIX", "RecordingFile", "check_reads", "is_recording", "read_recording"]

SUFFIX = ".jsonl.gz"
_FORMAT, _VERSION = "torch_promote recording", 1
_GZIP = 31  # zlib's number for gzip files
#: The fields of a call that its kind does not have.
_OWN_FIELDS: dict[str, Any] = {
    "module": "",
    "thread": 0,
    "start": 0,
    "duration": 0,
    "cast_time": 0,
    "values": (),
    "reads": (),
}
#: The fields that are equal in all calls of a kind, besides the records of tensors.
_KIND_FIELDS = tuple(
    one.name for one in dataclasses.fields(Call) if one.name not in {*_OWN_FIELDS, "inputs", "ran_with", "outputs"}
)


class RecordingFile:
    """Writes a recording.

    Args:
        path: The file. It replaces an existing one when something is first written to it.

    Raises:
        OptionError: The file cannot be written. It is a ValueError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise OptionError(f'`record` is the name of a file, "NAME{SUFFIX}", or None, got {path!r}.')
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
        self._lines: list[str] = []
        self._numbers: dict[str, dict[Any, int]] = {}
        self._calls: dict[int, tuple[Call, tuple[tuple[int, ...], ...], bool]] = {}  # those that are not written yet
        self._values: dict[int, tuple[Values, ...]] = {}
        self._kinds: dict[Any, tuple[int, Call]] = {}  # with a call that keeps the records of its tensors
        self._sources = self._steps = 0

    def add(self, number: int, call: Call, reads: tuple[tuple[int, ...], ...], has_values: bool) -> None:
        """Adds a call. `has_values`: whether to write the values of its results, which follow."""
        self._calls[number] = call, reads, has_values

    def add_values(self, number: int, values: tuple[Values, ...]) -> None:
        """Adds the values of a call's results."""
        if self._calls[number][2]:
            self._values[number] = values

    def flush(self, report: Recording) -> None:
        """Writes what is known so far: the calls, and the new sources and steps of a report."""
        if os.getpid() != self._process or not self._calls:  # a forked process does not write its parent's file
            return
        if self._file is None:
            header = {"format": _FORMAT, "version": _VERSION, "torch_version": report.torch_version}
            self._lines.append(_json({**header, "environment": report.environment}))
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 (open to the end of the trace)
        for source in report.sources[self._sources :]:
            self._write_source(source)
        self._sources = len(report.sources)
        for number, (call, reads, _) in self._calls.items():
            self._write_call(number, call, reads, self._values.get(number, ()))
        self._calls, self._values = {}, {}
        for step in report.ends[self._steps :]:
            parts = {
                "gradients": {name: self._number_of_values(values) for name, values in step.gradients.items()},
                "parameters": {name: self._number_of_values(values) for name, values in step.parameters.items()},
                "losses": [self._number_of_values(values) for values in step.losses],
            }
            self._lines.append(_json(["step", {"calls": step.calls, "rng": step.rng, **parts}]))
        self._steps = len(report.ends)
        self._put(zlib.Z_SYNC_FLUSH)

    def close(self, report: Recording) -> None:
        """Writes the end of a recording."""
        self.flush(report)
        if self._file is not None and os.getpid() == self._process:
            end = {name: encode(getattr(report, name)) for name in _END if name != "asked"}
            asked = [{**one, "said_by": self._portable(one["said_by"])} for one in report.asked]
            self._lines.append(_json({**end, "asked": asked}))
            self._put(zlib.Z_FINISH)
            self._file.close()
            self._file = None

    def _put(self, mode: int) -> None:
        data = "".join(f"{line}\n" for line in self._lines).encode()
        self._lines = []
        self._file.write(self._compressor.compress(data) + self._compressor.flush(mode))

    def _number(self, kind: str, key: Any, data: Callable[[], Any]) -> int:
        """The number of a definition, which is written if it is new."""
        known = self._numbers.setdefault(kind, {})
        number = known.get(key)
        if number is None:
            number = known[key] = len(known)
            self._lines.append(_json([kind, data()]))
        return number

    def _write_call(self, number: int, call: Call, reads: tuple[tuple[int, ...], ...], values: Any) -> None:
        line = [
            self._number_of_kind(call),
            self._number("module", call.module, lambda: call.module),
            [[one if one < 0 else number - one for one in read] for read in reads],
            [self._number_of_values(one, call.phase != "optimizer") for one in values],
        ]
        while line and line[-1] == []:
            line.pop()
        self._lines.append(_json(line))

    def _number_of_kind(self, call: Call) -> int:
        tensors = id(call.inputs), id(call.ran_with), id(call.outputs)  # shared records, whose hashes would take long
        key = *tensors, *(getattr(call, name) for name in _KIND_FIELDS)
        known = self._kinds.get(key)
        if known is not None:
            return known[0]
        casts = tuple(dataclasses.replace(cast, tensor=0, earlier=0) for cast in call.casts)
        kind = dataclasses.replace(call, casts=casts, **_OWN_FIELDS)
        number = self._number("kind", kind, lambda: self._kind(kind))
        if not casts:  # their numbers differ from call to call
            self._kinds[key] = number, call
        return number

    def _kind(self, call: Call) -> dict[str, Any]:
        data = call.to_dict(self._number_of_tensor)
        data |= {name: self._portable(data[name]) for name in ("line", "said_by")}
        return {name: value for name, value in data.items() if name not in _OWN_FIELDS}

    def _number_of_tensor(self, info: TensorInfo) -> int:
        return self._number("tensor", info, lambda: encode(info))

    def _number_of_values(self, values: Values, has_sketch: bool = True) -> int:
        """The number of values, with or without their sketch."""
        sketch = values.sketch if has_sketch else ""
        amax, l2 = (None if one is None else float(f"{one:.9g}") for one in (values.amax, values.l2))
        data = [values.digest, values.count, amax, l2, values.infs, values.nans, sketch]
        return self._number("values", tuple(data), lambda: encode(data))

    def _write_source(self, source: Source) -> None:
        data = {
            "kind": source.kind,
            "name": source.name,
            "info": self._number_of_tensor(source.info),
            "values": self._number_of_values(source.values),
            "written_by": list(source.written_by),
        }
        self._lines.append(_json(["source", data]))

    def _portable(self, text: str) -> str:
        """A line, or who set a policy, without the folders around the program and the packages."""
        for prefix in self._prefixes:
            text = text.replace(prefix, "")
        return re.sub(r"(^|(?<= ))(?:[A-Za-z]:)?[/\\]\S*[/\\]", "", text)


#: What the end of a file has.
_END = {
    "steps": int,
    "device_names": list[str],
    "not_seen": list[str],
    "asked": list[Any],
}


def _prefixes() -> list[str]:
    folders = {os.path.abspath(one) for one in (os.getcwd(), *sys.path)} - {os.path.abspath(os.sep)}
    return sorted((f"{one}{os.sep}" for one in folders), key=len, reverse=True)


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Whether the name of a file is that of a recording."""
    return os.fspath(path).endswith(SUFFIX)


def check_reads(report: Recording) -> None:
    """Raises ValueError if a call of a report reads what it does not have, or a source was written by such a call."""
    sources, calls = len(report.sources), len(report.calls) + report.dropped
    for number, call in enumerate(report.calls):
        if any(not -sources <= one < number for read in call.reads for one in read):
            raise ValueError(f"calls[{number}].reads names what is neither in calls nor in sources")
    for number, source in enumerate(report.sources):
        if any(not 0 <= one < calls for one in source.written_by):
            raise ValueError(f"sources[{number}].written_by names what is not in calls")


def read_recording(path: str | os.PathLike[str], report: Recording) -> None:
    """Fills an empty report from a file.

    Raises:
        OSError: The file cannot be read.
        OptionError: It is not a recording, or of another version.
        KeyError, TypeError, ValueError: It was changed.
    """
    decompressor = zlib.decompressobj(wbits=_GZIP)
    try:
        data = decompressor.decompress(Path(path).read_bytes())
    except zlib.error as error:
        raise ValueError(f"it is not a gzip file, or was changed: {error}") from error
    *lines, rest = data.split(b"\n")  # a part of a line is what was written when the program was killed
    header = json.loads(lines[0]) if lines else {}
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f'its first line does not have "format": "{_FORMAT}"')
    if header.get("version") != _VERSION:
        raise OptionError(
            f"cannot read the recording {os.fspath(path)!r}: its version is {header.get('version')!r}, and this "
            f"torch_promote reads version {_VERSION}. Read it with the torch_promote that wrote it, or record again."
        )
    read = decode_record({"torch_version": str, "environment": dict[str, str]}, header)
    report.torch_version, report.environment = read["torch_version"], read["environment"]
    end = _Reader(report).read(lines[1:])
    check_reads(report)
    for name, value in decode_record(_END, end).items() if end is not None else ():
        setattr(report, name, value)
    if end is None or rest or not decompressor.eof:
        report.steps = len(report.ends)
        report.not_seen.append(
            f"{UNFINISHED}the file ends after {len(report.ends):,} steps and {len(report.calls):,} calls."
        )


class _Reader:
    def __init__(self, report: Recording) -> None:
        self._report = report
        self._modules: list[str] = []
        self._tensors: list[TensorInfo] = []
        self._kinds: list[Call] = []
        self._values: list[Values] = []

    def read(self, lines: list[bytes]) -> dict[str, Any] | None:
        """Reads lines up to the end, which is returned; None if the file was not finished."""
        define: dict[str, Callable[[Any], None]] = {
            "module": lambda data: self._modules.append(decode(str, data)),
            "tensor": lambda data: self._tensors.append(decode(TensorInfo, data)),
            "kind": self._read_kind,
            "values": lambda data: self._values.append(_values_of(*data)),
            "source": self._read_source,
            "step": self._read_step,
        }
        for number, line in enumerate(lines, 2):
            try:
                data = json.loads(line, parse_constant=_refuse)
                if isinstance(data, dict):
                    return data
                if isinstance(data[0], str):
                    define[data[0]](data[1])
                else:
                    self._read_call(*data)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise ValueError(f"line {number} is wrong ({type(error).__name__}: {error})") from error
        return None

    def _read_kind(self, data: Any) -> None:
        own = {name: encode(value) for name, value in _OWN_FIELDS.items()}
        self._kinds.append(Call.from_dict({**own, **data}, lambda number: _at(self._tensors, number)))

    def _read_source(self, data: Any) -> None:
        info, values = _at(self._tensors, data["info"]), _at(self._values, data["values"])
        self._report.sources.append(decode(Source, {**data, "info": info, "values": values}))

    def _read_step(self, data: Any) -> None:
        def named(numbers: Mapping[str, int]) -> dict[str, Values]:
            return {name: _at(self._values, number) for name, number in numbers.items()}

        parts = {name: named(data[name]) for name in ("gradients", "parameters")}
        losses = [_at(self._values, number) for number in data["losses"]]
        self._report.ends.append(decode(Step, {**data, **parts, "losses": losses}))

    def _read_call(self, kind: int, module: int = 0, reads: Any = (), values: Any = ()) -> None:
        number = len(self._report.calls)
        call = dataclasses.replace(
            _at(self._kinds, kind),
            module=_at(self._modules, module),
            reads=tuple(tuple(one if one < 0 else number - one for one in read) for read in reads),
            values=tuple(_at(self._values, one) for one in values),
        )
        self._report.add(call)


def _at(found: list[Any], number: Any) -> Any:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(found):
        raise ValueError(f"there is no definition {number!r}")
    return found[number]


def _values_of(digest: Any, count: Any, amax: Any, l2: Any, infs: Any, nans: Any, sketch: Any) -> Values:
    numbers = {"amax": amax, "l2": l2, "infs": infs, "nans": nans}
    kinds = {"digest": str, "count": int, "amax": float | None, "l2": float | None, "infs": float, "nans": float}
    read = decode_record(kinds | {"sketch": str}, {"digest": digest, "count": count, "sketch": sketch, **numbers})
    check_sketch(read["sketch"])
    return Values(**read)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
