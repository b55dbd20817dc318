"""Saves reports: the file extension selects the format, and files are replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_promote.errors import OptionError
from torch_promote.policy.atomic_write import write_atomically

__all__ = ["read_json", "save_as", "to_json"]


def save_as(
    path: str | os.PathLike[str], what: str, formats: Mapping[str, Callable[[], str]], meanings: Mapping[str, str]
) -> None:
    """Writes a file.

    Args:
        path: The file.
        what: The object that is saved, for errors: "the trace".
        formats: Maps file extensions to functions that return the content. Longer extensions must come first.
        meanings: The purpose of each format, by extension, for errors.

    Raises:
        OptionError: The extension is unknown, or the file cannot be written. An existing file is then unchanged.
    """
    target = Path(os.fspath(path))
    make = next((make for ending, make in formats.items() if target.name.lower().endswith(ending)), None)
    cannot = f"cannot save {what} as {str(target)!r}:"
    if make is None:
        legal = ", ".join(f"{ending} ({meaning})" for ending, meaning in meanings.items())
        raise OptionError(f"{cannot} the file extension selects the format. Legal: {legal}.")
    if target.is_dir():
        raise OptionError(f"{cannot} it is a folder. Name a file in it.")
    if not target.parent.is_dir():
        raise OptionError(f"{cannot} there is no folder {str(target.parent)!r}. Create it first.")
    text = make()
    try:
        write_atomically(target, text, errors="backslashreplace")
    except OSError as error:
        raise OptionError(f"{cannot} {error.strerror or error}.") from error


def to_json(data: Any) -> str:
    r"""Returns the content of a .json file.

    Example:
        >>> to_json({"calls": [1, 2]})
        '{"calls":[1,2]}\n'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"


def read_json(
    path: str | os.PathLike[str], what: str, form: str, version: int, read: Callable[[dict[str, Any]], Any]
) -> Any:
    """Reads a file that `save_as` wrote as .json.

    Args:
        path: The file.
        what: The content, for errors: "trace".
        form: The required "format".
        version: The required "version".
        read: Makes the report from the data.

    Returns:
        The result of `read`.

    Raises:
        OptionError: The file cannot be read, is not such a report, or was written by an incompatible version.
    """
    name = os.fspath(path)
    cannot, saved = f"cannot read the {what} {name!r}:", 'Pass a file that report.save("NAME.json") wrote.'
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{cannot} {error.strerror or error}. {saved}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{cannot} it is not JSON ({error}). {saved}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != form:
        events = isinstance(data, dict) and "traceEvents" in data
        why = "it is a trace for Perfetto" if events else f'its "format" is {found!r}, not {form!r}'
        raise OptionError(f"{cannot} {why}. {saved}")
    if data.get("version") != version:
        raise OptionError(
            f"{cannot} its version is {data.get('version')!r}, and this torch_promote reads version {version}. Read it "
            f"with the torch_promote that wrote it, or create it again."
        )
    try:
        return read(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
        raise OptionError(
            f"{cannot} it is incomplete or was changed ({type(error).__name__}: {error}). {saved}"
        ) from error
