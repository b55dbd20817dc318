"""The attributes of calls that differ between two traces, aligned by module, overload and running number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from torch_promote.observe.events import TENSORS, Call
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
    """Compares the calls of two traces.

    A call of the first trace is compared with the call of the second that has the same phase, module, overload and
    index among such calls. Times, threads, shapes and sizes in bytes are ignored.

    Returns:
        The differences, and the number of calls in both traces.
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
    return [change for _, _, change in changes], compared


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
