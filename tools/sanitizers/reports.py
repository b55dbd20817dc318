"""Reads the reports of the sanitizers from their log files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: The first line of a report.
_BEGIN = re.compile(
    r"^(?:"
    r"WARNING: ThreadSanitizer: (?P<tsan>.+?) \(pid=\d+\)"
    r"|==\d+==ERROR: (?:Address|Thread)Sanitizer: (?P<error>[\w-]+)"
    r"|(?P<leak>Direct leak|Indirect leak) of"
    r"|.*?(?P<ubsan_at>/\S+?:\d+:\d+): runtime error: (?P<ubsan>.+)"  # in the log of pytest, after its dots
    r"|(?:==\d+==)? ?FATAL: (?P<fatal>.+)"
    r"|==\d+==(?P<unfinished>LeakSanitizer has encountered a fatal error)"
    r"|.*(?P<check>CHECK failed: .+)"
    r").*$",
    re.MULTILINE,
)
#: `#0 function file:line ...`; with ASan, `#0 0x1234 in function file:line`.
_FRAME = re.compile(r"^ +#\d+ (?:0x[0-9a-f]+ in )?(?P<function>.+?) (?P<file>/\S+?):(?P<line>\d+)", re.MULTILINE)
_ANY_FRAME = re.compile(r"^ +#\d+ (?P<text>.+)$", re.MULTILINE)
#: The C++ of this project, in any checkout.
_OURS = re.compile(r"(?:^|/)(?<!torch/)((?:csrc|tools/cuda_stand_in)/[^:]+)$")


@dataclass(frozen=True, slots=True)
class Report:
    """One report.

    Attributes:
        kind: What the sanitizer found, such as "data race".
        place: The topmost frame in our code; without one, the topmost frame.
        ours: Whether a frame is in our code.
        text: The whole report.
        log: The name of its file, which ends with the id of the process.
    """

    kind: str
    place: str
    ours: bool
    text: str
    log: str


def read(folder: Path) -> list[Report]:
    """Returns the reports of all log files in a folder, except leaks of memory that our code has not allocated.

    At its end, Python leaves thousands of objects, its own and PyTorch's, that nothing refers to any more.
    """
    return [
        report
        for file in sorted(folder.iterdir())
        for report in _reports(file.read_text(encoding="utf-8", errors="replace"), file.name)
        if report.ours or "leak" not in report.kind.lower()
    ]


def _reports(text: str, log: str) -> Iterator[Report]:
    begins = list(_BEGIN.finditer(text))
    ends = [match.start() for match in begins[1:]] + [len(text)]
    for begin, end in zip(begins, ends, strict=False):  # in a file without a report there is one end too many
        found = {name: value for name, value in begin.groupdict().items() if value}
        at = found.pop("ubsan_at", None)
        (kind,) = found.values()
        body = text[begin.start() : end]
        frames = [match for match in _FRAME.finditer(body) if _OURS.search(match["file"])]
        if frames:
            place = f"{_short(frames[0]['file'])}:{frames[0]['line']} {frames[0]['function']}"
        elif at is not None:
            place = _short(at.rpartition(":")[0])
        else:
            first = _ANY_FRAME.search(body)
            place = first["text"] if first else "no stack"
        ours = bool(frames) or (at is not None and bool(_OURS.search(at.rsplit(":", 2)[0])))
        yield Report(kind, place, ours, body.rstrip(), log)


def _short(file: str) -> str:
    ours = _OURS.search(file.partition(":")[0])
    return file[ours.start(1) :] if ours else file
