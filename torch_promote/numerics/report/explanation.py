"""`TraceReport.explain`: explains the calls of a module, an op or a line, in a paragraph and a table."""

from __future__ import annotations

import html
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch_promote.numerics.records.groups import CallGroup
from torch_promote.numerics.report.explanation_text import Material, advice_of, sentences_of
from torch_promote.numerics.report.findings import most_of, size
from torch_promote.numerics.report.pattern import select_places
from torch_promote.text_layout import text_table, wrapped

if TYPE_CHECKING:
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["Explanation", "ExplanationRow", "explain"]

#: The number of rows that `str` and the notebook's table show.
_SHOWN = 20
_HEADER = ("op", "module", "calls", "dtypes", "policy", "casts", "reused", "bytes")


@dataclass(frozen=True, slots=True)
class ExplanationRow:
    """The calls of one op in one module, among those explained.

    Attributes:
        op: The op's name with its overload.
        module: The module's path.
        calls: The number of calls.
        dtypes: The most frequent dtypes: inputs, cast inputs, outputs; "(+2)" if there are two more combinations.
        policy: The most frequent policy and its source; without a policy, what applied instead; or "". "(+1)" as in
            `dtypes`.
        casts: The number of casts made.
        reused: The number of casts reused.
        bytes: The size in bytes of the casts made.
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
    """An explanation of the calls that a pattern selects.

    Attributes:
        pattern: The pattern, without a prefix.
        kind: The kind of pattern: "module", "op" or "line".
        paragraph: The explanation.
        advice: Suggested changes, one sentence each; may be empty.
        rows: The table, most cast bytes first.

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
        """Returns the explanation as JSON-compatible values."""
        return {**asdict(self), "advice": list(self.advice), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        paragraph = textwrap.fill(self.paragraph, 100, break_long_words=False, break_on_hyphens=False)
        return self._text(paragraph, None)

    def text(self, width: int | None) -> str:
        """Returns the explanation in lines for a terminal.

        Args:
            width: The width of a line, in characters. None: nothing is wrapped.
        """
        return self._text("\n".join(wrapped(self.paragraph, width)), width)

    def _text(self, paragraph: str, width: int | None) -> str:
        advice = [line for one in self.advice for line in wrapped(f"- {one}", width, "", "  ")]
        paragraphs = [paragraph, *(["\n".join(advice)] if advice else [])]
        more = len(self.rows) - _SHOWN
        table = text_table(_HEADER, self._cells(), width) + (f"\nand {more} more rows" if more > 0 else "")
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
    """Explains the calls of a module, an op or a line, including calls beyond `max_calls`.

    Args:
        report: The trace.
        pattern: A module's path ("blocks.3.attn"), including its submodules; an op ("softmax", "aten::softmax",
            "aten::softmax.int"); or the end of a line ("train.py:41", "train.py"). If it is ambiguous, add a prefix:
            "module=softmax", "op=softmax".

    Raises:
        OptionError: The pattern matches nothing in the trace, or is ambiguous. It is a ValueError.
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
