"""What `crosscheck` found: mismatches, and how much of what ran was checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_promote.errors import TorchPromoteError

__all__ = ["CrosscheckError", "CrosscheckReport", "Mismatch"]

#: How many mismatches, and how many ops, the text of a report shows in full.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A call that went otherwise than the reference, or stock, says.

    Attributes:
        kind: "dtype", "shape", "strides": of a result, against the reference. "casts": what autocast inserted, against
            the autocast plan. "bits": a result, against the same call under stock autocast, or its dtype or layout.
            "error": a call raised that should not, or the other way round. "row": PyTorch's autocast has a kernel for
            the op, and the op table no row. "reference": the reference itself broke.
        op: The overload, as in `aten.mm.default`.
        arguments: The arguments, tensors as `dtype[shape]`, with strides and device where they are not the plain ones.
        expected: What should be.
        got: What is.
        where: The line of Python that called it: file, line, function and text. In a backward, the line that started
            the backward.
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
    """A mismatch, raised where it was found or by `CrosscheckReport.raise_for_mismatches`."""


@dataclass
class CrosscheckReport:
    """What a crosscheck saw. It is filled while the block runs.

    Attributes:
        mismatches: Every mismatch, in the order of the calls.
        checked: Calls whose results were compared with the reference, by op.
        composite: Calls of composite ops without a rule of their own, by op: what they are made of is checked.
        no_rule: Calls that no rule covers, by op. Nothing was compared.
        with_policy: Calls that a cast policy applied to, by op; the casts were compared with the plan.
        with_stock: Calls that were compared bit for bit with stock autocast, by op.
        stock_raised: Calls at which stock autocast raises and ours does not, by op.
        not_compared: Calls that could not be compared with stock, by reason.
        known_gaps: Mismatches that a known gap explains, by the gap's reason; they are not in `mismatches`.
    """

    mismatches: list[Mismatch] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    composite: Counter[str] = field(default_factory=Counter)
    no_rule: Counter[str] = field(default_factory=Counter)
    with_policy: Counter[str] = field(default_factory=Counter)
    with_stock: Counter[str] = field(default_factory=Counter)
    stock_raised: Counter[str] = field(default_factory=Counter)
    not_compared: Counter[str] = field(default_factory=Counter)
    known_gaps: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Whether there is no mismatch."""
        return not self.mismatches

    @property
    def calls(self) -> int:
        """How many calls were seen, composite ops among them."""
        return self.checked.total() + self.composite.total() + self.no_rule.total()

    @property
    def coverage(self) -> float:
        """The share of the calls, composite ops aside, that a rule covers; 1.0 where there was none."""
        ruled, unruled = self.checked.total(), self.no_rule.total()
        return ruled / (ruled + unruled) if ruled + unruled else 1.0

    def raise_for_mismatches(self) -> None:
        """Raises a CrosscheckError with the text of the report, unless there is no mismatch."""
        if self.mismatches:
            raise CrosscheckError(str(self))

    def add(self, other: CrosscheckReport) -> None:
        """Adds what another report has."""
        self.mismatches += other.mismatches
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))

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
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            **counts,
        }

    def __str__(self) -> str:
        lines = [
            _row("calls", self.calls),
            _row("checked against the reference", self.checked.total(), f"{self.coverage:.1%} of those with kernels"),
            _row("composite", self.composite.total(), "made of others, which are checked"),
            _row("without a rule", self.no_rule.total(), _most(self.no_rule)),
            _row("with a cast policy", self.with_policy.total(), _most(self.with_policy)),
        ]
        if self.with_stock or self.stock_raised or self.not_compared:
            lines.append(_row("compared with stock", self.with_stock.total(), _most(self.with_stock)))
            lines.append(_row("stock raised", self.stock_raised.total(), _most(self.stock_raised)))
            lines += [_row("not compared", count, reason) for reason, count in self.not_compared.items()]
        lines += [_row("known gap", count, reason) for reason, count in self.known_gaps.items()]
        lines.append(_row("mismatches", len(self.mismatches)))
        lines += [str(mismatch) for mismatch in self.mismatches[:_SHOWN]]
        if len(self.mismatches) > _SHOWN:
            rest = Counter(f"{m.op} {m.kind}" for m in self.mismatches[_SHOWN:])
            lines.append(f"and {rest.total()} more: {_most(rest)}")
        return "\n".join(lines)


_COUNTERS = (
    "checked",
    "composite",
    "no_rule",
    "with_policy",
    "with_stock",
    "stock_raised",
    "not_compared",
    "known_gaps",
)


def _row(what: str, count: int, note: str = "") -> str:
    return f"{what:<30}{count:>10}  {note}".rstrip()


def _most(counts: Mapping[str, int]) -> str:
    common = Counter(counts).most_common(_SHOWN)
    listed = ", ".join(f"{name} {count}" for name, count in common)
    return f"{listed}, and {len(counts) - len(common)} ops more" if len(counts) > len(common) else listed
