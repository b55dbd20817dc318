"""Reads and matches `known_gaps.toml`, the known differences between PyTorch, the reference and ours."""

from __future__ import annotations

import fnmatch
import functools
import os
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from torch_promote.checking.expectation import Finding
from torch_promote.errors import TorchPromoteError
from torch_promote.observe.ops import is_fake
from torch_promote.policy.op_table import DEVICE_TYPES

#: The environment variable with the paths of further files, for a fork of PyTorch or another backend.
VARIABLE = "TORCH_PROMOTE_KNOWN_GAPS"
#: The devices that samples of parity run on. "fake-cuda" simulates dtypes, shapes and strides of CUDA without a GPU.
DEVICES = (*DEVICE_TYPES, *(f"fake-{device_type}" for device_type in DEVICE_TYPES if device_type != "cpu"))
_KINDS = ("dtype", "shape", "strides", "casts", "bits", "error", "row")
#: The legal values of keys, by section. Other keys are free text.
_LEGAL: dict[str, dict[str, tuple[str, ...]]] = {
    "call": {"wrong": ("pytorch", "reference", "ours"), "kind": _KINDS},
    "sample": {
        "wrong": ("pytorch", "reference", "ours"),
        "kind": (*_KINDS, "requires_grad", "structure", "value"),
        "what": ("ours against stock", "reference against stock", "reference against ours"),
        "device": (*DEVICES, "*"),
    },
    "nondeterministic": {"device": (*DEVICES, "*")},
}


class GapError(TorchPromoteError, ValueError):
    """A file of known gaps is invalid."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A known gap of single calls. The attributes are the keys of a `[[call]]` entry, which the file documents."""

    op: str
    kind: str
    wrong: str
    reason: str
    fake: bool = False
    versions: str = "*"

    @property
    def ops(self) -> list[str]:
        """The patterns in `op`."""
        return self.op.split()

    def explains(self, op: str, finding: Finding, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the gap explains a finding in a call of an op with these tensors."""
        if finding.kind != self.kind or not any(fnmatch.fnmatchcase(op, pattern) for pattern in self.ops):
            return False
        return not self.fake or any(map(is_fake, tensors))


class _OfAnEntry:
    """Base class of what the file says of entries of the parity command."""

    __slots__ = ()
    entry: str
    device: str

    def covers(self, entry: str, device: str) -> bool:
        """Whether this names an entry and a device."""
        return fnmatch.fnmatchcase(entry, self.entry) and self.device in (device, "*")


@dataclass(frozen=True, slots=True)
class Nondeterministic(_OfAnEntry):
    """An op whose bits do not repeat. The attributes are the keys of a `[[nondeterministic]]` entry."""

    entry: str
    reason: str
    device: str = "*"
    always: bool = True


@dataclass(frozen=True, slots=True)
class SampleGap(_OfAnEntry):
    """A known gap of parity samples. The attributes are the keys of a `[[sample]]` entry, which the file documents."""

    entry: str
    kind: str
    what: str
    wrong: str
    reason: str
    device: str = "*"
    dtype: str = "*"
    text: str = "*"

    def explains(self, kind: str, what: str, sample: str, text: str) -> bool:
        """Whether the gap explains a mismatch in an entry that it covers; `sample` is a label, `float32/3/mixed`."""
        return (
            (kind, what) == (self.kind, self.what)
            and fnmatch.fnmatchcase(sample.partition("/")[0], self.dtype)
            and fnmatch.fnmatchcase(text, self.text)
        )


@dataclass(frozen=True, slots=True)
class KnownGaps:
    """The entries of the files of known gaps."""

    calls: tuple[Gap, ...] = ()
    samples: tuple[SampleGap, ...] = ()
    nondeterministic: tuple[Nondeterministic, ...] = ()


@functools.cache
def known_gaps() -> KnownGaps:
    """Returns the known gaps of the package's file, and of those that TORCH_PROMOTE_KNOWN_GAPS names."""
    paths = [str(Path(__file__).with_name("known_gaps.toml")), *filter(None, os.environ.get(VARIABLE, "").split(":"))]
    found = KnownGaps()
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise GapError(f"{VARIABLE} names {path}, which cannot be read: {error.strerror}.") from error
        more = parse_gaps(text, path)
        found = KnownGaps(*(getattr(found, f.name) + getattr(more, f.name) for f in fields(KnownGaps)))
    return found


def parse_gaps(text: str, where: str) -> KnownGaps:
    """Reads the text of a file of known gaps. Raises GapError, which names `where`, if it is not valid."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise GapError(f"{where}: {error}") from error
    if strange := data.keys() - _LEGAL.keys():
        raise GapError(f"{where}: unknown section {', '.join(sorted(strange))}. Legal: {', '.join(_LEGAL)}.")
    found: list[tuple[Any, ...]] = []
    for section, kind in (("call", Gap), ("sample", SampleGap), ("nondeterministic", Nondeterministic)):
        known = {field.name: field.type for field in fields(kind)}
        required = {field.name for field in fields(kind) if field.default is MISSING}
        for number, entry in enumerate(data.get(section, ()), start=1):
            place = f"{where}, {section} {number}"
            if missing := required - entry.keys():
                raise GapError(f"{place}: missing {', '.join(sorted(missing))}.")
            if strange := entry.keys() - known:
                raise GapError(f"{place}: unknown {', '.join(sorted(strange))}. Legal: {', '.join(sorted(known))}.")
            for key, value in entry.items():
                if type(value).__name__ != known[key]:
                    raise GapError(f"{place}: {key} is {value!r}, and has to be a {known[key]}.")
            for key, values in _LEGAL[section].items():
                if entry.get(key, values[0]) not in values:
                    raise GapError(f"{place}: {key} is {entry[key]!r}. Legal: {', '.join(values)}.")
        found.append(tuple(kind(**entry) for entry in data.get(section, ())))
    calls, *others = found
    here = (gap for gap in calls if any(fnmatch.fnmatchcase(torch.__version__, one) for one in gap.versions.split()))
    return KnownGaps(tuple(here), *others)
