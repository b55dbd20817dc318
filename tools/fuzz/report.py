"""The counts of a run, and how the command prints them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from fuzz.running import Verdict
from fuzz.tree import KINDS, Program, names

__all__ = ["Counts", "Found", "Report", "as_json", "as_text"]

_OUTCOMES = ("same", "same error", "documented", "differs")


@dataclass(slots=True)
class Counts:
    """What ran, and what was compared."""

    programs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    losses: int = 0
    others: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    optimizers: Counter[str] = field(default_factory=Counter)
    layers: Counter[str] = field(default_factory=Counter)
    statements: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    #: Processor time.
    seconds: float = 0.0

    def add(self, program: Program, verdict: Verdict) -> None:
        """Counts a program."""
        self.programs += 1
        self.outcomes[verdict.what] += 1
        self.losses += verdict.losses
        self.others += verdict.compared - verdict.losses
        self.modes[program.mode] += 1
        self.optimizers[program.optimizer] += 1
        self.layers.update(program.layers)
        self.statements.update(names(program))
        if verdict.what in ("same error", "documented"):
            self.errors[verdict.detail[:100]] += 1

    @property
    def is_mostly_errors(self) -> bool:
        """Whether more than one program in five ends with an error under both, which compares little."""
        return self.outcomes["same error"] * 5 > self.programs

    def merge(self, other: Counts) -> None:
        """Adds other counts."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, name, mine + theirs)


@dataclass(slots=True)
class Found:
    """A program that differs."""

    number: int
    detail: str
    #: The script of the smallest program that differs, and where it was written.
    script: str = ""
    statements: int = 0
    path: str = ""


@dataclass(slots=True)
class Report:
    """The result of a run."""

    device: str
    seed: int
    first: int
    asked: int
    counts: Counts = field(default_factory=Counts)
    found: list[Found] = field(default_factory=list)
    #: The memory of the processes after their first thousand programs and at the end, in MiB; the largest of each.
    rss: tuple[float, float] = (0.0, 0.0)


def as_json(report: Report) -> str:
    """The report as JSON."""
    counts = {name: getattr(report.counts, name) for name in Counts.__slots__}
    plain = {name: getattr(report, name) for name in Report.__slots__}
    return json.dumps({**plain, "counts": counts, "found": [asdict(found) for found in report.found]}, indent=1)


def as_text(report: Report) -> str:
    """The report as text."""
    counts = report.counts
    ran = f"{counts.programs:,} programs of seed {report.seed} ran on {report.device} under stock and ours"
    if counts.programs < report.asked:
        ran += f" (of {report.asked:,})"
    text = [f"{ran}:", f"  {counts.outcomes['same']:,} have the same bits"]
    for what, words in (
        ("same error", "end with the same error, and have the same bits up to it"),
        ("documented", "end with an error under stock only, as rows 2 and 7 of docs/differences.md say"),
    ):
        if counts.outcomes[what]:
            text.append(f"  {counts.outcomes[what]:,} {words}")
    text.append(f"  {len(report.found):,} differ" if report.found else "  none differs")
    text.append(f"compared bit for bit: {counts.losses:,} losses; {counts.others:,} gradients, weights and activations")
    text.append(_table("cache modes", counts.modes, ()))
    text.append(_table("optimizers", counts.optimizers, ()))
    text.append(_table("layers", counts.layers, ()))
    text.append(_table("statements", counts.statements, [name for name, k in KINDS.items() if _fits(k, report)]))
    text.append(_table("errors under both", counts.errors, (), width=1))
    if counts.programs:
        text.append(
            f"{counts.seconds / counts.programs * 1000:.2f} ms of processor time for a program; the largest process "
            f"had {report.rss[0]:.0f} MiB after its first thousand programs, and {report.rss[1]:.0f} MiB at the end"
        )
    for found in report.found:
        smaller = f"; {found.path} has {found.statements} statements" if found.path else ""
        text.append(f"program {found.number} differs: {found.detail}{smaller}")
    if report.found and report.found[0].script:
        text.append(f"\n{report.found[0].script}")
    return "\n".join(part for part in text if part) + "\n"


def _fits(kind: Any, report: Report) -> bool:
    return ("cpu" if report.device == "cpu" else "cuda") in kind.devices


def _table(title: str, counts: Counter[str], every: Any, width: int = 4) -> str:
    """Counts in columns, largest first. Names of `every` that were not drawn are listed with a zero."""
    rows = [*counts.most_common(), *((name, 0) for name in every if name not in counts)]
    if not rows:
        return ""
    cells = [f"{name} {number:,}" for name, number in rows]
    wide = max(map(len, cells)) + 2
    lines = ["".join(cell.ljust(wide) for cell in cells[at : at + width]) for at in range(0, len(cells), width)]
    return f"{title}:\n" + "\n".join(f"  {line}".rstrip() for line in lines)
