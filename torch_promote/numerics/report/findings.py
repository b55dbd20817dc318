"""Facts for the summary and the page of a trace: verdict, dtypes, repeated casts, and number formats."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_promote.checking.overloads import find_overload
from torch_promote.numerics.records.calls import Call, Cast
from torch_promote.reference.dtypes import dtype_name

if TYPE_CHECKING:
    from torch_promote.numerics.records.groups import CallGroup
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = [
    "RepeatedCast",
    "by_weight",
    "count",
    "is_lower",
    "most_of",
    "percent",
    "repeated_casts",
    "result_dtype",
    "result_dtypes",
    "short_dtype",
    "size",
    "time_in_casts",
    "verdict",
]

OTHER = "other"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_LOWER = ("bfloat16", "float16", "float8", "float4")


@dataclass(frozen=True)
class RepeatedCast:
    """Tensors that are cast repeatedly with unchanged content, at the same places.

    Attributes:
        from_dtype: The name of the tensor's dtype.
        to_dtype: The name of the dtype that it is cast to.
        shape: The tensor's shape.
        kind: "weight", "activation" or "gradient".
        tensors: The number of tensors.
        made: The number of casts made of them.
        repeated: The number of these casts that had been made before.
        repeated_bytes: Their size in bytes.
        places: The places of the casts, as (op, argument, line).
        modules: The modules of the casts.
    """

    from_dtype: str
    to_dtype: str
    shape: tuple[int, ...]
    kind: str
    tensors: int
    made: int
    repeated: int
    repeated_bytes: int
    places: tuple[tuple[str, str, str], ...]
    modules: tuple[str, ...]


def verdict(report: TraceRecords) -> str:
    """Returns the result of the trace in one sentence.

    Example:
        >>> import torch_promote as tp
        >>> with tp.trace() as report:
        ...     pass
        >>> verdict(report)
        'No call was recorded.'
    """
    total = report.total
    if not total.calls:
        return "No call was recorded."
    raised = f"; {count(total.errors, 'call')} raised an error" if total.errors else ""
    with_policy = sum(total.policies.values())
    if not with_policy:
        return f"Autocast was off or had no policy for {_these(total.calls)}: arguments kept their dtypes{raised}."
    text = f"Autocast had a policy for {with_policy:,} of {count(total.calls, 'call')}"
    if not total.casts:
        reused = f" (it reused {count(total.reused, 'earlier cast')})" if total.reused else ""
        return f"{text} and made no casts{reused}{raised}."
    text += f" and made {count(total.casts, 'cast')} ({size(total.bytes)})"
    if not total.repeated:
        return f"{text}, none of them twice{raised}."
    again = "a cast" if total.repeated == 1 else "casts"
    return f"{text}; {total.repeated:,} of them ({size(total.repeated_bytes)}) repeated {again} made before{raised}."


def _these(calls: int) -> str:
    return "the only call" if calls == 1 else f"all {calls:,} calls"


def result_dtype(dtypes: str) -> str:
    """Returns the dtype of a call's first floating or complex result, or argument if it has no such result.

    Args:
        dtypes: `Call.dtypes`.

    Returns:
        The dtype's name, "float8" for any 8-bit floating dtype; "other" for calls on only integers and bools.

    Example:
        >>> [result_dtype(text) for text in ("float32 -> bfloat16 -> bfloat16", "float32 -> none", "none -> int64")]
        ['bfloat16', 'float32', 'other']
    """
    for part in reversed(dtypes.split(" -> ")):
        for name in part.split(", "):
            if name.startswith("float8"):
                return "float8"
            if name.startswith(("float", "bfloat", "complex", "bcomplex")):
                return name
    return OTHER


def result_dtypes(dtypes: Mapping[str, int]) -> dict[str, int]:
    """Counts calls by the dtype of their results, widest first, "other" last.

    Args:
        dtypes: `CallGroup.dtypes`.
    """
    counted: Counter[str] = Counter()
    for text, calls in dtypes.items():
        counted[result_dtype(text)] += calls
    return dict(sorted(counted.items(), key=lambda item: (_rank(item[0]), item[0])))


def _rank(name: str) -> int:
    order = ("complex128", "complex64", "float64", "float32", "bfloat16", "float16", "float8")
    return order.index(name) if name in order else len(order) + (name == OTHER)


def is_lower(name: str) -> bool:
    """Whether a floating dtype is narrower than float32."""
    return name.startswith(_LOWER)


def time_in_casts(report: TraceRecords) -> float | None:
    """Returns the share of casts in the calls' time on the host; None if it is unknown.

    Composite calls include the calls of their ops, so it sums up only the outermost calls. That needs all calls.
    """
    if report.dropped or not report.calls:
        return None
    ends: dict[int, int] = {}
    outermost = 0
    for call in sorted(report.calls, key=lambda call: (call.start, -call.duration)):
        if call.start >= ends.get(call.thread, 0):
            ends[call.thread] = call.start + call.duration
            outermost += call.duration
    return report.total.cast_time / outermost if outermost else None


def repeated_casts(report: TraceRecords) -> list[RepeatedCast]:
    """Returns the repeated casts of unchanged tensors, most bytes first.

    Calls that the report does not store individually (`report.dropped`) are not included.
    """
    by_tensor: dict[tuple[Any, ...], list[tuple[Call, Cast]]] = defaultdict(list)
    for call in report.calls:
        for cast in call.casts:
            if not cast.reused:
                by_tensor[cast.tensor, cast.from_dtype, cast.to_dtype, _shape(call, cast)].append((call, cast))
    alike: dict[tuple[Any, ...], list[list[tuple[Call, Cast]]]] = defaultdict(list)
    for (_, *what), made in by_tensor.items():
        if any(cast.earlier for _, cast in made):
            places = tuple(dict.fromkeys((call.name, cast.argument, call.line) for call, cast in made))
            alike[*what, made[0][1].kind, places].append(made)
    found = [
        RepeatedCast(
            from_dtype=dtype_name(from_dtype),
            to_dtype=dtype_name(to_dtype),
            shape=shape,
            kind=kind,
            tensors=len(tensors),
            made=sum(len(made) for made in tensors),
            repeated=sum(bool(cast.earlier) for made in tensors for _, cast in made),
            repeated_bytes=sum(cast.bytes for made in tensors for _, cast in made if cast.earlier),
            places=places,
            modules=tuple(dict.fromkeys(call.module for made in tensors for call, _ in made)),
        )
        for (from_dtype, to_dtype, shape, kind, places), tensors in alike.items()
    ]
    return sorted(found, key=lambda one: (-one.repeated_bytes, -one.repeated))


def _shape(call: Call, cast: Cast) -> tuple[int, ...]:
    return next((info.shape for info in call.inputs if info.name == cast.argument), ())


def by_weight(groups: Iterable[CallGroup]) -> list[CallGroup]:
    """Sorts groups by op: by cast bytes, then by whether they have a policy, then by the number of calls.

    Ops that return a view of their argument, such as transpose, come last.
    """
    return sorted(
        groups, key=lambda group: (-group.bytes, not group.policies, _returns_a_view(group.key), -group.calls)
    )


def _returns_a_view(name: str) -> bool:
    try:
        op = find_overload(name)
    except (AttributeError, RuntimeError, KeyError, ValueError):  # an op of another PyTorch release or the program
        return False
    return op.is_view and op._schema.name not in ("aten::to", "aten::contiguous")


def size(number: float) -> str:
    """Spells a number of bytes.

    Example:
        >>> size(12), size(1536), size(52_428_800)
        ('12 B', '1.5 KiB', '50 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB"]
    power = min(max(0, int(number).bit_length() - 1) // 10, len(units) - 1)
    number /= 1024**power
    spelt = f"{number:.1f}".removesuffix(".0") if number < 10 else f"{number:,.0f}"
    return f"{spelt} {units[power]}"


def percent(part: float, whole: float = 1.0) -> str:
    """Spells a share: "0.4 %", "27 %".

    Example:
        >>> percent(1, 3), percent(1, 300), percent(1, 9000), percent(0, 0)
        ('33 %', '0.3 %', '< 0.1 %', '0 %')
    """
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.05:
        return "< 0.1 %"
    return f"{share:.1f}".removesuffix(".0") + " %" if share < 9.95 else f"{share:.0f} %"


def count(number: int, noun: str) -> str:
    """Spells a number of things: "1 call", "1,200 calls"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def most_of(counted: Counter[str], shorten: Callable[[str], str] = str) -> str:
    """Returns the most frequent text and the number of others: "float32 -> float16 (+2)"; "" if there is none."""
    if not counted:
        return ""
    (text, _), *others = counted.most_common()
    return f"{shorten(text)} (+{len(others)})" if others else shorten(text)


def short_dtype(name: str) -> str:
    """Returns a short name of a dtype.

    Example:
        >>> short_dtype("bfloat16"), short_dtype("int64")
        ('bf16', 'int64')
    """
    return _SHORT.get(name, name)
