"""The recent calls of a block with their arguments, and which of them lost a number that a later call needs.

NOTE [ Which call lost a number ]
In float16, `x / (y + 1e-8)` is 0 / 0 where y is 0, because 1e-8 is 0. The division is not finite in float32 either: the
addition has lost the number. So before a NaN is called mathematics, the calls that its arguments come from are
repeated: the nearest in float32, and those between it and the NaN as the program's region would run them on its result.
The first call with which the NaN disappears is the origin. If none does, the calls of one op are tried together, then
all calls that ran in a lower dtype, and of those ops the ones that are needed. Values that became 0 are named as the
reason only if the NaN disappears, too, with these values alone put back.

Repeating needs the arguments. The calls of the forward keep them alive: of results, at most `MOST_BYTES`, the latest
ones. Those of backwards and optimizers keep no memory alive, because autograd adds to a gradient in place only if
nobody else refers to it, and because gradients are as large as the model. What an optimizer uses is known while the
program has it; in a backward, that is only what the forward made, and the arguments of the call in question. Nothing is
computed before a NaN appears. A tensor that was written to since is not used: what depends on it is unknown. (Of what
is not kept alive, no write is noticed. So without float32, a cure must not cure.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_promote.errors import PolicyError
from torch_promote.numerics.mathematics import tell_idiom, tell_outside
from torch_promote.numerics.nonfinite import NonfiniteKind, NonfiniteOrigin, tell_line, tell_where
from torch_promote.numerics.step_state import repeat
from torch_promote.observe.call import Call, Phase, TensorInfo
from torch_promote.observe.ops import OpFacts, asks_for_infinity, can_be_read, has_storage, tensors_in, unnoticed
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy
from torch_promote.policy.policy import Policy
from torch_promote.recording.values import TensorRange, extremes, is_finite
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name

#: The phases whose calls keep their arguments and results alive.
_KEEPING = ("forward", "recompute")
#: Of the results of recent calls, so many bytes are kept alive; of the calls, so many.
MOST_BYTES, MOST_CALLS = 512 * 2**20, 4_000
#: The dtypes of the tensors that PyTorch makes of numbers.
_NUMBERS = (torch.float32, torch.float64, torch.int64)
#: So many calls are tried one by one.
_MOST_TRIED = 64

WITHOUT_REGION = "No region was open: to compute it in float32, convert its arguments with .float()."
_REPEATED_WITHOUT_REGION = (
    "No region was open: to compute what was repeated in float32, convert its arguments with .float()."
)
SUMS = ("aten::add", "aten::sub")
CLAMP_MASKS = "Of masks, clamp the sum: clamp(min=torch.finfo(dtype).min)."
_OF_BACKWARD = (
    "The same call in float32 is not finite either. A backward may have made what it reads, and its calls are not "
    "repeated here: whether one of them lost the number is not known."
)
#: Stands for a tensor that cannot be read.
_UNREADABLE = object()


class _UnknownError(Exception):
    """A tensor that a repetition needs has changed, or cannot be computed again."""


class _Memory(NamedTuple):
    """What identifies the elements of a tensor."""

    storage: int
    offset: Any
    shape: torch.Size
    strides: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class _Kept:
    """A tensor as a call got or made it, the number of the call that made it, and its position among the results."""

    dtype: torch.dtype
    memory: _Memory | int  # of a tensor without storage, its id
    strong: torch.Tensor | None  # shares memory and version with the program's, and has no graph
    weak: StorageWeakRef | None
    version: int
    maker: int | None
    position: int
    has_version: bool = True  # PyTorch gives the results of factories, such as zeros_like, another version counter
    is_of_backward: bool = False  # whether another backward may have made it, whose memory nothing keeps alive

    @property
    def known(self) -> torch.Tensor | None:
        """The tensor; None if it was written to, or its memory was released."""
        tensor = self.strong
        if tensor is None and self.weak is not None and isinstance(self.memory, _Memory):
            storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
            if storage is None or not storage.nbytes():
                return None
            with unnoticed():
                tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
                return tensor.set_(storage, self.memory.offset, self.memory.shape, self.memory.strides)
        if tensor is None or not self.has_version or _version(tensor) != self.version:
            return None
        released = tensor.numel() and has_storage(tensor) and not tensor.untyped_storage().nbytes()
        return None if released else tensor

    @property
    def now(self) -> torch.Tensor:
        tensor = self.known
        if tensor is None:
            raise _UnknownError(f"a {dtype_name(self.dtype)} tensor was written to or released since")
        return tensor


@dataclass(slots=True, eq=False)
class RecentCall:
    """A call that can be repeated."""

    facts: OpFacts
    args: list[Any]  # with `_Kept` for tensors
    call: Call
    results: list[_Kept]
    number: int = 0
    bytes: int = 0
    node: int = 0  # the number of the autograd node that it is a part of; 0 outside of backwards

    @property
    def makers(self) -> Iterator[int]:
        """The numbers of the calls that made its arguments."""
        return (one.maker for one in _kept_in(self.args) if one.maker is not None)

    @property
    def is_lower(self) -> bool:
        """Whether a result has a lower dtype."""
        return any(one.dtype in LOWER_DTYPES for one in self.results)

    @property
    def can_be_widened(self) -> bool:
        """Whether it computed in a lower dtype, and could return float32 instead."""
        facts = self.facts
        return self.is_lower and not (facts.writes or facts.is_view or self.is_opaque)

    @property
    def is_opaque(self) -> bool:
        """Whether it cannot be repeated: it draws random numbers, or communicates between processes."""
        draws = self.facts.is_random and not any(
            name in ("train", "training") and value is False for name, value in self.call.arguments
        )
        return draws or self.facts.communicates


class Repeated(NamedTuple):
    """The results of a call that was repeated in float32, and as its region would run it."""

    wide: list[torch.Tensor]
    low: list[torch.Tensor]


class Lost(NamedTuple):
    """What a call lost, given its results in float32; no text if it only rounded."""

    kind: NonfiniteKind = "rounding"
    texts: Sequence[str] = ()
    # Its results with the one that lost values as float32 numbers: as they are, and with these values put back.
    results: tuple[list[torch.Tensor], ...] = ()


class RecentCalls:
    """The recent calls of a block."""

    def __init__(self) -> None:
        self._calls: dict[int, RecentCall] = {}
        self._made: dict[Any, tuple[int, int]] = {}  # which call made a tensor, and its position, by `_key`
        self._numbers = itertools.count()
        self._bytes = 0
        self._has_forgotten = False
        self._lock = threading.Lock()

    def concerns(self, tensors: Iterable[torch.Tensor], values: Iterable[Any]) -> bool:
        """Whether a call has to be repeatable: an argument is in a lower dtype, names one, or is from such a call."""
        # Others are not kept: memory that becomes a parameter's would have two owners, which cache="persistent" avoids.
        return (
            any(isinstance(one, torch.dtype) and one in LOWER_DTYPES for one in values)
            or any(one.dtype in LOWER_DTYPES for one in tensors)
            or any(_memory_of(one) in self._made for one in tensors if can_be_read(one))
        )

    def keep(self, values: Sequence[Any], copies: Mapping[int, torch.Tensor], phase: Phase) -> list[Any]:
        """Returns arguments with a `_Kept` for each tensor, of those in `copies` by id. Called before a call."""
        phase = _keeping_phase(phase)
        with unnoticed(versions=True):
            return [self._keep(one, copies, phase) for one in values]

    def _keep(self, value: Any, copies: Mapping[int, torch.Tensor], phase: Phase) -> Any:
        if isinstance(value, torch.Tensor):
            try:
                if not can_be_read(value):
                    return _UNREADABLE
                memory, version = _memory_of(value), _version(value)
                maker, position = self._made.get(memory, (None, 0))
                made = None if maker is None else self._calls.get(maker)  # another thread may forget it
                is_of_other = made is not None and made.node not in (0, node_number(phase))
                # Another tensor may have its memory by now, such as a result of the forward.
                is_of_backward = is_of_other and not value.requires_grad and self._is_computed(made)
                if made is None or made.results[position].version != version or is_of_other:
                    maker, made = None, None
                copy = copies.get(id(value))
                if copy is not None:
                    return _Kept(
                        value.dtype, memory, copy, None, _version(copy), maker, position, is_of_backward=is_of_backward
                    )
                strong, weak = _hold(value, phase)
                if strong is None and made is not None:
                    strong = made.results[position].strong
                return _Kept(value.dtype, memory, strong, weak, version, maker, position, is_of_backward=is_of_backward)
            except RuntimeError:  # an uninitialized parameter; a dtype or a subclass that lacks an op
                return _UNREADABLE
        if isinstance(value, list | tuple):
            return [self._keep(one, copies, phase) for one in value]
        return value

    def _is_computed(self, made: RecentCall | None) -> bool:
        """Whether a known call has computed what a call returned, perhaps as a view."""
        while made is not None and (made.facts.is_view or made.facts.shares):
            kept = next(_kept_in(made.args), None)
            if kept is None or kept.maker is None:
                return kept is not None and kept.is_of_backward
            made = self._calls.get(kept.maker)
        return made is not None

    def with_arguments(self, kept: list[Any], values: Sequence[Any]) -> list[Any]:
        """What `keep` returned for a call that is still running, with its arguments alive."""
        tensors = iter(tensors_in(values))

        def alive(one: Any) -> Any:
            if isinstance(one, list):
                return list(map(alive, one))
            if not (isinstance(one, _Kept) or one is _UNREADABLE):
                return one
            value = next(tensors)
            return replace(one, strong=value.detach()) if isinstance(one, _Kept) and one.strong is None else one

        with unnoticed(versions=True):
            return [alive(one) for one in kept]

    def add(self, facts: OpFacts, args: list[Any], call: Call, results: Sequence[torch.Tensor]) -> None:
        """Adds a call that has ended, with its arguments from `keep`."""
        phase = _keeping_phase(call.phase)
        with self._lock:
            number = next(self._numbers)
            kept = []
            with unnoticed(versions=True):
                for position, tensor in enumerate(results):
                    if not can_be_read(tensor):
                        return
                    held, is_shared = _hold(tensor, phase), "pin_memory" not in facts.arguments
                    of = _memory_of(tensor), *held, _version(tensor), number, position, is_shared
                    kept.append(_Kept(tensor.dtype, *of))
            recent = RecentCall(facts, args, call, kept, number, node=node_number(phase))
            # Of arguments that a call writes to, it keeps copies.
            if facts.writes or (phase in _KEEPING and not facts.shares):
                recent.bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in results)
            self._calls[number] = recent
            self._made.update((one.memory, (number, one.position)) for one in kept)
            self._bytes += recent.bytes
            while self._bytes > MOST_BYTES or len(self._calls) > MOST_CALLS:
                self._forget(next(iter(self._calls)))

    def _forget(self, number: int) -> None:
        oldest = self._calls.pop(number)
        self._bytes -= oldest.bytes
        self._has_forgotten = True
        for one in oldest.results:
            if self._made.get(one.memory, (None,))[0] == number:
                del self._made[one.memory]

    def clear(self) -> None:
        """Lets go of all tensors."""
        with self._lock:
            self._calls, self._made, self._bytes = {}, {}, 0

    # --- which call lost a number

    def find_loss(
        self,
        facts: OpFacts,
        args: list[Any],
        call: Call,
        is_cured: Callable[[list[torch.Tensor]], bool],
        source: Call | None,
    ) -> NonfiniteOrigin | tuple[str, ...]:
        """Finds the call that lost the number for want of which a call is not finite, or says what was tried."""
        # `source` is the call that made the infinite values among the arguments, if it is known.
        target = RecentCall(facts, args, call, [], -1)
        before = self._before(target)
        tried = [one for one in reversed(before.values()) if one.can_be_widened]
        is_lower = any(info.dtype in LOWER_DTYPES for info in (*call.inputs, *call.ran_with, *call.outputs))
        tried.sort(key=lambda one: bool(one.call.autocast) and not may_have_override(one.call.name, one.call))
        lower = [one for one in before.values() if one.is_lower]
        made = self._tell_maker(target)
        if not lower and _reads_backward(before, target):
            return _OF_BACKWARD, *made
        if not lower and not self._is_cut(before, target):
            return (
                "The same call in float32 is not finite either, and no call that its arguments come from ran in a "
                "lower dtype: autocast is not the cause.",
                *made,
            )
        unknown = ""

        def cures(some: Sequence[RecentCall]) -> dict[int, Repeated] | None:
            nonlocal unknown
            numbers = {one.number for one in some}
            try:
                wide = _repeated(before, target, numbers, numbers)
                if is_cured(wide[target.number]):
                    low = _repeated(before, target, numbers, set())
                    return None if is_cured(low[target.number]) else {n: Repeated(wide[n], low[n]) for n in wide}
            except Exception as error:  # an op may refuse the dtype, or the memory may not suffice
                unknown = str(error).partition("\n")[0]
            return None

        def are_missed(lost: Lost, number: int) -> bool:
            """Whether the call is finite with lost values put back in float32, and not with that dtype alone."""
            with contextlib.suppress(Exception):  # as in `cures`
                again = (_repeated(before, target, set(), set(), {number: one}) for one in lost.results)
                return [is_cured(one[target.number]) for one in again] == [False, True]
            return False

        if is_lower and not facts.writes and (values := cures([target])):  # ops inside of it lose the number
            text = f"The op calls others, in {dtype_name(call.outputs[0].dtype)}. Repeated in float32, it is finite."
            return self._told(target, "rounding", (call,), [text], values[target.number].low)
        whole = cures(tried) if tried else None
        if (
            whole is None and not unknown
        ):  # that it is finite with one of them in float32 is due to the others' rounding
            tried = []
        by_op: dict[str, list[RecentCall]] = {}
        for one in tried:
            by_op.setdefault(one.call.name, []).append(one)
        # An override acts on all calls of an op: one of them alone may differ from its equals by rounding.
        singles = [
            (one, values)
            for one in tried[:_MOST_TRIED]
            if (values := cures([one])) and (len(by_op[one.call.name]) == 1 or cures(by_op[one.call.name]))
        ]
        for one, values in singles[:1]:
            conversions = (same for same in by_op.values() if len(same) > 1 and same[0].facts.is_cast)
            converted = next((same for same in conversions if one not in same and cures(same)), [])
            return self._loss([one], values, target, are_missed, self._other(singles[1:], converted))
        for same in sorted(by_op.values(), key=len):
            if len(same) > 1 and (values := cures(same)):
                return self._loss(same, values, target, are_missed)
        if whole is not None:
            values = whole
            for name in reversed(list(by_op)):  # without the ops that are not needed, the farthest first
                fewer = [one for one in tried if one.call.name in by_op and one.call.name != name]
                if fewer and (found := cures(fewer)):
                    values = found
                    del by_op[name]
            return self._loss([one for one in tried if one.call.name in by_op], values, target, are_missed)
        count = f"{len(lower):,} call{'s' * (len(lower) > 1)} before it"
        if unknown or self._is_cut(before, target) or any(one.is_opaque for one in lower):
            why = unknown or "they cannot all be repeated"
            text = (
                f"The same call in float32 is not finite either. Whether it is with the {count} that ran in a lower "
                f"dtype in float32, too, is not known: {why}."
            )
        else:
            text = (
                f"It is not finite in float32 either, also with the {count} that ran in a lower dtype in float32: "
                "autocast is not the cause."
            )
        overflow = next((one for one in before.values() if one.call is source), None)
        given = [kept.known for kept in _kept_in(overflow.args)] if overflow else [None]
        finite = [is_finite(found) for found in extremes([one for one in given if one is not None])]
        if overflow is None or asks_for_infinity(overflow.args) or len(finite) < len(given) or not all(finite):
            return text, *made, *(_tell_data(before) if source is None else ())
        texts = [f"Its arguments are finite, its result is not. Therefore {tell_where(call)}, is not finite.", text]
        kind: NonfiniteKind = "overflow in the op" if _fits_float32(overflow) else "mathematics"
        if kind == "mathematics" and overflow.call.op.removesuffix("_") in SUMS:
            texts.append(CLAMP_MASKS)
        return self._told(overflow, kind, (), texts)

    def _tell_maker(self, target: RecentCall) -> list[str]:
        maker = self.maker_of(_at_fault(target))
        if maker is None:
            return []
        idiom = tell_idiom(maker, target.call)
        if (maker.op, target.call.op) == ("aten::sum", "aten::log") and self._multiplies_exponentials(target):
            idiom.append("It sums results of exp: torch.logsumexp does not compute that sum.")
        return [f"Its argument was made by {tell_where(maker)}.", *idiom]

    def _multiplies_exponentials(self, of: RecentCall) -> bool:
        """Whether an argument is a result of exp, or a sum or product of one."""
        makers = [self._calls[one] for one in of.makers if one in self._calls]
        passing = ("aten::mul", "aten::masked_fill", "aten::sum")
        return any(
            one.call.op == "aten::exp" or (one.call.op in passing and self._multiplies_exponentials(one))
            for one in makers
        )

    def are_of_forward(self, kept: Iterable[Any]) -> bool:
        """Whether calls of the forward have made what a call of a backward reads, as far as that is known."""
        waiting = list(_kept_in(kept))
        for one in waiting:
            recent = None if one.maker is None else self._calls.get(one.maker)
            if recent is None:
                return False
            if recent.call.phase not in _KEEPING:
                waiting += _kept_in(recent.args)
        return bool(waiting)

    def reads_scaled_gradient(self, kept: Iterable[Any], scale: float) -> bool:
        """Whether an argument is a result of a backward with `create_graph` of what a scale has multiplied."""
        waiting = [one.maker for one in _kept_in(kept) if one.maker is not None]
        seen = set[int]()
        while waiting:
            recent = self._calls.get(number := waiting.pop())
            if recent is None or number in seen:
                continue
            seen.add(number)
            in_backward = recent.call.phase == "backward"
            if in_backward and recent.call.op == "aten::mul" and scale in map(_number_of, _kept_in(recent.args)):
                return True
            if in_backward or recent.facts.keeps_elements or recent.facts.is_copy:
                waiting += recent.makers
        return False

    def maker_of(self, kept: Iterable[Any]) -> Call | None:
        """The call, other than a conversion, that made an argument, one with zeros first; None if it is unknown."""
        arguments = list(_kept_in(kept))
        arguments.sort(key=lambda one: not _has_zero(one))
        for one in arguments:
            while one is not None and one.maker in self._calls:
                recent = self._calls[one.maker]
                if not (recent.facts.keeps_elements or recent.facts.is_copy):
                    return recent.call
                one = next(_kept_in(recent.args), None)  # type: ignore[assignment]
        return None

    def _before(self, target: RecentCall) -> dict[int, RecentCall]:
        """The calls that the arguments of a call come from, in the order in which they ran."""
        found: dict[int, RecentCall] = {}
        waiting = [one.maker for one in _kept_in(_at_fault(target)) if one.maker is not None]
        while waiting:
            number = waiting.pop()
            if number in self._calls and number not in found:
                found[number] = self._calls[number]
                waiting += found[number].makers
        return dict(sorted(found.items()))

    def _is_cut(self, before: dict[int, RecentCall], target: RecentCall) -> bool:
        """Whether an argument in a lower dtype may come from a call that is not in the list."""
        given = [*(recent.args for recent in before.values()), _at_fault(target)]
        arguments = [one for args in given for one in _kept_in(args)]
        return (
            _reads_backward(before, target)
            or any(one.maker not in before and one.dtype in LOWER_DTYPES for one in arguments)
            or (self._has_forgotten and any(one.maker is not None and one.maker not in before for one in arguments))
        )

    @staticmethod
    def _other(
        singles: Sequence[tuple[RecentCall, dict[int, Repeated]]], converted: Sequence[RecentCall]
    ) -> tuple[Call | None, list[str]]:
        """Names the nearest of the calls each of which cures, too, that has lost values itself, or else conversions."""
        for one, values in singles:
            if texts := _compare(one, values[one.number]).texts:
                how = f"Instead, float32 for {tell_where(one.call)}, makes that call finite as well: there, {texts[0]}"
                return one.call, [how]
        if converted:
            lines = ", ".join(dict.fromkeys(tell_line(one.call) for one in converted))
            what = f"{len(converted):,} conversions to {dtype_name(converted[0].call.outputs[0].dtype)} ({lines})"
            return None, [f"Without the program's {what}, that call is finite, too."]
        return None, []

    def _loss(
        self,
        found: Sequence[RecentCall],
        values: dict[int, Repeated],
        target: RecentCall,
        are_missed: Callable[[Lost, int], bool],
        other: tuple[Call | None, Sequence[str]] = (None, ()),
    ) -> NonfiniteOrigin:
        """Describes a loss: `found` are the calls that cure it, `values` the results of the repetition."""
        lost = {one: _compare(self._calls[one], again) for one, again in values.items() if one >= 0}
        outside: list[str] = []  # what the op is not defined for, by the first call of the last ones that made such
        for number, again in reversed(values.items()):
            if number < 0 or self._calls[number].facts.is_view:
                continue
            pairs = _pairs(self._calls[number], again)
            texts = list(filter(None, (tell_outside(low, exact, target.call.op) for _, low, exact in pairs)))[:1]
            if not texts:
                break
            outside, lost = texts, {number: Lost("rounding", texts)}
        # Of the calls that lost values, the first one without whose values the call is not finite.
        missed = (one for one, what in lost.items() if outside or (what.texts and are_missed(what, one)))
        number = next(missed, found[0].number)
        recent, kind, texts = self._calls[number], lost[number].kind, [*lost[number].texts]
        cures = list({one.call.name: one.call for one in found}.values())
        how = "this call"
        if len(found) > 1 or found[0] is not recent:
            lines = {
                one.name: {tell_line(like.call): 0 for like in found if like.call.name == one.name} for one in cures
            }
            names = ", ".join(f"{name} ({', '.join([*of][:3])}{', ...' * (len(of) > 3)})" for name, of in lines.items())
            how = f"{len(found):,} call{'s' * (len(found) > 1)} of {names}"
        dtype = next((one.dtype for one in recent.results if one.dtype in LOWER_DTYPES), torch.float32)
        texts = [*tell_constants(recent.facts, recent.args, dtype), *texts]
        therefore = "Therefore " if texts else ""
        texts.append(f"{therefore}{tell_where(target.call)}, is not finite; repeated with {how} in float32, it is.")
        if recent.call.phase == "optimizer":
            texts.append("An optimizer computes in the dtype of the weights: keep them in float32.")
        elif not recent.call.autocast:
            texts.append(WITHOUT_REGION if how == "this call" else _REPEATED_WITHOUT_REGION)
        if kind == "overflow in the op" and recent.call.op.removesuffix("_") in SUMS:
            texts.append(CLAMP_MASKS)
        between = [one.call for number, one in self._before(target).items() if number > found[0].number]
        texts += [*other[1], *tell_idiom(found[0].call, target.call, between)]
        return replace(self._told(recent, kind, tuple(cures), texts, values[recent.number].low), other=other[0])

    @staticmethod
    def _told(
        recent: RecentCall,
        kind: NonfiniteKind,
        cures: tuple[Call, ...],
        texts: Iterable[str],
        low: Sequence[torch.Tensor] = (),
    ) -> NonfiniteOrigin:
        call = recent.call
        known = (kept.known for kept in recent.results)
        results = [again if kept is None else kept for kept, again in itertools.zip_longest(known, low)]
        inputs = _ranges(call.inputs, (kept.known for kept in _kept_in(recent.args)))
        outputs = _ranges(call.outputs, results)
        return NonfiniteOrigin(call, kind, call.name, inputs, outputs, cures=cures, text=tuple(texts))


#: Ops that convert or pass on their argument; no override changes their results.
_CONVERTING = ("to.", "_to_copy.", "copy_.", "detach.", "view.", "t.")


@functools.lru_cache(maxsize=4096)
def _is_legal(key: str, devices: tuple[str, ...]) -> bool:
    try:
        Policy.stock().override({key: "fp32"}, devices)
    except PolicyError:
        return False
    return not key.removeprefix("aten::").startswith(_CONVERTING)


def may_have_override(name: str, call: Call) -> bool:
    """Whether an op may run in float32 by an override for the device types whose regions were open at a call."""
    devices = tuple(device for device, _ in call.autocast if device in DEVICE_TYPES) or DEVICE_TYPES
    return _is_legal(exact_key(name), devices)


def _tell_data(before: Mapping[int, RecentCall]) -> list[str]:
    """Names the first call that got an infinite value which no call that is known has made."""
    for recent in before.values():
        for name, kept in zip(recent.facts.arguments, recent.args, strict=False):
            tensor = kept.known if isinstance(kept, _Kept) and kept.maker is None else None
            if tensor is not None and not is_finite(extremes([tensor])[0]):
                text = f"Before it, {name} of {tell_where(recent.call)}, contained infinite values"
                return [f"{text}; which call made them is not known: check the data, and the masks."]
    return []


def _ranges(infos: Iterable[TensorInfo], tensors: Iterable[torch.Tensor | None]) -> tuple[TensorRange, ...]:
    return tuple(
        TensorRange(info.name, info.dtype, info.shape) if tensor is None else TensorRange.of(info.name, tensor)
        for info, tensor in zip(infos, tensors, strict=False)
    )


def _pairs(recent: RecentCall, again: Repeated) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The results of a call in a lower dtype, by position, repeated if no longer known, and in float32."""
    for place, (kept, repeated, exact) in enumerate(zip(recent.results, again.low, again.wide, strict=False)):
        low = kept.known
        low = repeated if low is None else low
        if low.dtype in LOWER_DTYPES and low.shape == exact.shape:
            yield place, low, exact.float()


def _compare(recent: RecentCall, again: Repeated) -> Lost:
    """What a call lost, given its results in float32."""
    for place, low, exact in _pairs(recent, again):
        is_cast = recent.facts.is_copy or recent.facts.is_cast
        became: dict[NonfiniteKind, torch.Tensor] = {
            "overflow in a cast" if is_cast else "overflow in the op": low.isinf() & exact.isfinite(),
            "underflow": (low == 0) & (exact != 0) & (exact.to(low.dtype) == 0),
            "rounding": (low == 0) & (exact.to(low.dtype) != 0),
        }
        if bool((low.abs() <= 1).all()):  # the result is bounded, as that of tanh
            became["rounding"] |= (low.abs() == 1) & (exact.abs() < 1)
        for kind, where in became.items():
            if count := int(where.sum()):
                numbers, dtype = exact[where], dtype_name(low.dtype)
                far = numbers[numbers.abs().argmax()].item()
                becomes = ", ".join(f"{one + 0.0:g}" for one in low[where].unique().tolist())
                text = f"{count:,} of {low.numel():,} values became {becomes} in {dtype}; in float32, the one of the "
                both = low.float(), torch.where(where, exact, low.float())
                results = tuple([*again.low[:place], one, *again.low[place + 1 :]] for one in both)
                return Lost(kind, [f"{text}largest magnitude is {far:.9g}."], results)
    return Lost()


#: Ops whose kernels compute with a number as it is, and round the result alone.
_COMPUTES_WIDER = ("aten::mul", "aten::div")


def tell_constants(facts: OpFacts, args: Sequence[Any], dtype: torch.dtype) -> Iterator[str]:
    """Names the numbers among the arguments, from `keep`, that a lower dtype rounds to 0, 1 or infinity."""
    if facts.op_name.removesuffix("_") in _COMPUTES_WIDER:
        return
    for name, value in zip(facts.arguments, args, strict=False):
        number = value if isinstance(value, float) or (type(value) is int and name in ("other", "value")) else None
        tensor = value.known if isinstance(value, _Kept) and value.maker is None else None
        if tensor is not None and tensor.dim() == 0 and tensor.dtype in _NUMBERS:
            number = tensor.item()
        rounded = 0.0 if number is None else torch.tensor(number, dtype=torch.float64).to(dtype).item()
        if number is None or rounded == number or not (rounded in (0, 1, -1) or math.isinf(rounded)):
            continue
        spelled = f"{number:g}" if float(f"{number:g}") != rounded else f"{number:.9g}"
        told = f"{name} {spelled} is {rounded:g} in {dtype_name(dtype)}."
        finite = ("-1e4", "min") if number < 0 else ("1e4", "max")
        mask = f" In a mask, write {finite[0]}, or torch.finfo(torch.{dtype_name(dtype)}).{finite[1]}."
        yield told + mask * math.isinf(rounded)


def _repeated(
    before: dict[int, RecentCall],
    target: RecentCall,
    again: set[int],
    wide: set[int],
    given: Mapping[int, list[torch.Tensor]] = MappingProxyType({}),
) -> dict[int, list[torch.Tensor]]:
    """Repeats some calls, those of `wide` in float32, and what depends on them or on results that are given."""
    values = dict(given)  # all results, by number
    with unnoticed():
        for number, recent in (*before.items(), (target.number, target)):
            if number in given:
                continue
            changed = any(maker in values for maker in recent.makers)
            if number not in again and not changed and number != target.number:
                continue
            if recent.is_opaque and number != target.number:
                continue  # its result is taken as it was
            values[number] = _repeat(recent, values, number in wide)
    return values


def _repeat(recent: RecentCall, values: dict[int, list[torch.Tensor]], is_wide: bool) -> list[torch.Tensor]:
    """Repeats a call: in float32, or in the dtypes that its region chooses, or in those that it had."""
    target = None if is_wide else _region_dtype(recent)

    def convert(value: Any, to: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Any:
        if isinstance(value, _Kept):
            made = None if value.maker is None else values.get(value.maker)
            tensor = value.now if made is None else made[value.position]
            got = to(tensor, value.dtype) if tensor.is_floating_point() else tensor
            return got.clone() if recent.facts.writes and got is tensor else got
        if isinstance(value, list):
            return [convert(one, to) for one in value]
        if value is _UNREADABLE:
            raise _UnknownError("a tensor cannot be read")
        return torch.float32 if is_wide and isinstance(value, torch.dtype) and value in LOWER_DTYPES else value

    def as_asked(tensor: torch.Tensor, _: torch.dtype) -> torch.Tensor:
        if is_wide:
            return tensor.float() if tensor.dtype in LOWER_DTYPES else tensor
        wants = target is not None and tensor.dtype in (*LOWER_DTYPES, torch.float32)
        return tensor.to(target) if wants else tensor

    try:
        return repeat(recent.facts.op, recent.args, lambda _, value: convert(value, as_asked))
    except _UnknownError:
        raise
    except Exception:  # an op may refuse tensors of two dtypes; then the program has to convert them
        if is_wide:
            raise
        wants = torch.float32 if recent.call.phase == "optimizer" else None
        return repeat(
            recent.facts.op,
            recent.args,
            lambda _, value: convert(value, lambda tensor, old: tensor.to(wants or old)),
        )


def _fits_float32(recent: RecentCall) -> bool:
    """Whether the result of a call alone, repeated in float32, is finite."""
    with unnoticed(), contextlib.suppress(Exception):  # as in `find_loss`
        return all(map(is_finite, extremes(_repeat(recent, {}, is_wide=True))))
    return False


def _region_dtype(recent: RecentCall) -> torch.dtype | None:
    """The dtype to which a call's policy casts its arguments, or that of an op inside; None if neither does."""
    call, policy = recent.call, recent.call.policy
    if isinstance(policy, torch.dtype):
        return policy
    if policy in (CastPolicy.fp32, CastPolicy.fp32_set_opt_dtype, CastPolicy.fp32_append_dtype):
        return torch.float32
    if policy is CastPolicy.lower_precision_fp:
        return next((info.dtype for info in call.ran_with if info.dtype in LOWER_DTYPES), None)
    if policy is None and call.autocast and not any(info.dtype in LOWER_DTYPES for info in call.inputs):
        casts = recent.facts.is_copy or recent.facts.is_cast or not call.composite
        return None if casts else next((one.dtype for one in recent.results if one.dtype in LOWER_DTYPES), None)
    return None


def _kept_in(values: Iterable[Any]) -> Iterator[_Kept]:
    for value in values:
        if isinstance(value, _Kept):
            yield value
        elif isinstance(value, list):
            yield from _kept_in(value)


def _reads_backward(before: Mapping[int, RecentCall], target: RecentCall) -> bool:
    """Whether what an earlier backward may have made is among the arguments, other than by steps of an optimizer."""
    phases = {"optimizer"} - {target.call.phase}
    given = [_at_fault(target), *(recent.args for recent in before.values() if recent.call.phase not in phases)]
    return any(one.is_of_backward for one in _kept_in(given))


def _at_fault(call: RecentCall) -> list[Any]:
    """The arguments of a call that is not finite in float32: of a division by 0, the divisor."""
    divisors = list(_kept_in(call.args[1:2])) if call.facts.op_name.removesuffix("_") == "aten::div" else []
    return divisors if any(map(_has_zero, divisors)) else call.args


def _has_zero(kept: _Kept) -> bool:
    try:
        tensor = kept.known
        with unnoticed():
            return tensor is not None and has_storage(tensor) and bool((tensor == 0).any())
    except RuntimeError:  # the dtype or the device lacks an op
        return False


def _number_of(kept: _Kept) -> float | None:
    tensor = kept.known
    with unnoticed():
        return None if tensor is None or tensor.dim() or not tensor.is_floating_point() else float(tensor)


def _hold(tensor: torch.Tensor, phase: Phase) -> tuple[torch.Tensor | None, StorageWeakRef | None]:
    """Keeps a tensor alive, or knows whether it is. Call it in `unnoticed(versions=True)`."""
    if phase in _KEEPING:  # a second tensor on a parameter's memory would keep its casts out of the persistent cache
        return (tensor if tensor.grad_fn is None else tensor.detach()), None
    # In a backward, an object for the storage would count as a reference to it.
    is_weak = phase == "optimizer" and has_storage(tensor)
    return None, StorageWeakRef(tensor.untyped_storage()) if is_weak else None


def _keeping_phase(phase: Phase) -> Phase:
    """The phase, where a backward with `create_graph` counts as a forward: its results are part of a graph."""
    return "forward" if phase == "backward" and torch.is_grad_enabled() else phase


def node_number(phase: Phase) -> int:
    """A number of the autograd node that is running; 0 outside of backwards."""
    node = torch._C._current_autograd_node() if phase == "backward" else None
    return 0 if node is None else node._sequence_nr() + 1


def _memory_of(tensor: torch.Tensor) -> _Memory | int:
    if not has_storage(tensor):
        return id(tensor)
    address = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
    return _Memory(address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
