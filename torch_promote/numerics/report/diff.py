"""`TraceReport.diff`: the calls of two traces, aligned by module, overload and the how-manieth such call it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch_promote.numerics.records.calls import Call, TensorInfo
from torch_promote.numerics.report.text_table import text_table
from torch_promote.reference.dtypes import dtype_name

if TYPE_CHECKING:
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["Change", "TraceDiff", "compare_traces"]

#: How many rows `str` shows.
_SHOWN = 30
_ONLY_BEFORE, _ONLY_AFTER = "only before", "only after"

_Place = tuple[str, str, str]  # phase, module, the op's name with its overload


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a call of the first trace and the same call of the second.

    Attributes:
        phase: "forward", "backward" or "recompute".
        module: The path of the module.
        op: The op's name with its overload.
        number: The how-manieth call of this op in this module and phase it is, from 0.
        line: The source line in the second trace; in the first, if the call is only there.
        what: What differs: "inputs", "ran_with", "outputs" (the dtypes), "policy", "said_by", "casts", "error"; or
            "only before", "only after".
        before: In the first trace, as text; "" if the call is not in it.
        after: In the second trace.
    """

    phase: str
    module: str
    op: str
    number: int
    line: str
    what: str
    before: str
    after: str


@dataclass(frozen=True)
class TraceDiff:
    """The differences between two traces. It is true if there are any.

    Attributes:
        changes: The differences, in the order of the calls: of the first trace, then calls that only the second has.
        compared: How many calls both traces have.
        dropped: How many calls the traces did not keep (see `max_calls`), which are not compared.

    Example:
        >>> import torch, torch_promote as tp
        >>> with tp.trace() as before, tp.my_autocast("cpu"):
        ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> with tp.trace() as after, tp.my_autocast("cpu", overrides={"mm": "fp32"}):
        ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> difference = before.diff(after)
        >>> next((c.before, c.after) for c in difference.changes if c.op == "aten::mm" and c.what == "outputs")
        ('bfloat16', 'float32')
        >>> before.diff(before).same
        True
    """

    changes: list[Change]
    compared: int
    dropped: int = 0

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not self.changes

    def __bool__(self) -> bool:
        return bool(self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences as values that JSON has."""
        return {
            "same": self.same,
            "compared": self.compared,
            "dropped": self.dropped,
            "changes": [asdict(change) for change in self.changes],
        }

    def __str__(self) -> str:
        note = f"\n{self.dropped:,} calls were not kept, and are not compared; see max_calls." if self.dropped else ""
        if self.same:
            return f"{self.compared:,} calls compared: no difference.{note}"
        differing = {(change.phase, change.module, change.op, change.number) for change in self.changes}
        groups: dict[tuple[str, ...], list[Change]] = {}
        ran_as_called = {
            (change.phase, change.module, change.op, change.number, change.before, change.after)
            for change in self.changes
            if change.what == "inputs"
        }
        for change in self.changes:
            key = (change.phase, change.module, change.op, change.number, change.before, change.after)
            if change.what == "ran_with" and key in ran_as_called:
                continue  # a call that autocast did not cast: one row says it
            groups.setdefault((change.op, change.phase, change.what, change.before, change.after), []).append(change)
        # What an override changed comes first, then what followed from it.
        decided = {change.op for change in self.changes if change.what in ("policy", "said_by")}
        rows = [
            [op, phase, what, before, after, f"{len(changes):,}", _modules(changes)]
            for (op, phase, what, before, after), changes in sorted(
                groups.items(), key=lambda group: group[0][0] not in decided
            )
        ]
        more = f"\nand {len(rows) - _SHOWN} more rows; see .changes" if len(rows) > _SHOWN else ""
        header = ["op", "phase", "what", "before", "after", "calls", "modules"]
        only_before, only_after = (
            sum(change.what == what for change in self.changes) for what in (_ONLY_BEFORE, _ONLY_AFTER)
        )
        both = len(differing) - only_before - only_after
        title = f"{both:,} of {self.compared:,} calls differ; {only_before:,} only before, {only_after:,} only after:"
        return f"{title}\n{text_table(header, rows[:_SHOWN])}{more}{note}"


def compare_traces(before: TraceRecords, after: TraceRecords) -> TraceDiff:
    """Compares the calls of two traces.

    A call of the first trace is compared with the call of the second that has the same phase, module, overload and
    number among such calls. Times, threads, shapes and sizes in bytes do not count.

    Args:
        before: The first trace.
        after: The second.
    """
    # Calls that a trace did not keep would look as if they were only in the other one.
    complete = not (before.dropped or after.dropped)
    others: dict[_Place, list[Call]] = {}
    for call in after.calls:
        others.setdefault(_place(call), []).append(call)
    counts: dict[_Place, int] = {}
    changes: list[Change] = []
    compared = 0
    for call in before.calls:
        place = _place(call)
        number = counts[place] = counts.get(place, -1) + 1
        twins = others.get(place, ())
        if number < len(twins):
            compared += 1
            changes.extend(_differences(call, twins[number], number))
        elif complete:
            changes.append(Change(*place, number, call.line, _ONLY_BEFORE, call.dtypes, ""))
    if complete:
        counts = {place: count + 1 for place, count in counts.items()}
        seen: dict[_Place, int] = {}
        for call in after.calls:
            place = _place(call)
            number = seen[place] = seen.get(place, -1) + 1
            if number >= counts.get(place, 0):
                changes.append(Change(*place, number, call.line, _ONLY_AFTER, "", call.dtypes))
    return TraceDiff(changes, compared, before.dropped + after.dropped)


def _place(call: Call) -> _Place:
    return call.phase, call.module, call.name


def _differences(one: Call, other: Call, number: int) -> Iterator[Change]:
    for what, before, after in (
        ("inputs", one.inputs, other.inputs),
        ("ran_with", one.ran_with, other.ran_with),
        ("outputs", one.outputs, other.outputs),
    ):
        if before is not after and (was := _dtypes(before)) != (now := _dtypes(after)):
            yield _change(other, number, what, was, now)
    if one.policy != other.policy:
        yield _change(other, number, "policy", one.policy_name or "none", other.policy_name or "none")
    if one.said_by != other.said_by:
        yield _change(other, number, "said_by", one.said_by or "none", other.said_by or "none")
    if (one.casts or other.casts) and (was := _casts(one)) != (now := _casts(other)):
        yield _change(other, number, "casts", was, now)
    if one.error != other.error:
        yield _change(other, number, "error", *("it raised" if call.error else "it returned" for call in (one, other)))


def _change(call: Call, number: int, what: str, before: str, after: str) -> Change:
    return Change(*_place(call), number, call.line, what, before, after)


def _dtypes(infos: Iterable[TensorInfo]) -> str:
    return ", ".join(dtype_name(info.dtype) for info in infos) or "none"


def _casts(call: Call) -> str:
    texts = (
        f"{cast.argument}: {dtype_name(cast.from_dtype)} -> {dtype_name(cast.to_dtype)}{', reused' * cast.reused}"
        for cast in call.casts
    )
    return "; ".join(texts) or "none"


def _modules(changes: list[Change]) -> str:
    names = list(dict.fromkeys(change.module or "(none)" for change in changes))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
