"""`TraceReport.diff`: compares the calls of two traces, aligned by module, overload and running number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

from torch_promote.observe.events import TENSORS, Call
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import Cell, Column, Content, Report, Table, module_name
from torch_promote.report.codec import encode

if TYPE_CHECKING:
    from torch_promote.observe.events import Recording

__all__ = ["Change", "TraceDiff", "compare_traces"]


_ONLY_BEFORE, _ONLY_AFTER = "only before", "only after"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a call of the first trace and the same call of the second.

    Attributes:
        phase: "forward", "recompute", "backward" or "optimizer".
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
        return {"same": self.same, "compared": self.compared, "dropped": self.dropped, "changes": encode(self.changes)}

    def content(self) -> Content:
        """Returns the numbers, and a row for each kind of difference: those of a changed policy first."""
        kinds = Counter(change.what for change in self.changes)
        calls = {(change.phase, change.module, change.op, change.number) for change in self.changes}
        differing = len(calls) - kinds[_ONLY_BEFORE] - kinds[_ONLY_AFTER]
        verdict = f"{differing:,} of {self.compared:,} calls differ." if self.changes else "No difference."
        facts = [
            ("compared", f"{self.compared:,}"),
            ("differing", f"{differing:,}"),
            *((what, f"{kinds[what]:,}") for what in (_ONLY_BEFORE, _ONLY_AFTER)),
        ]
        if self.dropped:
            facts.append(("not compared", f"{self.dropped:,} (not stored; see max_calls)"))
        groups: dict[tuple[str, ...], Counter[str]] = {}
        ran_as_called = {replace(change, what="ran_with") for change in self.changes if change.what == "inputs"}
        for change in self.changes:
            if change not in ran_as_called:  # one row is enough for a call without casts
                key = change.op, change.phase, change.what, change.before, change.after
                groups.setdefault(key, Counter())[module_name(change.module)] += 1
        decided = {change.op for change in self.changes if change.what in ("policy", "said_by")}
        rows: list[tuple[Cell, ...]] = [
            (*key, modules.total(), modules)
            for key, modules in sorted(groups.items(), key=lambda group: group[0][0] not in decided)
        ]
        columns = Column("op", "name"), "phase", "what", "before", "after", "calls", Column("modules", "code")
        return Content("difference of two traces", verdict, facts, [Table("", columns, rows, most=30)])


def compare_traces(before: Recording, after: Recording) -> TraceDiff:
    """Compares the calls of two traces.

    A call of the first trace is compared with the call of the second that has the same phase, module, overload and
    index among such calls. Times, threads, shapes and sizes in bytes are ignored.
    """
    # Calls that a trace did not store would appear to be only in the other one.
    complete = not (before.dropped or after.dropped)
    places: dict[tuple[str, str, str], tuple[list[Call], list[Call]]] = {}
    for side, report in enumerate((before, after)):
        for call in report.calls:
            places.setdefault((call.phase, call.module, call.name), ([], []))[side].append(call)
    changes: list[tuple[bool, int, Change]] = []  # with whether only the second has the call, and its start
    compared = 0
    for place, calls in places.items():
        for number, (one, other) in enumerate(zip_longest(*calls)):
            compared += one is not None and other is not None
            if (one is not None and other is not None) or complete:
                last = other or one
                assert last is not None
                found = (Change(*place, number, last.line, *values) for values in _differences(one, other))
                changes += [(one is None, (one or last).start, change) for change in found]
    changes.sort(key=lambda change: change[:2])
    return TraceDiff([change for _, _, change in changes], compared, before.dropped + after.dropped)


def _differences(one: Call | None, other: Call | None) -> Iterator[tuple[str, str, str]]:
    if one is None or other is None:
        what = _ONLY_AFTER if one is None else _ONLY_BEFORE
        yield what, "" if one is None else one.dtypes, "" if other is None else other.dtypes
        return
    before, after = _shown(one), _shown(other)
    yield from ((what, value, after[what]) for what, value in before.items() if value != after[what])


def _shown(call: Call) -> dict[str, str]:
    """The attributes of a call that are compared, as text."""
    dtypes = {name: ", ".join(dtype_name(info.dtype) for info in getattr(call, name)) or "none" for name in TENSORS}
    casts = (
        f"{cast.argument}: {dtype_name(cast.from_dtype)} -> {dtype_name(cast.to_dtype)}{', reused' * cast.reused}"
        for cast in call.casts
    )
    return {
        **dtypes,
        "policy": call.policy_name or "none",
        "said_by": call.said_by or "none",
        "casts": "; ".join(casts) or "none",
        "error": "it raised" if call.error else "it returned",
    }
