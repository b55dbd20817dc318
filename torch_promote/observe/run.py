"""A recording, prepared for the comparison with another: its calls, what they read, and the errors between results."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_promote.observe.events import COMPILED, COMPILED_CALLS, UNFINISHED, Call
from torch_promote.observe.ops import facts_of
from torch_promote.observe.values import Values, distance

if TYPE_CHECKING:
    from torch_promote.observe.events import Recording, Source, TensorInfo

__all__ = ["Run", "is_close", "is_random", "is_unfinished", "relative_error", "rounding_of"]

#: Ops that put memory into a tensor that no call has computed, unless they keep its elements.
_ALLOCATES = re.compile(r"aten::(resize_|resize_as_|set_)$")
_COPIES = ("aten::contiguous",)  # transparent to what is read, and calls of their own if only one run has them


def _is_transparent(name: str) -> bool:
    facts = facts_of(name)
    return facts.is_view or (facts.keeps_elements and facts.op_name not in _COPIES)


def is_random(name: str) -> bool:
    """Whether an op draws random numbers.

    Example:
        >>> is_random("aten::dropout"), is_random("aten::uniform_"), is_random("aten::mul.Tensor")
        (True, True, False)
    """
    return facts_of(name).is_random


def _is_undefined(call: Call) -> bool:
    """Whether a call leaves memory whose contents no call has computed: uninitialized, or another storage."""
    if facts_of(call.name).is_uninitialized:
        return True
    if not _ALLOCATES.match(call.op):
        return False
    before, after = (sum(math.prod(info.shape) for info in infos[:1]) for infos in (call.inputs, call.outputs))
    return call.op == "aten::set_" or before < after


def relative_error(one: Values, other: Values) -> float | None:
    """The relative L2 norm of the difference of two tensors, estimated from their sketches.

    Returns:
        None if one of them has no sketch, such as a tensor of integers; inf if they differ in their number of elements,
        infinite values or NaN.

    Example:
        >>> import torch
        >>> relative_error(Values.of(torch.ones(4)), Values.of(torch.ones(4)))
        0.0
    """
    if one.digest and one.digest == other.digest:
        return 0.0
    if one.l2 is None or other.l2 is None:
        return None
    if (one.count, one.infs, one.nans) != (other.count, other.infs, other.nans):
        return math.inf
    found = distance(one, other)
    if found is None:
        return None
    size = max(one.l2, other.l2)
    return found / size if size else 0.0


def rounding_of(call: Call) -> float:
    """The relative L2 error of a call's results that other rounding explains: see NOTE [ What counts as rounding ]."""
    dtypes = [info.dtype for info in call.outputs if info.dtype.is_floating_point or info.dtype.is_complex]
    unit = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    results = max((math.prod(info.shape) for info in call.outputs), default=1) or 1
    terms = max(
        (max([*info.shape, math.prod(info.shape[1:]), math.prod(info.shape) // results]) for info in call.inputs),
        default=1,
    )
    return 8 * unit + math.sqrt(terms) * min(unit, torch.finfo(torch.float32).eps)


def is_close(error: float | None, call: Call) -> bool:
    """Whether other rounding explains an error of a call's results."""
    return error is not None and error <= rounding_of(call)


def is_unfinished(recording: Recording) -> bool:
    """Whether the recorded program was killed, or is still running."""
    return any(one.startswith(UNFINISHED) for one in recording.not_seen)


class Run:
    """A recording, prepared for the comparison.

    Attributes:
        calls: Its calls.
        sources: Its sources.
        own: The indices of the calls that the program made, without those of compiled code, those in `undefined`, and
            those after the last step of a run that was killed.
        undefined: The indices of the calls that only allocate memory, such as torch.empty.
        unfinished: Whether the run was killed, or is still running.
        steps: The number of optimizer steps before each call.
        initial: The indices of calls that only initialize parameters.
        compiled: Whether compiled functions ran.
        gradients: For each step, the largest L2 norm of a gradient.
    """

    def __init__(self, recording: Recording) -> None:
        self.calls: Sequence[Call] = recording.calls
        self.sources: Sequence[Source] = recording.sources
        self.undefined: frozenset[int] = frozenset(i for i, call in enumerate(self.calls) if _is_undefined(call))
        self.unfinished: bool = is_unfinished(recording)
        end = recording.ends[-1].calls if self.unfinished and recording.ends else len(self.calls)
        own = (i for i, call in enumerate(self.calls[:end]) if call.own and call.said_by != COMPILED)
        self.own: list[int] = [i for i in own if i not in self.undefined]
        ends = [end.calls for end in recording.ends[:-1]]
        self.steps: list[int] = [bisect.bisect_right(ends, i) for i in range(len(self.calls))]
        self.initial: frozenset[int] = self._initial()
        norms = ([one.l2 or 0.0 for one in end.gradients.values()] for end in recording.ends)
        self.gradients: list[float] = [max(found, default=0.0) for found in norms]
        self.compiled: bool = any(one.startswith(COMPILED_CALLS) for one in recording.not_seen) or any(
            call.said_by == COMPILED for call in self.calls
        )
        #: Digests of the inputs that calls of a step read, with the step.
        self.batches: dict[str, set[int]] = {}
        #: Those that the forward reads.
        self.read_forward: set[str] = set()
        self.named: dict[str, Source] = {source.name: source for source in reversed(self.sources) if source.name}
        #: By step, the digests of the inputs in the order of their first calls, with the call and the source.
        self.inputs: dict[int, dict[str, tuple[int, int]]] = {}
        for i in self.own:
            for writer in (writer for read in self.calls[i].reads for writer in read):
                root = self.chain(writer)[-1]
                if root < 0 and self.sources[-1 - root].kind == "input":
                    digest = self.sources[-1 - root].values.digest
                    self.batches.setdefault(digest, set()).add(self.steps[i])
                    if self.calls[i].phase == "forward":  # a backward also reads what an op has saved for itself
                        self.read_forward.add(digest)
                    if not self.is_transparent(i):
                        self.inputs.setdefault(self.steps[i], {}).setdefault(digest, (i, root))

    def _initial(self) -> frozenset[int]:
        waiting = [i for source in self.sources if source.kind != "input" for i in source.written_by]
        found: set[int] = set()
        while waiting:
            i = waiting.pop()
            if i >= 0 and i not in found and i < len(self.calls):
                found.add(i)
                waiting += [writer for read in self.calls[i].reads for writer in read]
        return frozenset(found)

    def is_transparent(self, i: int) -> bool:
        """Whether a call is a view or a conversion."""
        return _is_transparent(self.calls[i].name)

    def values_of(self, writer: int, info: TensorInfo | None = None) -> tuple[Values, ...]:
        """The values of what a call or source left in memory.

        Args:
            writer: As in `Call.reads`.
            info: The tensor that is read: of several results, those that fit it count.
        """
        if writer < 0:
            return (self.sources[-1 - writer].values,)
        call = self.calls[writer]
        if info is not None and len(call.values) > 1:
            pairs = list(zip(call.outputs, call.values, strict=False))
            fitting = [values for one, values in pairs if (one.dtype, one.shape) == (info.dtype, info.shape)]
            fitting = fitting or [values for one, values in pairs if math.prod(one.shape) == math.prod(info.shape)]
            if fitting:
                return tuple(fitting)
        return call.values

    def chain(self, writer: int) -> list[int]:
        """A writer, and if it is a conversion what it has converted, and so on."""
        found = [writer]
        while writer >= 0 and (facts_of(self.calls[writer].name).keeps_elements or self.is_transparent(writer)):
            reads = self.calls[writer].reads
            if not reads or len(reads[0]) != 1:
                break
            writer = reads[0][0]
            found.append(writer)
        return found

    def contents(self, i: int, place: int, *, converted: bool) -> tuple[str, ...]:
        """The digests of an input of a call; () if they are unknown.

        Args:
            i: The call.
            place: The index of the input.
            converted: False: the digests of what was converted to that.
        """
        call = self.calls[i]
        found: list[str] = []
        for writer in call.reads[place] if place < len(call.reads) else ():
            chain = [writer] if converted else self.chain(writer)
            info = call.inputs[place] if len(chain) == 1 else self.calls[chain[-2]].inputs[0]
            found += [values.digest for values in self.values_of(chain[-1], info)]
        return tuple(found) if all(found) else ()

    def results(self, i: int) -> tuple[str, ...]:
        """The digests of a call's results; () if they are unknown."""
        found = tuple(values.digest for values in self.calls[i].values)
        return found if all(found) else ()

    def inner(self, i: int) -> list[str]:
        """The names of the calls inside of a call, which stand before it."""
        found = []
        while i > 0 and not self.calls[i - 1].own:
            i -= 1
            found.append(self.calls[i].name)
        return found[::-1]
