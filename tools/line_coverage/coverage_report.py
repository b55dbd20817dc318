"""The output of `make coverage`: a table of the folders and the lines that nothing ran, or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import PurePosixPath

__all__ = ["Lines", "draw", "plain", "spans"]

_HEADER = ("folder", "files", "lines", "executed", "not executed", "left out")


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of a file that can be executed.

    Attributes:
        file: Its path in the sources.
        executed: The lines that ran.
        not_executed: The lines that did not.
        left_out: The lines that a comment leaves out of the measurement.
    """

    file: str
    executed: frozenset[int]
    not_executed: frozenset[int]
    left_out: frozenset[int]


def spans(numbers: Iterable[int]) -> str:
    """Returns line numbers in short, such as "3, 5-7"."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        lines = [number for _, number in run]
        runs.append(str(lines[0]) if len(lines) == 1 else f"{lines[0]}-{lines[-1]}")
    return ", ".join(runs)


def draw(files: Sequence[Lines]) -> str:
    """Returns a table of the folders, and the lines of each file that were not executed."""
    rows = [_HEADER]
    for language, title in (("py", "Python"), ("cpp", "C++")):
        own = [one for one in files if _language(one) == language]
        folders = sorted({_folder(one) for one in own})
        rows += [_row(folder, [one for one in own if _folder(one) == folder]) for folder in folders]
        if own:
            rows.append(_row(title, own))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = []
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        table.append("  ".join([row[0].ljust(widths[0]), *numbers]))
    lacking = [f"{one.file}: {spans(one.not_executed)}" for one in files if one.not_executed]
    return "\n".join([*table, "", *(["Not executed:", *lacking] if lacking else ["Every line was executed."])]) + "\n"


def plain(files: Sequence[Lines]) -> str:
    """Returns the same as JSON, for each file."""
    data = [
        {
            "file": one.file,
            "executed": len(one.executed),
            "not_executed": sorted(one.not_executed),
            "left_out": sorted(one.left_out),
        }
        for one in files
    ]
    return json.dumps(data, indent=2) + "\n"


def _row(name: str, files: Sequence[Lines]) -> tuple[str, ...]:
    executed = sum(len(one.executed) for one in files)
    lacking = sum(len(one.not_executed) for one in files)
    left_out = sum(len(one.left_out) for one in files)
    share = _percent(executed, executed + lacking)
    return (name, str(len(files)), str(executed + lacking), share, str(lacking), str(left_out))


def _percent(executed: int, lines: int) -> str:
    """A share in per cent, rounded down: only a file without a missing line has 100%."""
    return f"{1000 * executed // lines / 10:.1f}%" if lines else "-"


def _folder(lines: Lines) -> str:
    return "/".join(PurePosixPath(lines.file).parent.parts[:2]) or "."


def _language(lines: Lines) -> str:
    return "py" if lines.file.endswith(".py") else "cpp"
