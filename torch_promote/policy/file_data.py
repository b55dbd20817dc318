"""Policies as plain data: what a policy file and JSON hold, and what of it is known, legal and said once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torch_promote.errors import PolicyError, did_you_mean
from torch_promote.policy.cast_policy import spell_policy
from torch_promote.policy.named import Change, Value
from torch_promote.policy.op_names import exact_key, find_overloads
from torch_promote.policy.op_table import DEVICE_TYPES, TABLE_VERSION
from torch_promote.policy.overrides import parse_policy, select

__all__ = ["EVERY_DEVICE", "FORMAT", "Entries", "KeyPath", "Source", "from_data", "to_data"]

#: The number of the structure that is written; a reader refuses a higher one.
FORMAT = 1
#: The section whose entries hold on every device type.
EVERY_DEVICE = "all"

_SECTIONS = (EVERY_DEVICE, *DEVICE_TYPES)
_VERSIONS = {"torch": torch.__version__.partition("+")[0], "table": TABLE_VERSION}
_LEGAL_KEYS = f"Legal: format, {', '.join(_VERSIONS)} and the sections {', '.join(f'[{name}]' for name in _SECTIONS)}."
#: The path to a key: a section and an entry, or less.
KeyPath = tuple[str, ...]
#: The policy of each overload on each device type that is named.
Entries = dict[tuple[str, str], Value]


def to_data(changes: Iterable[Change]) -> dict[str, Any]:
    """Returns changes as plain data, with the versions that they were made with; `from_data` reads it.

    Example:
        >>> to_data([("aten::mm", "cpu", torch.float64)])["cpu"]
        {'aten::mm.default': 'float64'}
    """
    sections: dict[str, dict[str, str]] = {name: {} for name in _SECTIONS}
    given = {(overload, device): value for overload, device, value in changes}
    for (overload, device), value in sorted(given.items(), key=lambda entry: entry[0]):
        everywhere = all(given.get((overload, other)) == value for other in DEVICE_TYPES)
        sections[EVERY_DEVICE if everywhere else device][exact_key(overload)] = spell_policy(value)
    return {"format": FORMAT, **_VERSIONS, **{name: entries for name, entries in sections.items() if entries}}


class Source:
    """What is read, and where its keys are: the path to a key is a section and an entry, or one of the other keys."""

    def __init__(self, name: str = "the policy", lines: Mapping[KeyPath, int] | None = None) -> None:
        self.name = name
        self.lines = lines

    def at(self, *path: str) -> str:
        """The place of a key, as an error begins."""
        if self.lines is None:
            return self.name + "".join(f"[{key!r}]" for key in path)
        return f"{self.name}:{self.lines.get(path, 1)}"

    def near(self, *path: str) -> str:
        """The place of a key, in a sentence about the source."""
        if self.lines is None:
            return "at " + "".join(f"[{key!r}]" for key in path)
        return f"on line {self.lines.get(path, 1)}"


def from_data(data: Mapping[str, Any], source: Source | None = None) -> Entries:
    """Checks plain data and returns what it says.

    Args:
        data: What `to_data` returns, or what a person wrote in its place. Of the versions only the format's is needed.
        source: Where it comes from, for errors.

    Returns:
        The policy of each overload on each device type that is named.

    Raises:
        PolicyError: Something in it is not known, not legal, or said twice.

    Example:
        >>> from_data({"format": 1, "cuda": {"mm.default": "keep"}})
        {('aten::mm', 'cuda'): <CastPolicy.keep: 'keep'>}
    """
    source = source or Source()
    if not isinstance(data, Mapping):
        raise PolicyError(f"a policy as data is a mapping, got {type(data).__name__}. Policy.to_dict() makes one.")
    _check_versions(data, source)
    unknown: list[str] = []
    is_newer = any(_release(str(data.get(key, ""))) > _release(version) for key, version in _VERSIONS.items())
    entries = _read(data, source, unknown if is_newer else None)
    if unknown:
        written = ", ".join(f"{key} {data[key]}" for key in _VERSIONS if key in data)
        here = ", ".join(f"{key} {version}" for key, version in _VERSIONS.items())
        raise PolicyError(
            f"{source.name} was written with {written}. This is {here}, and does not know {'; '.join(unknown)}. Use "
            f"the newer version, or take these out."
        )
    return entries


def _check_versions(data: Mapping[str, Any], source: Source) -> None:
    if "format" not in data:
        raise PolicyError(f"{source.at()}: it does not say which format it has. Begin it with: format = {FORMAT}")
    written = data["format"]
    if type(written) is not int or written < 1:
        raise PolicyError(f"{source.at('format')}: format is a number from 1 to {FORMAT}, got {written!r}.")
    if written > FORMAT:
        by = "".join(f" It was written with torch {version}." for version in [data.get("torch")] if version)
        raise PolicyError(
            f"{source.at('format')}: format {written} is newer than {FORMAT}, the newest that this torch_promote "
            f"reads.{by} Use a newer torch_promote."
        )
    for key, version in _VERSIONS.items():
        if key in data and not (isinstance(data[key], str) and _release(data[key])):
            raise PolicyError(f"{source.at(key)}: {key} is a version such as {version!r}, got {data[key]!r}.")


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _read(data: Mapping[str, Any], source: Source, unknown: list[str] | None) -> Entries:
    """Returns all entries. What is not known or not legal goes to a list if there is one, and is an error otherwise."""
    entries: Entries = {}
    named_by: dict[tuple[str, str], KeyPath] = {}
    for section, content in data.items():
        if section == "format" or section in _VERSIONS:
            continue
        if section not in _SECTIONS:
            _complain(f"{section!r}", _unknown_section(section), source, (section,), unknown)
            continue
        if not isinstance(content, Mapping):
            raise PolicyError(
                f"{source.at(section)}: {section} is a section of ops, got {content!r}. Write [{section}]."
            )
        devices = DEVICE_TYPES if section == EVERY_DEVICE else (section,)
        for key, value in content.items():
            path = (section, key)
            for overload, policy in _entry(key, value, source, path, unknown):
                for device in devices:
                    other = named_by.setdefault((overload, device), path)
                    if other != path:
                        raise PolicyError(_said_twice(overload, device, path, other, source))
                    entries[overload, device] = policy
    return entries


def _entry(
    key: str, value: object, source: Source, path: KeyPath, unknown: list[str] | None
) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping):
        dotted = f'"{key}.{next(iter(value), "")}"'
        raise PolicyError(f"{source.at(*path)}: {key!r} is no section within a section. Quote names of ops: {dotted}.")
    if not isinstance(value, str):
        raise PolicyError(f"{source.at(*path)}: {key!r} is given a policy as a quoted name, got {value!r}.")
    try:
        find_overloads(key)
    except PolicyError as error:
        return _complain(f"op {key!r}", str(error), source, path, unknown)
    try:
        parse_policy(value, repr(key))
    except PolicyError as error:
        return _complain(f"policy {value!r}", str(error), source, path, unknown)
    try:
        policy, overloads = select(key, value)
    except PolicyError as error:
        return _complain(f"policy {value!r} for {key!r}", str(error), source, path, unknown)
    yield from ((overload, policy) for overload in overloads)


def _complain(what: str, text: str, source: Source, path: KeyPath, unknown: list[str] | None) -> None:
    if unknown is None:
        raise PolicyError(f"{source.at(*path)}: {text}")
    unknown.append(f"{what} {source.near(*path)}")


def _unknown_section(name: object) -> str:
    return f"a policy has no {name!r}.{did_you_mean(str(name), [*_SECTIONS, *_VERSIONS, 'format'])} {_LEGAL_KEYS}"


def _said_twice(overload: str, device: str, path: KeyPath, other: KeyPath, source: Source) -> str:
    return (
        f"{source.at(*path)}: {path[-1]!r} in [{path[0]}] names {overload} on {device}, which {other[-1]!r} in "
        f"[{other[0]}] {source.near(*other)} names too. Name each overload once."
    )
