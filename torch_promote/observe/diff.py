"""The attributes of calls that differ between two traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_promote.observe.alignment import align
from torch_promote.observe.events import TENSORS, Call
from torch_promote.observe.run import is_unfinished
from torch_promote.reference.dtypes import dtype_name

if TYPE_CHECKING:
    from torch_promote.observe.events import Recording

__all__ = ["ONLY_AFTER", "ONLY_BEFORE", "Change", "changes_of"]


ONLY_BEFORE, ONLY_AFTER = "only before", "only after"


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


def changes_of(before: Recording, after: Recording) -> tuple[list[Change], int]:
    """Compares the calls of two traces, which are aligned by module and phase. Times, threads and shapes are ignored.

    Returns:
        The differences, and the number of calls in both traces.
    """
    # Calls that a trace did not store would appear to be only in the other one.
    complete = not any(report.dropped or is_unfinished(report) for report in (before, after))
    places: dict[tuple[str, str], tuple[list[Call], list[Call]]] = {}
    for side, report in enumerate((before, after)):
        for call in report.calls:
            places.setdefault((call.phase, call.module), ([], []))[side].append(call)
    changes: list[tuple[bool, int, Change]] = []  # with whether only the second has the call, and its start
    compared = 0
    for place, (ones, others) in places.items():
        partner = _partners(ones, others)
        compared += len(partner)
        numbers = _numbers(ones), _numbers(others)
        for i, one in enumerate(ones):
            other = others[partner[i]] if i in partner else None
            if other is not None or complete:
                changes += [(False, one.start, change) for change in _changes(one, other, place, numbers[0][i])]
        alone = set(range(len(others))).difference(partner.values()) if complete else ()
        for j in alone:
            changes += [(True, others[j].start, change) for change in _changes(None, others[j], place, numbers[1][j])]
    changes.sort(key=lambda change: change[:2])
    return [change for _, _, change in changes], compared


def _partners(ones: Sequence[Call], others: Sequence[Call]) -> dict[int, int]:
    """The indices of the second trace's calls by those of the same calls in the first."""
    one, other = ([call.name for call in calls] for calls in (ones, others))
    pairs = align(one, other, (_contents(ones), _contents(others)))
    taken = {i for i, _ in pairs}, {j for _, j in pairs}
    waiting: dict[str, list[int]] = {}  # calls in another order
    for j in reversed(range(len(other))):
        if j not in taken[1]:
            waiting.setdefault(other[j], []).append(j)
    left = (i for i, name in enumerate(one) if i not in taken[0] and waiting.get(name))
    return {**dict(pairs), **{i: waiting[one[i]].pop() for i in left}}


def _contents(calls: Sequence[Call]) -> list[tuple[str, ...]]:
    """What the results of calls have in memory; () without values."""
    found = (tuple(values.digest for values in call.values) for call in calls)
    return [digests if all(digests) else () for digests in found]


def _numbers(calls: Sequence[Call]) -> list[int]:
    """The indices of calls among those of the same op."""
    counts: Counter[str] = Counter()
    found = []
    for call in calls:
        found.append(counts[call.name])
        counts[call.name] += 1
    return found


def _changes(one: Call | None, other: Call | None, place: tuple[str, str], number: int) -> Iterator[Change]:
    call = other or one
    assert call is not None
    yield from (Change(*place, call.name, number, call.line, *values) for values in _differences(one, other))


def _differences(one: Call | None, other: Call | None) -> Iterator[tuple[str, str, str]]:
    if one is None or other is None:
        what = ONLY_AFTER if one is None else ONLY_BEFORE
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
