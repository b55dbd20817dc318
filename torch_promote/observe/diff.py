"""`TraceReport.diff`: compares the calls of two traces, aligned by module, overload and running number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch_promote.observe.events import Call, TensorInfo
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import Cell, Column, Content, Report, Table

if TYPE_CHECKING:
    from torch_promote.observe.events import Recording

__all__ = ["Change", "TraceDiff", "compare_traces"]


_ONLY_BEFORE, _ONLY_AFTER = "only before", "only after"

_Place = tuple[str, str, str]  # phase, module, the op's name with its overload


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a call of the first trace and the same call of the second.

    Attributes:
        phase: "forward", "backward" or "recompute".
        module: The path of the module.
        op: The op's name with its overload.
        number: The call's index, from 0, among the calls of this op in this module and phase.
        line: The source line in the second trace, or in the first if only that has the call.
        what: The differing attribute: "inputs", "ran_with", "outputs" (the dtypes), "policy", "said_by", "casts",
            "error"; or "only before", "only after".
        before: Its value in the first trace, as text; "" if the call is not in it.
        after: Its value in the second trace.
    """

    phase: str
    module: str
    op: str
    number: int
    line: str
    what: str
    before: str
    after: str


@dataclass(frozen=True, repr=False)
class TraceDiff(Report):
    """The differences between two traces. It is true if there are any.

    Attributes:
        changes: The differences, in the order of the calls of the first trace, then calls that only the second has.
        compared: The number of calls in both traces.
        dropped: The number of calls that the traces did not keep (see `max_calls`), which are not compared.

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

    NOUN: ClassVar[str] = "difference"

    changes: list[Change]
    compared: int
    dropped: int = 0

    @property
    def same(self) -> bool:
        """Whether there are no differences."""
        return not self.changes

    def __bool__(self) -> bool:
        return bool(self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences as JSON-compatible values."""
        return {
            "same": self.same,
            "compared": self.compared,
            "dropped": self.dropped,
            "changes": [asdict(change) for change in self.changes],
        }

    def content(self) -> Content:
        """Returns the numbers, and a row for each kind of difference: those of a changed policy first."""
        only_before, only_after = (
            sum(change.what == what for change in self.changes) for what in (_ONLY_BEFORE, _ONLY_AFTER)
        )
        calls = {(change.phase, change.module, change.op, change.number) for change in self.changes}
        differing = len(calls) - only_before - only_after
        verdict = f"{differing:,} of {self.compared:,} calls differ." if self.changes else "No difference."
        facts = [
            ("compared", f"{self.compared:,}"),
            ("differing", f"{differing:,}"),
            (_ONLY_BEFORE, f"{only_before:,}"),
            (_ONLY_AFTER, f"{only_after:,}"),
        ]
        if self.dropped:
            facts.append(("not compared", f"{self.dropped:,} (not stored; see max_calls)"))
        groups: dict[tuple[str, ...], Counter[str]] = {}
        ran_as_called = {_with_values(change) for change in self.changes if change.what == "inputs"}
        for change in self.changes:
            if change.what == "ran_with" and _with_values(change) in ran_as_called:
                continue  # one row is enough for a call without casts
            key = change.op, change.phase, change.what, change.before, change.after
            groups.setdefault(key, Counter())[change.module or "(none)"] += 1
        decided = {change.op for change in self.changes if change.what in ("policy", "said_by")}
        rows: list[tuple[Cell, ...]] = [
            (*key, modules.total(), modules)
            for key, modules in sorted(groups.items(), key=lambda group: group[0][0] not in decided)
        ]
        columns = Column("op", "name"), "phase", "what", "before", "after", "calls", Column("modules", "code")
        return Content("difference of two traces", verdict, facts, [Table("", columns, rows, most=30)])


def _with_values(change: Change) -> tuple[str | int, ...]:
    return change.phase, change.module, change.op, change.number, change.before, change.after


def compare_traces(before: Recording, after: Recording) -> TraceDiff:
    """Compares the calls of two traces.

    A call of the first trace is compared with the call of the second that has the same phase, module, overload and
    index among such calls. Times, threads, shapes and sizes in bytes are ignored.

    Args:
        before: The first trace.
        after: The second.
    """
    # Calls that a trace did not store would appear to be only in the other one.
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
