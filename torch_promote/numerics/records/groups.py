"""Sums over calls by op, module or line, and sums over casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch_promote.numerics.records.calls import Call, Cast
from torch_promote.reference.dtypes import dtype_name

__all__ = ["CallGroup", "CastGroup", "Totals"]


@dataclass
class CallGroup:
    """The sums over the calls of an op, a module or a line.

    Attributes:
        key: The op's name with its overload, the module's path or the line.
        calls: The number of calls, including those of composite ops.
        dtypes: The number of calls by dtypes, such as "float32 -> bfloat16 -> bfloat16" (inputs, cast inputs, outputs).
        policies: The number of calls by policy and its source, such as "lower_precision_fp: PyTorch's table".
        phases: The number of calls by phase.
        rules: The number of calls without a policy, by what applied instead: "promotion rule torch", a library's
            kernel.
        casts: The number of casts made.
        reused: The number of casts reused.
        bytes: The size of the casts that were made, in bytes.
        repeated: The number of casts made of a tensor that had been cast to that dtype before.
        repeated_bytes: Their size in bytes.
        cast_time: The time of the casts on the host, in nanoseconds.
        duration: The time of the calls on the host, in nanoseconds. A composite op's call includes those of its ops.
        errors: The number of calls that raised.
    """

    key: str
    calls: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    policies: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    casts: int = 0
    reused: int = 0
    bytes: int = 0
    repeated: int = 0
    repeated_bytes: int = 0
    cast_time: int = 0
    duration: int = 0
    errors: int = 0

    def add(self, call: Call) -> None:
        """Adds a call."""
        self.calls += 1
        self.dtypes[call.dtypes] += 1
        self.phases[call.phase] += 1
        if call.policy is not None:
            self.policies[f"{call.policy_name}: {call.said_by}"] += 1
        elif call.said_by:
            self.rules[call.said_by] += 1
        self.cast_time += call.cast_time
        self.duration += call.duration
        self.errors += call.error
        for cast in call.casts:
            if cast.reused:
                self.reused += 1
                continue
            self.casts += 1
            self.bytes += cast.bytes
            if cast.earlier:
                self.repeated += 1
                self.repeated_bytes += cast.bytes

    def merge(self, other: CallGroup) -> None:
        """Adds the sums of another group."""
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        """Returns the group as JSON-compatible values."""
        counters = {name: dict(getattr(self, name)) for name in _COUNTERS}
        return {"key": self.key, **{name: getattr(self, name) for name in _SUMS}, **counters}


_COUNTERS = ("dtypes", "policies", "phases", "rules")
_SUMS = (*("calls", "casts", "reused", "bytes", "repeated", "repeated_bytes", "cast_time", "duration", "errors"),)


@dataclass
class CastGroup:
    """The sums over the casts of one argument of an op at one line of one module.

    Attributes:
        op: The op's name with its overload.
        module: The module's path.
        line: The line.
        argument: The argument, "weight".
        kind: "weight", "activation" or "gradient".
        from_dtype: The name of the dtype that the caller passed.
        to_dtype: The name of the dtype that the op got.
        made: The number of casts made.
        reused: The number of casts reused.
        bytes: The size of those that were made, in bytes.
        repeated: The number of these casts of a tensor that had been cast to that dtype before, here or elsewhere.
        repeated_bytes: Their size in bytes.
    """

    op: str
    module: str
    line: str
    argument: str
    kind: str
    from_dtype: str
    to_dtype: str
    made: int = 0
    reused: int = 0
    bytes: int = 0
    repeated: int = 0
    repeated_bytes: int = 0

    def add(self, cast: Cast) -> None:
        """Adds a cast."""
        if cast.reused:
            self.reused += 1
            return
        self.made += 1
        self.bytes += cast.bytes
        if cast.earlier:
            self.repeated += 1
            self.repeated_bytes += cast.bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns the group as JSON-compatible values."""
        return dict(vars(self))


class Totals:
    """The groups of a trace. Their number grows with the program's lines, modules and dtypes, not with its steps."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str], CallGroup] = {}
        self._casts: dict[tuple[str, ...], CastGroup] = {}

    def add(self, call: Call) -> None:
        """Adds a call."""
        place = (call.name, call.module, call.line)
        group = self._calls.get(place)
        if group is None:
            group = self._calls[place] = CallGroup("")
        group.add(call)
        for cast in call.casts:
            key = (*place, cast.argument, cast.kind, dtype_name(cast.from_dtype), dtype_name(cast.to_dtype))
            casts = self._casts.get(key)
            if casts is None:
                casts = self._casts[key] = CastGroup(*key)
            casts.add(cast)

    def by(self, which: int) -> list[CallGroup]:
        """The calls by op (0), module (1) or line (2), sorted by cast bytes, then by the number of calls."""
        return self._groups(lambda place: place[which])

    def all(self) -> CallGroup:
        """All calls as one group."""
        groups = self._groups(lambda place: "")
        return groups[0] if groups else CallGroup("")

    def casts(self) -> list[CastGroup]:
        """The casts, most bytes first."""
        return sorted(self._casts.values(), key=lambda group: (-group.bytes, -group.made, -group.reused))

    def select(
        self, wanted: Callable[[tuple[str, str, str]], bool]
    ) -> Iterable[tuple[tuple[str, str, str], CallGroup]]:
        """The groups of each (op, module, line) that a function selects."""
        return [(place, group) for place, group in self._calls.items() if wanted(place)]

    def _groups(self, key_of: Callable[[tuple[str, str, str]], str]) -> list[CallGroup]:
        groups: dict[str, CallGroup] = {}
        for place, part in list(self._calls.items()):
            key = key_of(place)
            groups.setdefault(key, CallGroup(key)).merge(part)
        return sorted(groups.values(), key=lambda group: (-group.bytes, -group.calls))

    def to_list(self) -> list[dict[str, Any]]:
        """Returns the groups of calls as JSON-compatible values."""
        return [
            {
                "op": place[0],
                "module": place[1],
                "line": place[2],
                **{k: v for k, v in group.to_dict().items() if k != "key"},
            }
            for place, group in self._calls.items()
        ]

    @classmethod
    def from_lists(cls, groups: Iterable[dict[str, Any]], casts: Iterable[dict[str, Any]]) -> Totals:
        """Returns the totals from the data of `to_list` and of the groups of casts."""
        totals = cls()
        for data in groups:
            place = (data["op"], data["module"], data["line"])
            counters: dict[str, Any] = {name: Counter(data[name]) for name in _COUNTERS}
            totals._calls[place] = CallGroup("", **{name: data[name] for name in _SUMS}, **counters)
        for one in casts:
            group = CastGroup(**one)
            key = (group.op, group.module, group.line, group.argument, group.kind, group.from_dtype, group.to_dtype)
            totals._casts[key] = group
        return totals
