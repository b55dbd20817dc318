"""What is known to differ between PyTorch, the reference and ours: `known_gaps.toml`, read and matched."""

from __future__ import annotations

import fnmatch
import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from torch_promote.checking.call_check import Finding, overload_name
from torch_promote.checking.comparison import is_fake
from torch_promote.errors import TorchPromoteError

__all__ = ["Gap", "GapError", "dispatch_gaps", "explained", "parse_gaps"]

_FILE = Path(__file__).with_name("known_gaps.toml")
_WRONG = ("pytorch", "reference", "ours")
_KINDS = ("dtype", "shape", "strides", "casts", "bits", "error")


class GapError(TorchPromoteError, ValueError):
    """A file of known gaps that cannot be read as such."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One known gap; the attributes are the keys of a `[[call]]` entry in the file, which explains them."""

    op: str
    kind: str
    wrong: str
    reason: str
    fake: bool = False

    def explains(self, op: str, finding: Finding, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a finding at a call of an op with these tensors is what the gap describes."""
        if finding.kind != self.kind or not fnmatch.fnmatchcase(op, self.op):
            return False
        return not self.fake or any(map(is_fake, tensors))


@functools.cache
def dispatch_gaps() -> tuple[Gap, ...]:
    """Returns the known gaps of single calls.

    Example:
        >>> all(gap.wrong in ("pytorch", "reference", "ours") for gap in dispatch_gaps())
        True
    """
    return parse_gaps(_FILE.read_text(encoding="utf-8"), str(_FILE))


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
        GapError: The text is no TOML, or an entry lacks a key, has one too many, or a value that is not legal.

    Example:
        >>> parse_gaps('[[call]]\nop = "aten::mm"', "gaps.toml")
        Traceback (most recent call last):
        ...
        torch_promote.checking.known_gaps.GapError: gaps.toml, entry 1: missing kind, reason, wrong.
    """
    try:
        entries: list[dict[str, Any]] = tomllib.loads(text).get("call", [])
    except tomllib.TOMLDecodeError as error:
        raise GapError(f"{where}: {error}") from error
    return tuple(_gap(entry, f"{where}, entry {number}") for number, entry in enumerate(entries, start=1))


def _gap(entry: dict[str, Any], where: str) -> Gap:
    known = {field.name for field in fields(Gap)}
    missing, strange = known - {"fake"} - entry.keys(), entry.keys() - known
    if missing or strange:
        problems = [f"missing {', '.join(sorted(missing))}"] * bool(missing)
        problems += [f"unknown {', '.join(sorted(strange))}"] * bool(strange)
        raise GapError(f"{where}: {'; '.join(problems)}.")
    for key, legal in (("wrong", _WRONG), ("kind", _KINDS)):
        if entry[key] not in legal:
            raise GapError(f"{where}: {key} is {entry[key]!r}. Legal: {', '.join(legal)}.")
    return Gap(**entry)
