"""`TraceReport.explain`: what happened to the calls of a module, an op or a line, in a paragraph and a table."""

from __future__ import annotations

import html
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch_promote.numerics.records.groups import CallGroup
from torch_promote.numerics.report.explanation_text import Material, advice_of, sentences_of
from torch_promote.numerics.report.findings import most_of, size
from torch_promote.numerics.report.pattern import select_places
from torch_promote.numerics.report.text_table import text_table

if TYPE_CHECKING:
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["Explanation", "ExplanationRow", "explain"]

#: How many rows `str` and the notebook's table show.
_SHOWN = 20
_HEADER = ("op", "module", "calls", "dtypes", "policy", "casts", "reused", "bytes")


@dataclass(frozen=True, slots=True)
class ExplanationRow:
    """The calls of one op in one module, among those explained.

    Attributes:
        op: The op's name with its overload.
        module: The module's path.
        calls: How many calls there are.
        dtypes: The dtypes of most of them: inputs, what the op ran with, outputs; "(+2)" if the others had two more
            kinds.
        policy: The policy of most of them and who said so; without a policy, what decided instead; or "". "(+1)" as in
            `dtypes`.
        casts: How many casts were made.
        reused: How many were reused.
        bytes: The size in bytes of those that were made.
    """

    op: str
    module: str
    calls: int
    dtypes: str
    policy: str
    casts: int
    reused: int
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """What happened to the calls that a pattern means, and why.

    Attributes:
        pattern: The pattern, without a prefix.
        kind: What it is: "module", "op" or "line".
        paragraph: The explanation.
        advice: What you can change, a sentence each; empty if there is nothing to say.
        rows: The table, those with most bytes cast first.

    Example:
        >>> import torch, torch_promote as tp
        >>> with tp.trace() as report, tp.my_autocast("cpu"):
        ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> print(report.explain("mm").paragraph[:37])
        aten::mm was called once, in forward.
    """

    pattern: str
    kind: str
    paragraph: str
    advice: tuple[str, ...]
    rows: tuple[ExplanationRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as values that JSON has."""
        return {**asdict(self), "advice": list(self.advice), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        paragraphs = [textwrap.fill(self.paragraph, 100, break_long_words=False, break_on_hyphens=False)]
        paragraphs += ["\n".join(f"- {one}" for one in self.advice)] if self.advice else []
        more = len(self.rows) - _SHOWN
        table = text_table(_HEADER, self._cells()) + (f"\nand {more} more rows" if more > 0 else "")
        return "\n\n".join([*paragraphs, table])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEADER)
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in self._cells())
        items = "".join(f"<li>{html.escape(one)}</li>" for one in self.advice)
        return (
            f"<p>{html.escape(self.paragraph)}</p>{f'<ul>{items}</ul>' if items else ''}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        )

    def _cells(self) -> list[list[str]]:
        return [
            [
                row.op,
                row.module or "(none)",
                f"{row.calls:,}",
                row.dtypes,
                row.policy,
                f"{row.casts:,}",
                f"{row.reused:,}",
                size(row.bytes),
            ]
            for row in self.rows[:_SHOWN]
        ]


def explain(report: TraceRecords, pattern: str) -> Explanation:
    """Explains what happened to the calls of a module, an op or a line. All calls count, also those beyond `max_calls`.

    Args:
        report: The trace.
        pattern: A module's path ("blocks.3.attn"), with the modules inside it; an op ("softmax", "aten::softmax",
            "aten::softmax.int"); or the end of a line ("train.py:41", "train.py"). If it could be two of these:
            "module=softmax", "op=softmax".

    Raises:
        OptionError: Nothing in the trace matches, or several things do. It is a ValueError.
    """
    totals = report._totals
    selection = select_places((place for place, _ in totals.select(lambda place: True)), pattern)
    groups: dict[tuple[str, str], CallGroup] = {}
    lines: dict[str, int] = {}
    whole = CallGroup("")
    for (op, module, line), group in totals.select(selection.wants):
        groups.setdefault((op, module), CallGroup(op)).merge(group)
        lines[line] = lines.get(line, 0) + group.calls
        whole.merge(group)
    casts = [one for one in report.casts() if selection.wants((one.op, one.module, one.line))]
    kept = [call for call in report.calls if selection.wants((call.name, call.module, call.line))]
    material = Material(selection.kind, selection.name, whole, groups, casts, lines, kept)
    rows = tuple(_row(op, module, group) for (op, module), group in groups.items())
    return Explanation(
        selection.name,
        selection.kind,
        " ".join(sentences_of(material)),
        tuple(advice_of(material)),
        tuple(sorted(rows, key=lambda row: (-row.bytes, -row.calls, row.op, row.module))),
    )


def _row(op: str, module: str, group: CallGroup) -> ExplanationRow:
    return ExplanationRow(
        op,
        module,
        group.calls,
        most_of(group.dtypes),
        most_of(group.policies + group.rules),
        group.casts,
        group.reused,
        group.bytes,
    )
