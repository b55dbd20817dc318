"""Warns of overrides that had no effect, at the end of the region whose overrides they are.

csrc/region/named_use.h, NOTE [ Unused overrides ], says how the extension finds them.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch_promote import _C
from torch_promote.errors import UnusedOverrideWarning

__all__ = ["Line", "line_of", "warn_of_unused_overrides"]

#: Regions that this package makes have no author who could change their overrides.
_OURS = str(Path(__file__).parents[1]) + os.sep


class Line(NamedTuple):
    """A line of Python that makes regions with overrides.

    Attributes:
        filename: Its file.
        lineno: Its number in the file.
        module: The name of its module.
    """

    filename: str
    lineno: int
    module: str


#: The lines, by a place in their code. Python takes long to find a frame's line.
_lines: dict[tuple[str, str, int, int], Line | None] = {}

#: How many lines are kept at most, for programs that compile code again and again.
_MOST_LINES = 4096

#: What `warnings` keeps of its warnings of a line, by op.
_registries: dict[Line, dict[str, dict[str | tuple[str, type[Warning], int], int]]] = {}


def line_of(frame: FrameType | None) -> Line | None:
    """Returns the line that a frame runs; None for a line of this package, or if there is no frame."""
    if frame is None:
        return None
    code, module = frame.f_code, frame.f_globals.get("__name__", "<string>")
    place = (module, code.co_filename, code.co_firstlineno, frame.f_lasti)
    try:
        return _lines[place]
    except KeyError:
        pass
    if len(_lines) >= _MOST_LINES:
        _drop_oldest()
    line = Line(code.co_filename, frame.f_lineno, module)
    return _lines.setdefault(place, None if code.co_filename.startswith(_OURS) else line)


def _drop_oldest() -> None:
    for place in list(itertools.islice(_lines, _MOST_LINES // 8)):
        line = _lines.pop(place, None)
        if line is not None:
            _registries.pop(line, None)


def warn_of_unused_overrides(line: Line) -> None:
    """Warns of the overrides without effect in the region of a line that this thread has just ended."""
    unused = _C.take_unused_overrides()
    for op in dict.fromkeys(one[0] for one in unused):
        registry = _registries.setdefault(line, {}).setdefault(op, {})
        # `warnings` shows a text once for each line. Counts in it may differ, so the text of the first time is kept.
        text = next((key[0] for key in registry if isinstance(key, tuple)), "") or _text(op, unused)
        warnings.warn_explicit(text, UnusedOverrideWarning, line.filename, line.lineno, line.module, registry)


def _text(op: str, unused: Sequence[tuple[str, str, int, str]]) -> str:
    instead = [one[1:] for one in unused if one[0] == op]
    ran = "; ".join(
        f"{outer} ran {'once' if runs == 1 else f'{runs} times'} and calls {_short(inner)}{_includes(inner, op)}"
        for outer, runs, inner in instead
    )
    names = " and ".join(_short(outer) for outer, _, _ in instead)
    return f"the override of {op} was never used: {ran} with autocast off. Name {names}."


def _includes(inner: str, op: str) -> str:
    return "" if inner.partition(".")[0] == op.partition(".")[0] else f", which includes {_short(op)},"


def _short(op: str) -> str:
    return op.removeprefix("aten::")
