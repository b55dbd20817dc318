"""The report of a crosscheck: mismatches, and how many calls were checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_promote.errors import TorchPromoteError
from torch_promote.regions.defaults import spell_default_policy
from torch_promote.text_layout import html_table

__all__ = ["CrosscheckError", "CrosscheckReport", "Mismatch", "count_line", "most_common"]

#: How many mismatches the text of a report shows in full, and how many names one of its lines lists.
_SHOWN = 20
#: How many mismatches a notebook shows.
_IN_A_NOTEBOOK = 200


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


class CrosscheckError(TorchPromoteError, AssertionError):
    """A mismatch, raised under `raise_on_mismatch` or by `CrosscheckReport.raise_for_mismatches`."""


@dataclass(repr=False)
class CrosscheckReport:
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
        """Raises a CrosscheckError with the text of the report if there is a mismatch."""
        if self.mismatches:
            raise CrosscheckError(str(self))

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
        counts = {name: dict(sorted(getattr(self, name).items())) for name in _COUNTERS}
        return {
            "ok": self.ok,
            "calls": self.calls,
            "coverage": self.coverage,
            "default_policy": self.default_policy,
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            **counts,
        }

    def __str__(self) -> str:
        notes = [f"note: regions start from the default policy, {self.default_policy}"] if self.default_policy else []
        lines = [
            *notes,
            count_line("calls", self.calls),
            count_line(
                "checked against the reference", self.checked.total(), f"{self.coverage:.1%} of those with kernels"
            ),
            count_line("composite", self.composite.total(), "the ops that they call are checked"),
            count_line("without a rule", self.no_rule.total(), most_common(self.no_rule)),
            count_line("with a cast policy", self.with_policy.total(), most_common(self.with_policy)),
        ]
        if self.by_fake:
            by_fake = count_line("checked against their fakes", self.by_fake.total(), most_common(self.by_fake))
            lines.insert(2, by_fake)
        if self.with_stock or self.stock_raised or self.not_compared:
            lines.append(count_line("compared with stock", self.with_stock.total(), most_common(self.with_stock)))
            lines.append(count_line("stock raised", self.stock_raised.total(), most_common(self.stock_raised)))
            lines += [count_line("not compared", count, reason) for reason, count in self.not_compared.items()]
        lines += [count_line("known gap", count, reason) for reason, count in self.known_gaps.items()]
        lines.append(count_line("mismatches", len(self.mismatches)))
        lines += [str(mismatch) for mismatch in self.mismatches[:_SHOWN]]
        if len(self.mismatches) > _SHOWN:
            rest = Counter(f"{m.op} {m.kind}" for m in self.mismatches[_SHOWN:])
            lines.append(f"and {rest.total()} more: {most_common(rest)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<CrosscheckReport: {len(self.mismatches):,} mismatches in {self.calls:,} calls>"

    def _repr_html_(self) -> str:
        counts = [[name.replace("_", " "), f"{getattr(self, name).total():,}"] for name in _COUNTERS]
        counts = [["calls", f"{self.calls:,}"], *counts, ["mismatches", f"{len(self.mismatches):,}"]]
        note = f"Regions start from the default policy, {self.default_policy}." if self.default_policy else ""
        table = html_table(["", "count"], counts, f"crosscheck: {'no mismatch' if self.ok else 'mismatches'}", note)
        if self.ok:
            return table
        rows = [
            [m.kind, f"{m.op}({m.arguments})", m.expected, m.got, m.where] for m in self.mismatches[:_IN_A_NOTEBOOK]
        ]
        left = len(self.mismatches) - len(rows)
        more = f"... and {left:,} more" if left else ""
        return table + html_table(["what differs", "call", "expected", "got", "line"], rows, note=more)


_COUNTERS = (
    "checked",
    "by_fake",
    "composite",
    "no_rule",
    "with_policy",
    "with_stock",
    "stock_raised",
    "not_compared",
    "known_gaps",
)


def count_line(title: str, count: int, note: str = "") -> str:
    """Returns a line of a table of counts.

    Example:
        >>> count_line("calls", 3, "in all")
        'calls                                  3  in all'
    """
    return f"{title:<30}{count:>10}  {note}".rstrip()


def most_common(counts: Mapping[str, int]) -> str:
    """Returns the names with the highest counts, and how many names are left out.

    Example:
        >>> most_common({"aten.mm.default": 1, "aten.sum.default": 4})
        'aten.sum.default 4, aten.mm.default 1'
    """
    common = Counter(counts).most_common(_SHOWN)
    listed = ", ".join(f"{name} {count}" for name, count in common)
    return f"{listed}, and {len(counts) - len(common)} more" if len(counts) > len(common) else listed
