"""Suggests cache modes or policies with which a traced program would make fewer casts."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_promote.numerics.records.calls import Call, Cast
from torch_promote.numerics.report.findings import is_lower
from torch_promote.reference.dtypes import dtype_name

if TYPE_CHECKING:
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["Saving", "savings"]

_REMEMBERED = 4  # the number of activations that cache="all" keeps
_FP32_POLICIES = ("fp32", "float32", "float64")


@dataclass(frozen=True)
class Saving:
    """A suggestion to make fewer casts.

    Attributes:
        remedy: The code to write, `my_autocast(..., cache="all")`.
        casts: The number of traced casts that it would avoid.
        bytes: Their size in bytes.
        effect: The effect, as a sentence.
    """

    remedy: str
    casts: int
    bytes: int
    effect: str


def savings(report: TraceRecords) -> list[Saving]:
    """Returns suggestions to make fewer casts, computed from the calls that the report stores.

    A cache avoids a repeated cast. A policy avoids the casts to float32 of an op whose inputs are all lower precision.
    """
    activations, weights = _saved_by_caches(report.calls)
    found = []
    if activations:
        found.append(
            Saving(
                'my_autocast(..., cache="all")',
                len(activations),
                sum(activations),
                "These casts of activations would be reused, if the earlier cast is in the same region.",
            )
        )
    if weights:
        found.append(
            Saving(
                'my_autocast(..., cache="persistent")',
                len(weights),
                sum(weights),
                "These casts of weights would be reused, because the weights did not change in between.",
            )
        )
    by_op: dict[str, list[int]] = defaultdict(list)
    for call in report.calls:
        if call.policy_name in _FP32_POLICIES and all(is_lower(name) for name in _floating(call)):
            by_op[call.op] += [cast.bytes for cast in call.casts if not cast.reused and _up(cast)]
    for op, sizes in sorted(by_op.items(), key=lambda item: -sum(item[1])):
        if sizes:
            name = op.partition("::")[2] if op.startswith("aten::") else op
            effect = "The op would run on its uncast arguments, in lower precision. Its results would differ."
            found.append(Saving(f'overrides={{"{name}": "keep"}}', len(sizes), sum(sizes), effect))
    return found


def _floating(call: Call) -> list[str]:
    return [dtype_name(info.dtype) for info in call.inputs if info.dtype.is_floating_point]


def _up(cast: Cast) -> bool:
    return is_lower(dtype_name(cast.from_dtype)) and not is_lower(dtype_name(cast.to_dtype))


def _saved_by_caches(calls: Iterable[Call]) -> tuple[list[int], list[int]]:
    """The sizes of the casts that cache="all" and "persistent" would reuse."""
    activations, weights = [], []
    last: defaultdict[int, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
    for call in calls:
        for cast in call.casts:
            if cast.reused or cast.kind == "gradient":
                continue
            if cast.kind == "weight":
                weights += [cast.bytes] if cast.earlier and not _up(cast) else []
                continue
            key, recent = (cast.tensor, dtype_name(cast.to_dtype)), last[call.thread]
            if cast.earlier and key in recent and not _up(cast):
                activations.append(cast.bytes)
            if key in recent:
                recent.remove(key)
            recent.append(key)
    return activations, weights
