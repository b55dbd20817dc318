"""Reads and matches `known_gaps.toml`, the known differences between PyTorch, the reference and ours.

The file documents its entries: `[[call]]` for single calls in a crosscheck, `[[sample]]` for samples of the parity
command, `[[nondeterministic]]` for ops whose bits do not repeat.
"""

from __future__ import annotations

import fnmatch
import functools
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from torch_promote.checking.expectation import Finding
from torch_promote.checking.pretend_cuda import STAND_IN
from torch_promote.errors import TorchPromoteError
from torch_promote.observe.ops import is_fake, overload_name

__all__ = [
    "Gap",
    "GapError",
    "Nondeterministic",
    "SampleGap",
    "dispatch_gaps",
    "explained",
    "nondeterministic",
    "parse_gaps",
    "parse_nondeterministic",
    "parse_sample_gaps",
    "sample_gaps",
]

_FILE = Path(__file__).with_name("known_gaps.toml")
_WRONG = ("pytorch", "reference", "ours")
_KINDS = ("dtype", "shape", "strides", "casts", "bits", "error", "row")
_SAMPLE_KINDS = (*_KINDS, "requires_grad", "structure", "value")
_WHATS = ("ours against stock", "reference against stock", "reference against ours")
_DEVICES = ("cpu", "cuda", "fake-cuda", STAND_IN, "*")


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

    @property
    def ops(self) -> list[str]:
        """The patterns in `op`."""
        return self.op.split()

    def explains(self, op: str, finding: Finding, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the gap explains a finding in a call of an op with these tensors."""
        if finding.kind != self.kind or not any(fnmatch.fnmatchcase(op, one) for one in self.ops):
            return False
        return not self.fake or any(map(is_fake, tensors))


@dataclass(frozen=True, slots=True)
class SampleGap:
    """A known gap of parity samples. The attributes are the keys of a `[[sample]]` entry, which the file documents."""

    entry: str
    kind: str
    what: str
    wrong: str
    reason: str
    device: str = "*"
    dtype: str = "*"
    text: str = "*"

    def covers(self, entry: str, device: str) -> bool:
        """Whether the gap names an entry and a device."""
        return fnmatch.fnmatchcase(entry, self.entry) and _is_on(self.device, device)

    def explains(self, kind: str, what: str, sample: str, text: str) -> bool:
        """Whether the gap explains a mismatch in an entry that it covers; `sample` is a label, `float32/3/mixed`."""
        return (
            (kind, what) == (self.kind, self.what)
            and fnmatch.fnmatchcase(sample.partition("/")[0], self.dtype)
            and fnmatch.fnmatchcase(text, self.text)
        )


def _is_on(named: str, device: str) -> bool:
    # The stand-in's kernels are the CPU's.
    return named in (device, "*") or (named == "cpu" and device == STAND_IN)


@dataclass(frozen=True, slots=True)
class Nondeterministic:
    """An op whose bits do not repeat. The attributes are the keys of a `[[nondeterministic]]` entry."""

    entry: str
    reason: str
    device: str = "*"
    always: bool = True

    def covers(self, entry: str, device: str) -> bool:
        """Whether this names an entry and a device."""
        return fnmatch.fnmatchcase(entry, self.entry) and _is_on(self.device, device)


@functools.cache
def dispatch_gaps() -> tuple[Gap, ...]:
    """Returns the known gaps of single calls.

    Example:
        >>> all(gap.wrong in ("pytorch", "reference", "ours") for gap in dispatch_gaps())
        True
    """
    return parse_gaps(_FILE.read_text(encoding="utf-8"), str(_FILE))


@functools.cache
def sample_gaps() -> tuple[SampleGap, ...]:
    """Returns the known gaps of the parity command's samples."""
    return parse_sample_gaps(_FILE.read_text(encoding="utf-8"), str(_FILE))


@functools.cache
def nondeterministic() -> tuple[Nondeterministic, ...]:
    """Returns the ops whose bits do not repeat.

    Example:
        >>> any(listed.covers("empty", "cpu") for listed in nondeterministic())
        True
    """
    return parse_nondeterministic(_FILE.read_text(encoding="utf-8"), str(_FILE))


def explained(
    gaps: Sequence[Gap], op: torch._ops.OpOverload, finding: Finding, tensors: Sequence[torch.Tensor]
) -> Gap | None:
    """Returns the first gap that explains a finding, or None.

    Example:
        >>> explained((), torch.ops.aten.mm.default, Finding("bits", "1", "2"), [])
    """
    name = overload_name(op)
    return next((gap for gap in gaps if gap.explains(name, finding, tensors)), None)


def parse_gaps(text: str, where: str) -> tuple[Gap, ...]:
    r"""Reads the `[[call]]` entries of a file of gaps; `where` is named in errors.

    Raises:
        GapError: The text is not valid TOML, or an entry has a missing key, an unknown key or an illegal value.

    Example:
        >>> parse_gaps('[[call]]\nop = "aten::mm"', "gaps.toml")
        Traceback (most recent call last):
        ...
        torch_promote.checking.known_gaps.GapError: gaps.toml, entry 1: missing kind, reason, wrong.
    """
    return _parse(text, where, "call", Gap, {"wrong": _WRONG, "kind": _KINDS})


def parse_sample_gaps(text: str, where: str) -> tuple[SampleGap, ...]:
    """Reads the `[[sample]]` entries of a file of gaps; see `parse_gaps`."""
    legal = {"wrong": _WRONG, "kind": _SAMPLE_KINDS, "what": _WHATS, "device": _DEVICES}
    return _parse(text, where, "sample", SampleGap, legal)


def parse_nondeterministic(text: str, where: str) -> tuple[Nondeterministic, ...]:
    """Reads the `[[nondeterministic]]` entries of a file of gaps; see `parse_gaps`."""
    return _parse(text, where, "nondeterministic", Nondeterministic, {"device": _DEVICES})


_Entry = TypeVar("_Entry", Gap, SampleGap, Nondeterministic)


def _parse(
    text: str, where: str, section: str, kind: type[_Entry], legal: dict[str, tuple[str, ...]]
) -> tuple[_Entry, ...]:
    try:
        entries: list[dict[str, Any]] = tomllib.loads(text).get(section, [])
    except tomllib.TOMLDecodeError as error:
        raise GapError(f"{where}: {error}") from error
    return tuple(_gap(e, f"{where}, entry {number}", kind, legal) for number, e in enumerate(entries, start=1))


def _gap(entry: dict[str, Any], where: str, kind: type[_Entry], legal: dict[str, tuple[str, ...]]) -> _Entry:
    known = {field.name for field in fields(kind)}
    required = {field.name for field in fields(kind) if field.default is MISSING}
    missing, strange = required - entry.keys(), entry.keys() - known
    if missing or strange:
        problems = [f"missing {', '.join(sorted(missing))}"] * bool(missing)
        problems += [f"unknown {', '.join(sorted(strange))}"] * bool(strange)
        raise GapError(f"{where}: {'; '.join(problems)}.")
    for key, values in legal.items():
        if key in entry and entry[key] not in values:
            raise GapError(f"{where}: {key} is {entry[key]!r}. Legal: {', '.join(values)}.")
    return kind(**entry)
