"""The report of a crosscheck: mismatches, and how many calls were checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch_promote.errors import CrosscheckError
from torch_promote.regions.defaults import spell_default_policy
from torch_promote.report.base import Column, Content, Fact, Listing, Part, Report, Table

#: How many mismatches, or names of ops, a text shows.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A call whose result differs from what the reference, or stock, says.

    Attributes:
        kind: What differs. "dtype", "shape", "strides": the result, from the reference or, for a custom op, from its
            registered fake. "casts": the casts that
            autocast inserted, from the autocast plan. "bits": the result, from the same call under stock autocast: its
            bits, dtype or layout. "error": the call raised and should not have, or did not raise and should have.
            "row": PyTorch's autocast has a kernel for the op, and the op table has no row for it. "reference": the
            reference itself failed.
        op: The overload, such as `aten.mm.default`.
        arguments: The arguments, tensors as `dtype[shape]`, with strides if they are not contiguous and the device if
            it is not the CPU.
        expected: The expected value.
        got: The actual value.
        where: The line of Python that called the op: file, line number, function and text. In a backward, the line that
            started the backward.
    """

    kind: str
    op: str
    arguments: str
    expected: str
    got: str
    where: str

    def __str__(self) -> str:
        return (
            f"{self.op}({self.arguments}): {self.kind}\n"
            f"    expected {self.expected}\n"
            f"    got      {self.got}\n"
            f"    at {self.where}"
        )


def mismatch_text(mismatches: Sequence[Mismatch], calls: int) -> str:
    """Returns the text of an error: all ops and kinds of mismatches in its first line, then the first mismatches."""
    kinds = Counter(f"{mismatch.op} {mismatch.kind}" for mismatch in mismatches)
    words = ", ".join(f"{kind} x{count}" for kind, count in kinds.most_common(_SHOWN))
    lines = [f"crosscheck: {len(mismatches)} mismatches in {calls} calls: {words}"]
    lines += map(str, mismatches[:_SHOWN])
    return "\n".join([*lines, "..."] if len(mismatches) > _SHOWN else lines)


@dataclass(repr=False)
class CrosscheckReport(Report):
    """The counts and mismatches of a crosscheck. It fills while the block runs.

    Attributes:
        mismatches: Every mismatch, in the order of the calls.
        checked: Calls whose results were compared with the reference, by op.
        by_fake: Calls of custom ops whose results were compared with the op's registered fake, by op.
        composite: Calls of composite ops that no rule covers, by op. The ops that they call are checked.
        no_rule: Calls of other ops that no rule covers, by op. Their results were not compared.
        with_policy: Calls to which a cast policy applied, by op. Their casts were compared with the plan.
        with_stock: Calls that were compared with stock autocast bit for bit, by op.
        stock_raised: Calls for which stock autocast raises and ours does not, by op.
        not_compared: Calls that could not be compared with stock, by reason.
        known_gaps: Mismatches that a known gap explains, by the gap's reason; `mismatches` does not have them.
        default_policy: The default policy at the start, and where it comes from. "" for PyTorch's own.
    """

    NOUN: ClassVar[str] = "crosscheck"
    FORMAT: ClassVar[str] = "torch_promote crosscheck"

    mismatches: list[Mismatch] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    by_fake: Counter[str] = field(default_factory=Counter)
    composite: Counter[str] = field(default_factory=Counter)
    no_rule: Counter[str] = field(default_factory=Counter)
    with_policy: Counter[str] = field(default_factory=Counter)
    with_stock: Counter[str] = field(default_factory=Counter)
    stock_raised: Counter[str] = field(default_factory=Counter)
    not_compared: Counter[str] = field(default_factory=Counter)
    known_gaps: Counter[str] = field(default_factory=Counter)
    default_policy: str = field(default_factory=spell_default_policy)

    @property
    def ok(self) -> bool:
        """Whether there is no mismatch."""
        return not self.mismatches

    @property
    def calls(self) -> int:
        """The number of calls, those of composite ops included."""
        return self.checked.total() + self.by_fake.total() + self.composite.total() + self.no_rule.total()

    @property
    def coverage(self) -> float:
        """The share of the calls that a rule or a fake covers, without composite ops; 1.0 if there was no call."""
        ruled, unruled = self.checked.total() + self.by_fake.total(), self.no_rule.total()
        return ruled / (ruled + unruled) if ruled + unruled else 1.0

    def raise_for_mismatches(self) -> None:
        """Raises a CrosscheckError with the mismatches if there is one."""
        if self.mismatches:
            raise CrosscheckError(mismatch_text(self.mismatches, self.calls))

    def add(self, other: CrosscheckReport) -> None:
        """Adds the mismatches and counts of another report."""
        self.mismatches += other.mismatches
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.default_policy = self.default_policy or other.default_policy

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, for JSON.

        Example:
            >>> CrosscheckReport().to_dict()["coverage"]
            1.0
        """
        return {**super().to_dict(), "ok": self.ok, "calls": self.calls, "coverage": self.coverage}

    def content(self) -> Content:
        """Returns all that the report says to people: the counts, the mismatches, and what was not compared."""
        notes = {
            "checked": f"{self.coverage:.1%} of those with kernels",
            "composite": "the ops that they call are checked",
        }
        facts: list[Fact] = [("default policy", self.default_policy)] if self.default_policy else []
        facts.append(("calls", f"{self.calls:,}"))
        for name, title in _COUNTERS.items():
            count = getattr(self, name).total()
            if count or name in ("checked", "no_rule"):
                facts.append((title, f"{count:,}", notes.get(name, "")))
        facts.append(("mismatches", f"{len(self.mismatches):,}"))
        columns = ("kind", Column("call", "code"), "expected", "got", Column("line", "line"))
        calls = [(m.kind, f"{m.op}({m.arguments})", m.expected, m.got, m.where) for m in self.mismatches]
        counters = [getattr(self, name) for name in _COLUMNS]
        rows = [(op, *(counter[op] or None for counter in counters)) for op in set().union(*counters)]
        rows.sort(key=lambda row: ([-(count or 0) for count in row[1:]], row[0]))
        parts: list[Part] = [
            Listing("Mismatches", list(map(str, self.mismatches)), _SHOWN, "terminal", wrap=False),
            Table("Mismatches", columns, calls, where="page"),
            Table("Not compared with stock", ("reason", "calls"), self.not_compared.most_common()),
            Table("Known gaps", ("reason", "mismatches"), self.known_gaps.most_common()),
            Table("Ops", (Column("op", "name"), *_COLUMNS.values()), rows, _SHOWN),
        ]
        verdict = f"No mismatch in {self.calls:,} calls." if self.ok else f"Mismatches: {len(self.mismatches):,}."
        return Content("crosscheck", verdict, facts, parts, good=self.ok)


#: The counters of a report, and the names that its text has for them.
_COUNTERS = {
    "checked": "checked against the reference",
    "by_fake": "checked against their fakes",
    "composite": "composite",
    "no_rule": "without a rule",
    "with_policy": "with a cast policy",
    "with_stock": "compared with stock",
    "stock_raised": "stock raised",
    "not_compared": "not compared",
    "known_gaps": "known gap",
}
#: The counters by op, and the names of their columns in the table of ops, which is sorted by them.
_COLUMNS = {
    "no_rule": "no rule",
    "stock_raised": "stock raised",
    "with_policy": "policy",
    "with_stock": "stock",
    "checked": "checked",
    "by_fake": "fake",
    "composite": "composite",
}
