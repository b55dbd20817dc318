"""What the records of a trace add up to: repeated casts, savings, modules with their dtypes, and ranges of results."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_promote.observe.call import AUTOCAST_OFF, BY_SETTER, Call, Cast, TensorInfo
from torch_promote.observe.ops import facts_of
from torch_promote.policy.op_table import CastPolicy
from torch_promote.policy.overrides import why_illegal
from torch_promote.recording.program_state import conversion_of
from torch_promote.recording.recording import CallGroup
from torch_promote.recording.values import EMPTY, Values, combined_norm, unpack_sketch
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name
from torch_promote.report.base import (
    Branch,
    Chart,
    Column,
    Series,
    Table,
    Tree,
    ancestors,
    module_name,
    percent,
    short_line,
)

if TYPE_CHECKING:
    from torch_promote.recording.recording import Read, Recording

OTHER = "other"
_LOWER = ("bfloat16", "float16", "float8", "float4")
_BINS = 80


class Saving(NamedTuple):
    """A suggestion to make fewer casts."""

    remedy: str  # the code to write, `my_autocast(..., cache="all")`
    casts: int  # the number of traced casts that it would avoid
    bytes: int
    effect: str  # as a sentence


def _result_dtype(dtypes: str) -> str:
    """The dtype of a call's first floating result, or argument if it has no such result, in `Call.dtypes`."""
    for part in reversed(dtypes.split(" -> ")):
        for name in part.split(", "):
            if name.startswith("float8"):
                return "float8"
            if name.startswith(("float", "bfloat", "complex", "bcomplex")):
                return name
    return OTHER


def result_dtypes(dtypes: Mapping[str, int]) -> dict[str, int]:
    """Counts the calls of `CallGroup.dtypes` by the dtype of their results, widest first, "other" last."""
    counted: Counter[str] = Counter()
    for text, calls in dtypes.items():
        counted[_result_dtype(text)] += calls
    order = ("complex128", "complex64", "float64", "float32", "bfloat16", "float16", "float8")
    rank = {name: place for place, name in enumerate(order)}
    return dict(sorted(counted.items(), key=lambda item: (rank.get(item[0], len(rank) + (item[0] == OTHER)), item[0])))


def _is_lower(name: str) -> bool:
    """Whether a floating dtype is narrower than float32."""
    return name.startswith(_LOWER)


def time_in_casts(report: Recording) -> float | None:
    """Returns the share of casts in the time of the outermost calls, of all of which it is known; else None."""
    if report.dropped or not report.calls:
        return None
    ends: dict[int, int] = {}
    outermost = 0
    for call in sorted(report.calls, key=lambda call: (call.start, -call.duration)):
        if call.start >= ends.get(call.thread, 0):
            ends[call.thread] = call.start + call.duration
            outermost += call.duration
    return report.total.cast_time / outermost if outermost else None


_FP32_POLICIES = ("fp32", "float32", "float64")
#: Ops whose results decide about the accuracy of a run: nobody lowers them to save a cast.
_DELICATE = re.compile("loss|entropy|softmax|norm|nll")
#: The share of the bytes of all casts from which a policy that avoids them is suggested.
_LEAST_SAVING = 0.05


def is_delicate(op: str) -> bool:
    """Whether an op is a loss, a softmax or a norm, which is not run in lower precision to save casts."""
    return _DELICATE.search(op) is not None


def savings(calls: Sequence[Call]) -> list[Saving]:
    """Returns suggestions to make fewer casts, by a cache, or by the policy of an op with many casts to float32."""
    avoidable: dict[str, list[int]] = {"all": [], "persistent": []}
    for cast in (cast for call in calls for cast in call.casts if cast.avoidable):
        avoidable[cast.avoidable].append(cast.bytes)
    by_op: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        floating = [dtype_name(info.dtype) for info in call.inputs if info.dtype.is_floating_point]
        plain = not (is_delicate(call.op) or "complex" in call.op)  # which has no kernel for bfloat16
        if call.policy_name in _FP32_POLICIES and all(map(_is_lower, floating)) and plain:
            by_op[call.op] += [cast.bytes for cast in call.casts if not cast.reused and _widens(cast)]
    found = [
        (
            'my_autocast(..., cache="all")',
            avoidable["all"],
            "These casts of activations would be reused within their region.",
        ),
        (
            'my_autocast(..., cache="persistent")',
            avoidable["persistent"],
            "These casts of weights would be reused, because the weights did not change in between.",
        ),
    ]
    effect = "Not tried: the op would run on uncast arguments if it has a kernel for them. Its results would differ."
    least = _LEAST_SAVING * sum(cast.bytes for call in calls for cast in call.casts if not cast.reused)
    for op, sizes in sorted(by_op.items(), key=lambda item: -sum(item[1])):
        if sum(sizes) < least:
            break
        found.append((f'overrides={{"{op.removeprefix("aten::")}": "keep"}}', sizes, effect))
    return [Saving(remedy, len(sizes), sum(sizes), effect) for remedy, sizes, effect in found if sizes]


def promoted(calls: Iterable[Call], of_any_size: bool = False) -> Iterator[tuple[Call, TensorInfo, TensorInfo]]:
    """Yields calls of forwards that return float32 for a smaller operand, with both; "lower" is legal for their ops."""
    for call in calls:
        if call.phase != "forward" or call.policy is not None or not call.outputs:
            continue
        dtypes, devices = {one.dtype for one in call.inputs}, tuple(device for device, _ in call.autocast)
        lowers = (one for one in call.inputs if one.dtype in LOWER_DTYPES and one.device.startswith(devices))
        lower = next(lowers, None)
        if lower is None or call.outputs[0].dtype is not torch.float32 or not facts_of(call.name).promotes(dtypes):
            continue
        found = (one for one in call.inputs if one.dtype is torch.float32)
        wide = max(found, key=lambda one: math.prod(one.shape), default=lower)
        is_smaller = of_any_size or math.prod(wide.shape) < math.prod(lower.shape)
        if is_smaller and why_illegal(call.name, CastPolicy.lower_precision_fp) is None:
            yield call, wide, lower


def promotions(calls: Iterable[Call]) -> list[tuple[str, str, str, int, int, str | None]]:
    """Returns rows of promoted calls, by op, line and operands: op, line, dtypes, calls, bytes, override if it acts."""
    found: dict[tuple[str, str, str, bool], list[int]] = {}
    for call, wide, lower in promoted(calls):
        shapes = f"{lower.label} {lower.dtype_and_shape}, {wide.label} {wide.dtype_and_shape}"
        numbers = found.setdefault((call.op, call.line, shapes, call.policy_source != BY_SETTER), [0, 0])
        numbers[0] += 1
        numbers[1] += 4 * math.prod(call.outputs[0].shape)
    rows = [
        (name := op.removeprefix("aten::"), short_line(line), shapes, number, total, f"{name}=lower" if acts else None)
        for (op, line, shapes, acts), (number, total) in found.items()
    ]
    return sorted(rows, key=lambda row: -row[4])


def conversions(report: Recording, calls: Iterable[Call]) -> list[tuple[str, str, list[str], int, int, str | None]]:
    """Returns rows of the program's conversions: line, dtypes, modules, calls, bytes, what autocast undoes of them."""
    found: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        found[conversion_of(call)].append(call)
    found.pop("", None)
    rows = []
    for key, made in found.items():
        (line, dtypes), undone = key.split(" ", 1), report.undone[key]
        modules = dict.fromkeys(module_name(one.module) for one in made)
        total = sum(math.prod(one.outputs[0].shape) * one.outputs[0].dtype.itemsize for one in made)
        back = f"casts it back to {dtype_name(made[0].inputs[0].dtype)}: {undone:,} casts" if undone else None
        rows.append((line, dtypes, [*modules], len(made), total, back))
    return sorted(rows, key=lambda row: -row[4])


def other_dtypes(calls: Sequence[Call]) -> list[tuple[str, str, str]]:
    """Returns facts of the lower dtypes that the program converts to and no region has: the first conversions."""
    regions = {dtype for call in calls for _, dtype in call.autocast}
    first = {call.outputs[0].dtype: call for call in reversed(calls) if conversion_of(call)}
    others = [one for one in first if one in LOWER_DTYPES and one not in regions and regions]
    said = "the first conversion to it; no region has this dtype"
    return [(dtype_name(one), f"from {short_line(first[one].line)}", said) for one in others]


def _widens(cast: Cast) -> bool:
    return _is_lower(dtype_name(cast.from_dtype)) and not _is_lower(dtype_name(cast.to_dtype))


#: The names of the groups of the calls that optimizers made, and of those that compute nothing.
OPTIMIZER, PLUMBING = "(optimizer)", "(views, conversions, fills and allocations)"


def by_weight(report: Recording) -> tuple[list[CallGroup], dict[str, list[CallGroup]]]:
    """Returns the calls by op: inf and NaN first, then casts, then policies, forward first."""
    # The second result has those of optimizers, and those that compute nothing, under `OPTIMIZER` and `PLUMBING`.
    ops: dict[str, CallGroup] = {}
    apart: dict[str, dict[str, CallGroup]] = {PLUMBING: {}, OPTIMIZER: {}}
    bad = nonfinite_by_op(report)
    for (op, _, _), group in report.groups().items():
        facts = facts_of(op)
        plain = facts.keeps_elements or facts.is_view or facts.is_uninitialized or facts.overwrites
        plain |= not facts.has_results or op.startswith("aten::ones_like")  # item(), and what backward() begins with
        plain |= all(text.startswith("none ->") for text in group.dtypes)  # such as randn
        of = apart[PLUMBING] if plain and not (op == next(iter(bad), "") or group.policies) else ops
        of = apart[OPTIMIZER] if set(group.phases) == {"optimizer"} else of
        of.setdefault(op, CallGroup(op)).merge(group)

    first = {op: place for place, op in enumerate(bad)}

    def weight(group: CallGroup) -> tuple[Any, ...]:
        facts = facts_of(group.key)
        is_backward = not (group.phases["forward"] or group.phases["recompute"])
        order = first.get(group.key, len(first))
        return order, -group.bytes, not group.policies, is_backward, facts.keeps_elements, -group.calls

    sorted_apart = {name: sorted(each.values(), key=lambda one: -one.calls) for name, each in apart.items()}
    return sorted(ops.values(), key=weight), sorted_apart


def nonfinite_by_op(report: Recording) -> Counter[str]:
    """Returns the number of stored calls of each op with inf or NaN in their results, in the order of the first."""
    found: Counter[str] = Counter()
    for number, values in report.values.items():
        if number < len(report.calls) and not all(one.is_finite for one in values):
            found[report.calls[number].name] += 1
    return found


def zero_gradients(report: Recording) -> tuple[str, Call | None]:
    """Returns what is said of the first step whose gradients are all 0, and the call that made only zeros, or None."""
    start = 0
    for step, end in enumerate(report.ends):
        zeros = [name for name, one in end.gradients.items() if one.count and one.zeros == 1]
        first = next((i for i in range(start, min(end.calls, len(report.calls))) if _made_zeros(report, i)), None)
        if zeros and first is not None:
            of = f"{len(zeros):,} of {len(end.gradients):,} parameters"
            return f"gradients of {of} are all 0 in step {step:,}", report.calls[first]
        start = end.calls
    return "", None


def rounded_away(report: Recording) -> Iterator[str]:
    """Yields what is said of updates and sums in 16 bits that rounding has undone."""
    sums = running_sums(report)
    yield unchanged_weights(report)
    yield drifted_sums(sums)
    yield unchanged_writes(report, sums)
    yield lost_addends(report, sums)
    yield coarse_numbers(report)


def unchanged_weights(report: Recording) -> str:
    """What is said of parameters in 16 bits that no step has changed although their gradients are not 0; or ""."""
    states = {state.step: state.numbers for state in report.states}
    rates, last = dict[str, Any](), dict[str, str]()
    same, changed = set[str](), set[str]()
    for step, end in enumerate(report.ends):
        rates |= {name: rate for name, rate in states.get(step, {}).items() if name.startswith("lr of group ")}
        for name, values in end.parameters.items():
            gradient = end.gradients.get(name, EMPTY)
            moves = gradient.count and gradient.zeros < 1 and gradient.is_finite and rates and all(rates.values())
            if name in last and values.in_16_bits and moves:
                (same if last[name] == values.digest else changed).add(name)
            last[name] = values.digest
    if same <= changed:
        return ""
    return (
        f"{len(same - changed):,} of {len(same | changed):,} parameters in 16 bits have the same bits after each step, "
        "although their gradients are not 0: an update below half the distance to the next number is rounded away. "
        "Parameters in float32, under autocast, have a smaller distance."
    )


#: Ops that add to a tensor, or scale it, and the arguments with which that is no change.
_UPDATES = {
    "add_": {"alpha": 0, "other": 0, "scalar": 0},
    "sub_": {"alpha": 0, "other": 0, "scalar": 0},
    "mul_": {"other": 1, "scalar": 1},
    "div_": {"other": 1, "scalar": 1},
    "lerp_": {"weight": 0},
}
_LEAST_UPDATES = 4
#: A term of this size, relative to the sum, is lost in float32 as well.
_OF_FLOAT32 = torch.finfo(torch.float32).eps


class RunningSum(NamedTuple):
    """A sum of single numbers in 16 bits that one line goes on with."""

    total: float
    drift: float = 0.0  # what roundings have added to it; NaN if terms are unknown
    calls: int = 0

    @property
    def size(self) -> float:
        """The drift, relative to the exact sum."""
        return abs(self.drift) / (abs(self.total - self.drift) or abs(self.drift) or 1.0)


#: The op, the line and the dtype of updates.
_Place = tuple[str, str, str]


def running_sums(report: Recording) -> dict[_Place, RunningSum]:
    """Returns the running sums of each line, of several (as of epochs) the one that has drifted most."""
    ends = dict[int, tuple[_Place, RunningSum]]()  # by the last call so far
    for number, call in enumerate(report.calls):
        op, reads, values = call.op.partition("::")[2], report.reads.get(number, ()), report.values.get(number, ())
        is_sum = op in ("add", "add_", "sub", "sub_") and call.own and not call.error and call.phase != "optimizer"
        if not is_sum or not reads or len(values) != 1 or not values[0].in_16_bits:
            continue
        dtype, numbers = call.outputs[0].dtype, dict(call.arguments)
        key, writers = (call.op, call.line, dtype_name(dtype)), reversed(reads[0].written_by)
        # An element of a tensor has others' writers, too.
        last = (one for one in writers if one in ends and report.values[one][0].digest == reads[0].digest)
        writer = next((one for one in last if ends[one][0] == key), None)
        known = 0.0 if reads[0].digest == _digest_of(0) else _number_in(_values_read(report, reads[0]))
        start, total = known if writer is None else ends[writer][1].total, _number_in(values[0])
        if start is None or total is None:
            continue
        factor = float(numbers.get("alpha", 1)) * (-1 if op.startswith("sub") else 1)
        other = numbers.get("other")
        if len(reads) == 2 and factor:
            other = _number_in(_values_read(report, reads[1]))
            if other is None:
                # The sum has rounded to the total from less than a distance away.
                reach = 2 * torch.finfo(dtype).eps * max(abs(total), abs(start)) / abs(factor)
                other = _integer_in(reads[1].digest, (total - start) / factor, reach)
        before = RunningSum(start) if writer is None else ends.pop(writer)[1]
        drift = math.nan if other is None else before.drift + total - (start + factor * other)
        ends[number] = key, RunningSum(total, drift, before.calls + 1)
    found = dict[_Place, RunningSum]()
    for key, one in ends.values():
        if one.calls >= _LEAST_UPDATES and (key not in found or not one.size <= found[key].size):
            found[key] = one
    return found


def _number_in(values: Values | None) -> float | None:
    """The number that is a tensor's only one; None if it has others, or it is unknown or not finite."""
    if values is None or values.count != 1 or not values.is_finite or not values.sketch:
        return None
    return unpack_sketch(values.sketch)[0] / _of_one()


@functools.cache
def _of_one() -> float:
    """The first projection of the number 1."""
    return unpack_sketch(Values.of(torch.tensor(1.0)).sketch)[0]


def _integer_in(digest: str, near: float, reach: float) -> int | None:
    """The integer whose tensor has a digest; None if no integer that near has it, or these are too many to look at."""
    if not digest or reach > _MOST_INTEGERS:
        return None
    around = sorted(range(math.floor(near - reach), math.ceil(near + reach) + 1), key=lambda one: abs(one - near))
    return next((one for one in around if _digest_of(one) == digest), None)


@functools.lru_cache(maxsize=1024)
def _digest_of(integer: int) -> str:
    return Values.of(torch.tensor(integer)).digest  # which is that of other integer dtypes, and of bools


_MOST_INTEGERS = 64


def drifted_sums(sums: Mapping[_Place, RunningSum]) -> str:
    """What is said of running sums that roundings have changed, the largest share first; or ""."""
    told = [
        f"{op.partition('::')[2]} at {short_line(line)}: this sum of {one.calls:,} terms is {one.total:,.5g} in "
        f"{dtype}, and {one.total - one.drift:,.5g} without rounding. Sum up in float32."
        for (op, line, dtype), one in sorted(sums.items(), key=lambda of: -of[1].size)
        if not math.isnan(one.drift) and not _is_balanced((op, line, dtype), sums)
    ]
    return " ".join(told[:2])


def _is_balanced(place: _Place, sums: Mapping[_Place, RunningSum]) -> bool:
    """Whether the roundings of a running sum are known to cancel, but for what two of them may change."""
    return place in sums and sums[place].size <= torch.finfo(getattr(torch, place[2])).eps


def unchanged_writes(report: Recording, sums: Mapping[_Place, RunningSum]) -> str:
    """What is said of tensors in 16 bits that updates leave as they are, such as an average of the weights; or ""."""
    same, all_of = Counter[_Place](), Counter[_Place]()
    largest = dict[_Place, float]()  # of what one-element sums, such as counters, are when they stop
    for number, call in enumerate(report.calls):
        op = call.op.partition("::")[2].removeprefix("_foreach_")
        goes_on = op in ("add", "sub")  # a sum that the same line goes on with: `total = total + x`
        neutral = _UPDATES.get(op + "_" * goes_on)
        if neutral is None or not call.own or call.error:
            continue
        if call.phase == "optimizer" and "alpha" in neutral:  # see `unchanged_weights`
            continue
        numbers = dict(call.arguments)
        if any(numbers.get(name) == value for name, value in neutral.items()):
            continue
        reads = dict(zip([one.name for one in call.inputs], report.reads.get(number, ()), strict=False))
        for info, values in zip(call.inputs, report.values.get(number, ()), strict=False):
            head, _, place = info.name.partition("[")
            before, others = reads.get(info.name), [name for name in reads if name.partition("[")[2] == place]
            other = next((name for name in others if name != info.name), None)
            writer = report.calls[before.written_by[-1]] if before and max(before.written_by, default=-1) >= 0 else None
            if goes_on and (writer is None or (writer.op, writer.line) != (call.op, call.line)):
                continue
            if head != "self" or before is None or not before.digest or not values.in_16_bits or not values.is_finite:
                continue
            if other is None:
                moves = bool(values.amax)
            elif "lerp" in call.op:
                moves = bool(reads[other].digest) and reads[other].digest != before.digest
            else:
                of = next(one for one in call.inputs if one.name == other)
                moves = ("add" in call.op or "sub" in call.op) and _is_not_zero(report, reads[other], of)
            if moves:
                key = call.op, call.line, dtype_name(info.dtype)
                all_of[key] += 1
                if before.digest == values.digest:
                    same[key] += 1
                    if goes_on or math.prod(info.shape) == 1:
                        largest[key] = max(values.amax or 0.0, largest.get(key, 0.0))
    at = {key: f", up to {one:,.5g}" for key, one in largest.items()}
    told = [
        f"{key[0].partition('::')[2]} at {short_line(key[1])} left {count:,} of {all_of[key]:,} {key[2]} tensors as "
        f"they were, bit for bit{at.get(key, '')}: a change below half the distance to the next number is rounded "
        "away. "
        f"In float32, that distance is {torch.finfo(getattr(torch, key[2])).eps / _OF_FLOAT32:,.0f} times smaller."
        for key, count in same.most_common()
        if count >= _LEAST_UPDATES and (key in largest or 2 * count >= all_of[key]) and not _is_balanced(key, sums)
    ]
    return " ".join(told[:2])


def lost_addends(report: Recording, sums: Mapping[_Place, RunningSum]) -> str:
    """What is said of sums in 16 bits of which rounding changes more than their smaller term tells; or ""."""
    found: dict[_Place, list[float]] = {}
    for number, call in enumerate(report.calls):
        op, reads = call.op.partition("::")[2].removesuffix("_"), report.reads.get(number, ())
        shapes = (info.shape for info in (*call.inputs, *call.outputs))
        if op not in ("add", "sub") or not call.own or call.phase != "forward" or len(set(shapes)) > 1:
            continue
        known = [_values_read(report, read) for read in reads]
        (total, *_), terms = report.values.get(number) or (EMPTY,), [one for one in known if one is not None]
        if len(terms) != 2 or len(reads) != 2 or not total.in_16_bits or not total.is_finite:
            continue
        alpha = dict(call.arguments).get("alpha", 1)
        factors = 1.0, float(alpha) * (-1 if op == "sub" else 1)
        smaller = min(abs(factor) * (one.l2 or 0.0) for factor, one in zip(factors, terms, strict=True))
        size = total.l2 or 0.0
        if _OF_FLOAT32 * size < smaller < 2 * torch.finfo(call.outputs[0].dtype).eps * size:
            change = combined_norm((-1.0, total), *zip(factors, terms, strict=True))
            # What an update of a weight loses stays lost; other sums round again and again.
            source = reads[0].written_by[-1]
            is_weight = source < 0 and report.sources[-1 - source].kind == "parameter" and call.op.endswith("_")
            key = call.op, call.line, dtype_name(call.outputs[0].dtype)
            is_known = total.count == 1 and key in sums and not math.isnan(sums[key].drift)  # see `drifted_sums`
            if change is not None and change > smaller / (4 if is_weight else 2) and not is_known:
                # At most all of it, if the other term is a number of that dtype: the rest is the estimate's error.
                found.setdefault(key, []).append(min(change / smaller, 1.0))
    told = [
        f"{op.partition('::')[2]} at {short_line(line)}: rounding to {dtype} changes the sum by about "
        f"{max(shares):.2g} times the norm of its smaller term, in {len(shares):,} call{'s' * (len(shares) > 1)}. A "
        "sum in float32 keeps that term."
        for (op, line, dtype), shares in sorted(found.items(), key=lambda one: -max(one[1]))
    ]
    return " ".join(told[:2])


def coarse_numbers(report: Recording) -> str:
    """What is said of integers and angles that are so large that 16 bits do not tell them from others; or ""."""
    found: dict[tuple[str, str], str] = {}
    for number, call in enumerate(report.calls):
        values, op, inputs = report.values.get(number, ()), call.op.partition("::")[2], call.inputs
        if not call.own or call.phase != "forward" or len(values) != 1 or not values[0].in_16_bits:
            continue
        known: Values | None = values[0]
        facts, what, least = facts_of(call.name), "numbers", 2.0
        if op in ("sin", "cos", "tan") and inputs[0].dtype is call.outputs[0].dtype:
            known, what, least = _values_read(report, report.reads[number][0]), "angles", 0.25
        elif op not in ("arange", "linspace"):
            dtype = inputs[0].dtype if inputs and (facts.is_copy or facts.is_cast or op == "type_as") else torch.bool
            if dtype is torch.bool or dtype.is_floating_point or dtype.is_complex:
                continue
        if known is not None and known.count > 1 and known.amax:
            # Below the largest one, which may be rounded up to a power of 2.
            gap = 2.0 ** (math.ceil(math.log2(known.amax)) - 1) * torch.finfo(call.outputs[0].dtype).eps
            if gap >= least:
                at = f"{op} at {short_line(call.line)}: {what} up to {known.amax:g}, where those of"
                found.setdefault((op, call.line), f"{at} {dtype_name(call.outputs[0].dtype)} are {gap:g} apart.")
    return " ".join(list(found.values())[:2])


def _is_not_zero(report: Recording, read: Read, info: TensorInfo) -> bool:
    """Whether it is known that elements that a call reads are not all 0."""
    known = _values_read(report, read)
    if known is not None and known.count:
        return known.zeros < 1
    if info.dtype.is_floating_point and math.prod(info.shape) != 1:  # each may be -0
        return False
    return read.digest not in ("", *(Values.of(torch.tensor(one, dtype=info.dtype)).digest for one in (0.0, -0.0)))


def _values_read(report: Recording, read: Read) -> Values | None:
    """The values of the elements that a call reads; None if they are unknown."""
    known = _values_in(report, read.written_by[-1]) if read.written_by else None
    return known if known is not None and known.digest == read.digest else None


def _values_in(report: Recording, writer: int) -> Values | None:
    """The values of a source, or of the first result of a call."""
    return report.sources[-1 - writer].values if writer < 0 else (report.values.get(writer) or (None,))[0]


#: Ops whose zeros are no rounding: a sum of numbers of one dtype is 0 only if it is 0 exactly.
_EXACT_ZEROS = re.compile("aten::(add|sub|sum|zeros_like|new_zeros|zero)_?")


def _made_zeros(report: Recording, number: int) -> bool:
    call, values = report.calls[number], report.values.get(number, ())
    lower = any(
        _is_lower(dtype_name(info.dtype)) and one.zeros == 1 for info, one in zip(call.outputs, values, strict=False)
    )
    if call.phase != "backward" or not call.own or not lower or _EXACT_ZEROS.fullmatch(call.op):
        return False
    read = [_values_in(report, one) for of in report.reads.get(number, ()) for one in of.written_by[-1:]]
    return bool(read) and all(one is not None and one.count and one.zeros < 1 for one in read)


def modules_and_optimizer(report: Recording) -> list[CallGroup]:
    """Returns the calls by module, with those of optimizers as the group `OPTIMIZER`."""
    found: dict[str, CallGroup] = {}
    for (_, module, _), group in report.groups().items():
        key = OPTIMIZER if set(group.phases) == {"optimizer"} else module
        found.setdefault(key, CallGroup(key)).merge(group)
    return sorted(found.values(), key=lambda group: (-group.bytes, -group.calls))


def module_tree(groups: Iterable[CallGroup]) -> Tree:
    """Returns the modules of a trace with the dtypes of their calls, and those of the modules inside."""
    # A float32 island has floating results of float32 or wider alone, while other modules' are narrower.
    whole: dict[str, CallGroup] = {}
    for group in sorted(groups, key=lambda group: (group.key == OPTIMIZER, _natural(group.key))):
        for path in ancestors(group.key)[1:] or [""]:
            whole.setdefault(path, CallGroup(path)).merge(group)
    others = [whole.pop(path) for path in ("", OPTIMIZER) if path in whole]
    counted = {path: result_dtypes(group.dtypes) for path, group in whole.items()}
    some_are_lower = any(_is_lower(name) for dtypes in counted.values() for name in dtypes)
    islands: set[str] = set()
    branches = []
    for path, group in whole.items():
        tag = note = ""
        floating = [name for name in counted[path] if name != OTHER]
        if some_are_lower and floating and not any(map(_is_lower, floating)):
            islands.add(path)
            if path.rpartition(".")[0] not in islands:  # modules inside an island are not marked
                off = (text for text in group.rules if text.startswith(AUTOCAST_OFF))
                tag, note = "float32 island", "; ".join([*group.policies, *off]) or "no policy"
        branches.append(Branch(path, (group.calls, group.casts, group.bytes), (counted[path],), tag, note))
    for group in others:
        cells = group.calls, group.casts, group.bytes
        branches.append(Branch(group.key, cells, (result_dtypes(group.dtypes),)))
    note = "The bars show the dtypes of the results of a module's calls, with those of the modules in it. "
    island = "A float32 island has no result in a lower precision, while other modules do."
    columns = Column("calls", "count"), Column("casts", "count"), Column("bytes", "bytes")
    return Tree("Modules", columns, branches, note=note + island * bool(islands))


def _natural(path: str) -> list[tuple[int, int | str]]:
    """A sort key with which "blocks.2" comes before "blocks.10"."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in path.split(".")]


def dtypes_chart(report: Recording) -> Chart:
    """Returns the chart of the shares of calls by the dtype of their results, along the run, in calls."""
    calls = sorted(report.calls, key=lambda call: call.start)
    title, label = "Dtypes of results along the run", "call, in the order in which they started"
    if not calls:
        return Chart(title, "stacked", (), x_label=label)
    bins = min(_BINS, len(calls))
    shares = defaultdict(lambda: [0.0] * bins, {name: [0.0] * bins for name in result_dtypes(report.total.dtypes)})
    for place, call in enumerate(calls):
        shares[_result_dtype(call.dtypes)][place * bins // len(calls)] += 1
    edges = [index * len(calls) / bins for index in range(bins)]
    spans, start = [], 0
    for phase, run in groupby(calls, key=lambda call: call.phase):
        end = start + sum(1 for _ in run)
        spans.append((str(phase), float(start), float(end)))
        start = end
    series = [Series(name, counts, edges, name) for name, counts in shares.items()]
    return Chart(title, "stacked", series, x_label=label, spans=spans)


def casts_chart(groups: Iterable[CallGroup]) -> Chart:
    """Returns the chart of the bytes of the casts made, by module."""
    casting = [group for group in groups if group.bytes]
    once = Series("made once", [group.bytes - group.repeated_bytes for group in casting], color="float32")
    again = Series("repeated", [group.repeated_bytes for group in casting], color="bfloat16")
    series = (once, again) if any(again.y) else (once,)
    labels = [module_name(group.key) for group in casting]
    return Chart("Bytes of casts by module", "bars", series, labels, unit="bytes")


#: The exponents of the smallest subnormal, the smallest normal and the largest number of float16.
_SMALLEST, _NORMAL, _LARGEST = -24, -14, 15


def exponents_chart(measured: Iterable[tuple[Call, Sequence[Values]]]) -> Chart | None:
    """Returns the histograms of exponents of results by op, those outside of float16's first; None without values."""
    # Without composite ops and views, whose values other calls computed, and without uninitialized memory.
    by_op: dict[str, list[Values]] = {}
    for call, results in measured:
        facts = facts_of(call.name)
        if not (call.composite or facts.is_view or facts.is_uninitialized):
            by_op.setdefault(call.name, []).extend(values for values in results if values.count)
    rows = []
    for op, found in by_op.items():
        counts: Counter[int] = Counter()
        for values in found:
            counts.update(dict(values.exponents))
        if not counts:
            continue
        total = sum(values.count for values in found)
        above = sum(values.over_float16 * values.count for values in found) / total
        below = sum(values.under_float16 * values.count for values in found) / total
        subnormal = sum(number for exponent, number in counts.items() if _SMALLEST <= exponent < _NORMAL) / total
        infinite = sum(bool(values.infs or values.nans) for values in found)
        shares = {"overflow": above, "become 0": below, "subnormal": subnormal}
        note = ", ".join(f"{percent(share)} {what}" for what, share in shares.items() if share)
        note = f"inf or NaN in {infinite:,}" if infinite else note or f"largest {max(v.amax or 0.0 for v in found):.3g}"
        exponents = sorted(counts)
        series = Series(op, [counts[exponent] for exponent in exponents], exponents, note=note)
        rows.append(((-above, -below, -subnormal, op), series))
    if not rows:
        return None
    spans = [("float16", _SMALLEST, _LARGEST + 1), ("float16", _NORMAL, _LARGEST + 1)]
    note = (
        "The number of values with each binary exponent. Shaded: float16's numbers, normal ones twice. Under the "
        "name: the values that do not fit into float16's normal numbers. Composite ops and views are left out."
    )
    chart = [series for _, series in sorted(rows, key=lambda row: row[0])]
    return Chart("Ranges of results", "histograms", chart, spans=spans, note=note, where="page")


def float8_table(measured: Iterable[tuple[Call, Sequence[Values]]]) -> Table:
    """Returns the operands in float8 with their scales, of calls with values."""
    # A scale is the result of exp2, or a float64 made float32; the values are multiplied, clamped and cast.
    rows: dict[tuple[str, ...], list[tuple[Values, Values, Values]]] = {}
    last: dict[tuple[int, str], Values] = {}
    for call, results in measured:
        if len(results) != 1 or len(call.outputs) != 1:
            continue
        (values,), (output,), name = results, call.outputs, call.op.removeprefix("aten::")
        if name == "exp2" or (name == "_to_copy" and call.dtypes == "float64 -> float32"):
            last[call.thread, "scale"] = values
        elif name in ("clamp", "clamp_"):
            last[call.thread, "scaled"] = values
        elif name == "_to_copy" and dtype_name(output.dtype).startswith("float8") and (call.thread, "scale") in last:
            key = call.module, call.phase, f"{dtype_name(output.dtype)}{list(output.shape)}"
            found = last[call.thread, "scale"], last.get((call.thread, "scaled"), values), values
            rows.setdefault(key, []).append(found)
    return Table(
        "Operands in float8",
        (Column("module", "name"), "phase", "operand", Column("casts", "count"), "scale", "saturated", "became 0"),
        [
            (
                module_name(module),
                phase,
                operand,
                len(found),
                f"{min(scale.min_nonzero or 0.0 for scale, _, _ in found):.3g} to "
                f"{max(scale.amax or 0.0 for scale, _, _ in found):.3g}",
                percent(sum(cast.saturated for _, _, cast in found) / len(found)),
                percent(sum(cast.zeros - scaled.zeros for _, scaled, cast in found) / len(found)),
            )
            for (module, phase, operand), found in rows.items()
        ],
        note="Saturated: the shares of values at the largest number of the dtype, which the largest value of a tensor "
        "or row becomes. Became 0: the shares that were not 0 before.",
    )
