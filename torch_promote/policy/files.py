"""Policy files: a policy as TOML, and as the plain data that TOML and JSON hold; docs/overrides.md shows some.

Tables for modules need format = 2. A policy without them is written as format 1.
A saved file has the patterns that the policy was made of, and a line for each other op. Reading is strict: an entry
that is unknown, illegal or repeated raises an error that names its section.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tomllib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_promote.errors import PolicyError, check_path, did_you_mean, shown
from torch_promote.policy.module_tables import (
    KEY_OF_WHOLE,
    MODULES,
    Table,
    Tables,
    merged,
    parse_tables,
    quoted,
    section_of,
    spell_table,
)
from torch_promote.policy.named_policies import LEGAL_POLICIES, Change, Value, release, stock_policy
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES, TABLE_VERSION, spell_policy
from torch_promote.policy.overrides import is_pattern_key, parse_policy, select, which_wins

#: The newest version of the structure. A file with a higher one is refused.
FORMAT = 2
#: The version of a policy without tables for modules, and that in which such tables came.
_FORMAT_WITHOUT_MODULES, _FORMAT_OF_MODULES = 1, 2
#: The section whose entries apply on every device type.
ALL_DEVICE_TYPES = "all"

_SECTIONS = (ALL_DEVICE_TYPES, *DEVICE_TYPES)
_VERSIONS = {"torch": torch.__version__.partition("+")[0], "table": TABLE_VERSION}
_LEGAL_KEYS = (
    f"Legal: format, {', '.join(_VERSIONS)} and the sections {', '.join(f'[{name}]' for name in _SECTIONS)}, "
    f'[{MODULES}."NAME"].'
)

#: Maps overloads' full names and device types to policies.
Entries = dict[tuple[str, str], Value]
#: A pattern of ops as a user wrote it: the section of its entry in a file, the pattern, and the policy.
Pattern = tuple[str, str, Value]


def to_data(changes: Iterable[Change], modules: Tables = (), patterns: Sequence[Pattern] = ()) -> dict[str, Any]:
    """Returns changes and tables for modules as plain data, with the patterns that still describe them."""
    sections: dict[str, dict[str, str]] = {name: {} for name in _SECTIONS}
    given = {(overload, device_type): value for overload, device_type, value in changes}
    kept, named = _fold(given, [one for one in patterns if one[0] in _SECTIONS], stock_policy)
    for section, key, value in kept:
        sections[section][key] = spell_policy(value)
    for (overload, device_type), value in sorted(named.items(), key=lambda entry: entry[0]):
        on_all = all(named.get((overload, other)) == value for other in DEVICE_TYPES)
        sections[ALL_DEVICE_TYPES if on_all else device_type][exact_key(overload)] = spell_policy(value)
    tables = {MODULES: {name: _table_to_data(name, table, patterns) for name, table in modules}} if modules else {}
    version = _FORMAT_OF_MODULES if modules else _FORMAT_WITHOUT_MODULES
    return {"format": version, **_VERSIONS, **{name: each for name, each in sections.items() if each}, **tables}


def _table_to_data(name: str, table: Table, patterns: Sequence[Pattern]) -> dict[str, str]:
    if isinstance(table, str):
        return spell_table(table)
    section = section_of(name)
    given = {(overload, section): value for overload, value in table}
    kept, named = _fold(given, [one for one in patterns if one[0] == section], lambda *_: None)
    spelled = {key: spell_policy(value) for _, key, value in kept}
    return spelled | spell_table(tuple((overload, value) for (overload, _), value in named.items()))


def _fold(
    given: Entries, patterns: Sequence[Pattern], otherwise: Callable[[str, str], Value | None]
) -> tuple[list[Pattern], Entries]:
    """Returns the patterns that a file of these entries can have, and the entries to name besides them."""
    # In a file, a name takes precedence over a pattern, and no two patterns may select the same op. No entry can say
    # that a place has none (`otherwise` returns None), so a pattern that selects one is left out.
    kept: list[Pattern] = []
    covered: Entries = {}
    for section, key, value in reversed(patterns):
        try:
            _, overloads = select(key, value)
        except PolicyError:  # the library that defines the ops is not imported
            continue
        device_types = DEVICE_TYPES if section == ALL_DEVICE_TYPES else (section,)
        places = list(itertools.product(overloads, device_types))
        actual = {place: given.get(place, otherwise(*place)) for place in places}
        spared = sum(given.get(place) == value for place in places)
        exceptions = sum(one != value and place not in given for place, one in actual.items())
        if None not in actual.values() and not any(place in covered for place in places) and spared >= exceptions:
            kept.append((section, key, value))
            covered.update(dict.fromkeys(places, value))
    named: Entries = {}
    for place in {**given, **covered}:
        wanted = given.get(place) or otherwise(*place)
        if wanted is not None and wanted != covered.get(place):
            named[place] = wanted
    return kept[::-1], named


def patterns_in(section: str, entries: Mapping[Any, Any]) -> Iterator[Pattern]:
    """Yields the patterns among the keys of overrides, which have been checked."""
    for key, value in entries.items():
        if is_pattern_key(key):
            yield section, key, parse_policy(value)


def from_data(data: Mapping[str, Any], source: str = "the policy") -> tuple[Entries, Tables, tuple[Pattern, ...]]:
    """Checks plain data, as of `to_data`, and returns its entries, its tables for modules, and its patterns."""
    if not isinstance(data, Mapping):
        raise PolicyError(f"a policy as data is a mapping, got {type(data).__name__}. Policy.to_dict() makes one.")
    try:
        _check_versions(data)
        entries, tables = _entries(data), _tables(data.get(MODULES, {}))
        sections = {name: data.get(name, {}) for name in _SECTIONS}
        sections |= {section_of(name): table for name, table in data.get(MODULES, {}).items()}
        found = (one for section, content in sections.items() for one in patterns_in(section, content))
        return entries, tables, tuple(found)
    except PolicyError as error:
        newer = any(release(str(data.get(key, ""))) > release(here) for key, here in _VERSIONS.items())
        written, here = ({key: each[key] for key in _VERSIONS if key in each} for each in (data, _VERSIONS))
        hint = f" It was written with {_listed(written)}, and this is {_listed(here)}. Use the newer version."
        raise PolicyError(f"{source}: {error}{hint if newer else ''}") from None


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {version}" for key, version in versions.items())


def _check_versions(data: Mapping[str, Any]) -> None:
    if "format" not in data:
        raise PolicyError("the key 'format' is missing. Start with: format = 1")
    written = data["format"]
    if type(written) is not int or written < 1:
        raise PolicyError(f"format is an integer from 1 to {FORMAT}, got {shown(written)}.")
    if written > FORMAT:
        raise PolicyError(
            f"format {shown(written)} is newer than {FORMAT}, the newest that this torch_promote reads. Use a newer "
            f"torch_promote."
        )
    if MODULES in data and written < _FORMAT_OF_MODULES:
        raise PolicyError(
            f"[{MODULES}] is a section of format {_FORMAT_OF_MODULES}, got format = {written}. Write: "
            f"format = {_FORMAT_OF_MODULES}"
        )
    for key, version in _VERSIONS.items():
        if key in data and not (isinstance(data[key], str) and release(data[key])):
            raise PolicyError(f"{key} is a version such as {version!r}, got {shown(data[key])}.")


def _entries(data: Mapping[str, Any]) -> Entries:
    """The entries of the sections of ops. A name takes precedence over a pattern, whatever their sections are."""
    items: list[tuple[str, object, object]] = []
    for section, content in data.items():
        if section in ("format", MODULES, *_VERSIONS):
            continue
        if section not in _SECTIONS:
            asked = section if isinstance(section, str) else ""
            close = did_you_mean(asked, [*_SECTIONS, MODULES, *_VERSIONS, "format"])
            raise PolicyError(f"{shown(section)} is not a key of a policy.{close} {_LEGAL_KEYS}")
        if not isinstance(content, Mapping):
            raise PolicyError(f"{section} is a section of ops, got {shown(content)}. Write [{section}].")
        items += [(section, key, value) for key, value in content.items()]
    entries: Entries = {}
    places: dict[tuple[str, str], tuple[object, str]] = {}
    for section, key, value in sorted(items, key=lambda item: is_pattern_key(item[1])):
        place = f"[{section}] " + (quoted(key) if isinstance(key, str) else shown(key))
        policy, overloads = _entry(key, value, place)
        device_types = DEVICE_TYPES if section == ALL_DEVICE_TYPES else (section,)
        for overload, device_type in itertools.product(overloads, device_types):
            other_key, other = places.setdefault((overload, device_type), (key, place))
            if other == place:
                entries[overload, device_type] = policy
            elif is_pattern_key(other_key) == is_pattern_key(key):
                raise PolicyError(
                    f"{place}: {overload} on {device_type} already has a policy from {other}. {which_wins(key)}"
                )
    return entries


def _entry(key: object, value: object, place: str) -> tuple[Value, tuple[str, ...]]:
    """The policy of one entry, and the overloads that it names."""
    if isinstance(value, Mapping):
        dotted = f'"{key}.{next(iter(value), "")}"'
        raise PolicyError(f"{place}: sections do not nest. Quote the names of ops: {dotted}.")
    if not isinstance(value, str):
        raise PolicyError(f"{place}: expected the name of a policy in quotes, got {shown(value)}.")
    try:
        return select(key, parse_policy(value))
    except PolicyError as error:
        raise PolicyError(f"{place}: {error}") from None


def _tables(data: object) -> Tables:
    if not isinstance(data, Mapping):
        raise PolicyError(f'{MODULES} holds the tables for modules, got {shown(data)}. Write [{MODULES}."NAME"].')
    tables: dict[str, Any] = {}
    for name, content in data.items():
        if not isinstance(content, Mapping) or any(isinstance(value, Mapping) for value in content.values()):
            raise PolicyError(
                f"[{MODULES}] {quoted(name if isinstance(name, str) else shown(name))}: expected a table of ops, got "
                f'{shown(content)}. Quote names that contain dots: [{MODULES}."blocks.0"], "softmax.int".'
            )
        if KEY_OF_WHOLE in content and len(content) > 1:
            raise PolicyError(
                f"{section_of(name)}: {KEY_OF_WHOLE!r} is for the whole module, so the table can have no other key. "
                f"Remove it, or the others."
            )
        tables[name] = content.get(KEY_OF_WHOLE, content)
    return merged((), parse_tables(tables))


def save(data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes what `to_data` returned to a file, as a whole. A PolicyError says why it cannot be written."""
    name = check_path("path", path)
    if Path(name).suffix not in ("", ".toml"):
        raise PolicyError(f"a policy file is TOML: its name ends in .toml, got {name!r}. For JSON, use to_dict().")
    try:
        write_atomically(name, to_toml(data))
    except OSError as error:
        raise PolicyError(f"cannot write the policy file {name!r}: {error.strerror or error}.") from error


def to_toml(data: Mapping[str, Any]) -> str:
    """Returns the content of the file of a policy, from what `to_data` returned."""
    lines = ["# A policy of torch_promote: where it differs from PyTorch's autocast. Policy.load() reads it."]
    lines += [f"{key} = {json.dumps(value)}" for key, value in data.items() if not isinstance(value, Mapping)]
    sections = {f"[{name}]": each for name, each in data.items() if isinstance(each, Mapping) and name != MODULES}
    sections |= {section_of(name): each for name, each in data.get(MODULES, {}).items()}
    for section, entries in sections.items():
        lines += ["", section]
        lines += [f"{k if k == KEY_OF_WHOLE else quoted(k)} = {json.dumps(v)}" for k, v in entries.items()]
    return "\n".join(lines) + "\n"


def load(path: str | os.PathLike[str]) -> tuple[Entries, Tables, tuple[Pattern, ...]]:
    """Reads a file. The result is that of `from_data`; a PolicyError says why it cannot be read."""
    name = check_path("path", path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # some editors put a byte order mark before the text
    except UnicodeDecodeError as error:
        raise PolicyError(f"{name}: not a text file in UTF-8 (byte {error.start}). Policy.save() writes one.") from None
    except FileNotFoundError:
        close = did_you_mean(Path(name).name, [each.name for each in Path(name).parent.glob("*.toml")])
        raise PolicyError(
            f"there is no policy file {name!r}.{close} Policies that need no file: {LEGAL_POLICIES}."
        ) from None
    except (OSError, ValueError) as error:  # a ValueError where the path contains a NUL
        why = getattr(error, "strerror", None) or error
        raise PolicyError(f"cannot read the policy file {name!r}: {why}.") from error
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(
            f'{name}: not valid TOML: {error}. An entry has the form "OP" = "POLICY", both in quotes.'
        ) from None
    return from_data(data, name)


def write_atomically(path: str | os.PathLike[str], text: str, errors: str = "strict") -> None:
    """Writes a file in UTF-8. Whoever reads it meanwhile sees the old content or the new, never a part."""
    # An existing file keeps its mode, and a symbolic link stays: the file that it points to is replaced.
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        with open(beside, "x", encoding="utf-8", errors=errors, newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
