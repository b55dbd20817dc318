"""Policies as TOML files: one line for each op, so that two versions of a file can be compared.

    format = 1
    torch = "2.13.0"
    table = "2.13"

    [all]
    "aten::mm.default" = "fp32"

    [cpu]
    "linalg_*" = "float64"

Reading is strict: whatever is not known, not legal or said twice is an error that names its line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_promote.errors import PolicyError
from torch_promote.policy.file_data import Entries, KeyPath, Source, from_data, to_data
from torch_promote.policy.named import MEANINGS, Change

__all__ = ["load", "save"]

_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_ENTRY = re.compile(r"""\s*((?:"(?:[^"\\]|\\.)*"|'[^']*'|[\w.\s-])+?)\s*=""")


def save(changes: Iterable[Change], path: str | os.PathLike[str]) -> None:
    """Writes changes to a file. A reader of the file sees what was there before, or all of it.

    Raises:
        PolicyError: The file cannot be written.
    """
    name = _name(path)
    target = Path(os.path.realpath(name))  # of a link, the file that it leads to
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        with open(beside, "x", encoding="utf-8", newline="\n") as file:
            file.write(_toml(to_data(changes)))
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except OSError as error:
        raise PolicyError(f"cannot write the policy file {name!r}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _name(path: object) -> str:
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise PolicyError(f"the path of a policy file is a str or a path, got {path!r}.")
    return name


def _toml(data: Mapping[str, Any]) -> str:
    lines = ["# A policy of torch_promote: where it differs from PyTorch's autocast. Policy.load() reads it."]
    lines += [f"{key} = {json.dumps(value)}" for key, value in data.items() if not isinstance(value, Mapping)]
    for section, entries in data.items():
        if isinstance(entries, Mapping):
            lines += ["", f"[{section}]", *(f"{json.dumps(op)} = {json.dumps(value)}" for op, value in entries.items())]
    return "\n".join(lines) + "\n"


def load(path: str | os.PathLike[str]) -> Entries:
    """Reads a file and returns what it says.

    Returns:
        The policy of each overload on each device type that is named.

    Raises:
        PolicyError: The file cannot be read, or something in it is not known, not legal, or said twice.
    """
    name = _name(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # some editors put a mark before the text
    except UnicodeDecodeError as error:
        raise PolicyError(f"{name}: not a text file in UTF-8 (byte {error.start}). Policy.save() writes one.") from None
    except FileNotFoundError:
        remedy = f"Policies that need none: {', '.join(MEANINGS)}."
        raise PolicyError(f"there is no policy file {name!r}. {remedy}") from None
    except (OSError, ValueError) as error:  # a ValueError where the path has a NUL in it
        why = getattr(error, "strerror", None) or error
        raise PolicyError(f"cannot read the policy file {name!r}: {why}.") from error
    places = list(_places(text))
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(_syntax_error(name, text, places, str(error))) from None
    return from_data(data, Source(name, _first_lines(places)))


def _places(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yields the path of every section and entry, and its line. A file of one entry a line is all that is expected."""
    section: KeyPath = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if match := _HEADER.match(line):
            section = _key(match[1])
            yield section, number
        elif match := _ENTRY.match(line):
            yield section + _key(match[1]), number


def _key(text: str) -> KeyPath:
    """The parts of a TOML key: of `a."b.c"` they are a and b.c."""
    try:
        data: Any = tomllib.loads(f"{text} = 0")
    except (ValueError, RecursionError):
        return (text,)
    path: list[str] = []
    while isinstance(data, dict):
        path += data
        data = data[path[-1]]
    return tuple(path)


def _first_lines(places: Iterable[tuple[KeyPath, int]]) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    for path, number in places:
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], number)
    return lines


def _syntax_error(name: str, text: str, places: Iterable[tuple[KeyPath, int]], message: str) -> str:
    """What is wrong with a file that is no TOML. The usual mistakes get a text of their own."""
    first: dict[KeyPath, int] = {}
    for path, number in places:
        if path in first:
            what = f"{path[-1]!r} stands twice in [{path[0]}]" if len(path) > 1 else f"{path[0]!r} stands twice"
            return f"{name}:{number}: {what}, first on line {first[path]}. Write it once."
        first[path] = number
    match = re.search(r"\(at (?:line (\d+)|end of document).*\)", message)
    number = int(match[1]) if match and match[1] else text.rstrip().count("\n") + 1
    what = message[: match.start()].strip() if match else message
    return f'{name}:{number}: not TOML: {what}. A line of a section is "OP" = "POLICY", both quoted.'
