"""The counts of a run, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field

from fuzz.running import Verdict
from fuzz.tree import KINDS, Program, names


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
    device = "cpu" if report.device == "cpu" else "cuda"
    never = [name for name, one in KINDS.items() if device in one.devices and name not in counts.statements]
    text = [
        f"{ran}:",
        f"  {counts.outcomes['same']:,} have the same bits",
        f"  {counts.outcomes['same error']:,} end with the same error, and have the same bits up to it",
        f"  {counts.outcomes['documented']:,} end with an error under stock only (docs/differences.md, rows 2 and 7)",
        f"  {len(report.found):,} differ",
        f"compared bit for bit: {counts.losses:,} losses; {counts.others:,} gradients, weights and activations",
    ]
    for title in ("modes", "optimizers", "layers", "statements", "errors"):
        drawn = (f"{name} {number:,}" for name, number in getattr(counts, title).most_common())
        text.append(textwrap.fill(f"{title}: {', '.join(drawn)}", 120, subsequent_indent="  "))
    text.append(f"never drawn: {', '.join(never) or 'none'}")
    if counts.programs:
        text.append(f"{counts.seconds / counts.programs * 1000:.2f} ms of processor time for a program")
    for found in report.found:
        text.append(f"program {found.number} differs: {found.detail}; {found.path} has {found.statements} statements")
    if report.found:
        text.append(f"\n{report.found[0].script}")
    return "\n".join(text) + "\n"
