"""A recording, prepared for the comparison with another: its calls, what they read, and the errors between results."""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torch_promote.observe.call import COMPILED, Call
from torch_promote.observe.ops import facts_of
from torch_promote.reading.alignment import align
from torch_promote.recording.program_state import PARAMETERS
from torch_promote.recording.recording import STEPS, Calls
from torch_promote.recording.values import EMPTY, Values, distance

if TYPE_CHECKING:
    from torch_promote.recording.recording import Read, Recording, Source

#: Ops that put memory into a tensor that no call has computed, unless they keep its elements.
_ALLOCATES = re.compile(r"aten::(resize_|resize_as_|set_)$")

#: So many steps of a run are compared with its first.
_MOST_STEPS = 8


def _is_undefined(call: Call) -> bool:
    """Whether a call leaves memory whose contents no call has computed: uninitialized, or another storage."""
    if facts_of(call.name).is_uninitialized:
        return True
    if not _ALLOCATES.match(call.op):
        return False
    before, after = (sum(math.prod(info.shape) for info in infos[:1]) for infos in (call.inputs, call.outputs))
    return call.op == "aten::set_" or before < after


def relative_error(one: Values, other: Values) -> float | None:
    """The relative L2 norm of the difference of two tensors, estimated from their sketches."""
    # None without a sketch of both, or for other sizes; inf if they differ in their numbers of infinite values or NaN.
    if one.digest and one.digest == other.digest:
        return 0.0
    if one.l2 is None or other.l2 is None or one.count != other.count:
        return None
    if (one.infs, one.nans) != (other.infs, other.nans):
        return math.inf
    found = distance(one, other)
    if found is None:
        return None
    size = max(one.l2, other.l2)
    return found / size if size else 0.0


def before_the_window(one: Recording, other: Recording) -> tuple[frozenset[int], frozenset[int]]:
    """The calls that have no counterpart if one run alone was recorded from a later step on (`--steps 6:`).

    The windowed recording starts with the end of the step before, behind the optimizer's, and the other one with what
    sets the program up. Its later steps tell both apart from the step itself: they are an end and a step as well.
    """
    nothing: frozenset[int] = frozenset()
    windowed = [recording.environment.get(STEPS, "0:").partition(":")[0] not in ("", "0") for recording in (one, other)]
    window, whole = (one, other) if windowed[0] else (other, one)
    steps = [_of_steps(recording) for recording in (window, whole)]
    if windowed[0] == windowed[1] or not steps[0] or len(steps[1]) < 2:
        return nothing, nothing
    mine, theirs = (
        [[recording.calls[i] for i in step] for step in found[:_MOST_STEPS]]
        for recording, found in zip((window, whole), steps, strict=True)
    )
    # The programs may stand in two files. Their later steps tell which line of one is which of the other.
    same: dict[tuple[str, str], tuple[str, str]] = {}
    for calls in zip(mine[1:], theirs[1:], strict=False):
        names = [[(call.name, call.module, call.phase) for call in step] for step in calls]
        places = [[*map(_place, step)] for step in calls]
        for i, j in align([(names[0], names[1])], [(places[0], places[1])]):
            same.setdefault(_place(calls[0][i]), _place(calls[1][j]))
    first, *later = [[_place(call) for call in step] for step in theirs]
    start = _first_in(first, itertools.chain(*later))
    end = _first_in([same.get(key, key) for key in map(_place, mine[0])], first[start:])
    if end == len(mine[0]):
        return nothing, nothing
    outside = frozenset(steps[0][0][:end]), frozenset(steps[1][0][:start])
    return outside if windowed[0] else outside[::-1]


def _place(call: Call) -> tuple[str, str]:
    return call.name, call.line


def _first_in(one: Sequence[object], other: Iterable[object]) -> int:
    """The place of the first that is in the other sequence; the length if none is."""
    known = set(other)
    return next((place for place, key in enumerate(one) if key in known), len(one))


def _of_steps(recording: Recording) -> list[list[int]]:
    """The numbers of the calls that the program made, by step."""
    ends = [0, *(min(end.calls, len(recording.calls)) for end in recording.ends)]  # `max_calls` may have dropped some
    return [[i for i in range(start, end) if recording.calls[i].own] for start, end in itertools.pairwise(ends)]


def is_unfinished(recording: Recording) -> bool:
    """Whether the recorded program was killed, or is still running."""
    return any(one.kind == "unfinished" for one in recording.not_seen)


def renamed(recording: Recording, modules: Mapping[str, str]) -> Recording:
    """A recording with other names for modules, and for what belongs to them."""

    def of(name: str) -> str:  # a parameter, or "exp_avg of 0.weight"
        what, between, path = name.rpartition(" of ")
        module, _, last = path.rpartition(".")
        if not module:  # of the model itself, whose calls other modules may make in the other run
            return name
        module = modules.get(module, module)
        return f"{what}{between}{f'{module}.' if module else ''}{last}"

    def keys(values: Mapping[str, Any]) -> dict[str, Any]:
        return {of(name): one for name, one in values.items()}

    found = copy.copy(recording)
    found.calls = Calls(replace(call, module=modules.get(call.module, call.module)) for call in recording.calls)
    found.sources = [replace(one, name=of(one.name)) if one.name else one for one in recording.sources]
    found.ends = [
        replace(end, gradients=keys(end.gradients), parameters=keys(end.parameters)) for end in recording.ends
    ]
    found.states = [
        replace(
            state,
            tensors=keys(state.tensors),
            numbers={
                name: tuple(of(str(one)) for one in value)
                if name.startswith(PARAMETERS) and isinstance(value, tuple)
                else value
                for name, value in state.numbers.items()
            },
        )
        for state in recording.states
    ]
    return found


class Run:
    """A recording, prepared for the comparison."""

    def __init__(self, recording: Recording, outside: frozenset[int] = frozenset()) -> None:
        self.recording: Recording = recording
        self.outside: frozenset[int] = outside  # the calls that are not compared: see `before_the_window`
        self.calls: Sequence[Call] = recording.calls
        self.sources: Sequence[Source] = recording.sources
        # The numbers of the calls that only allocate memory, such as torch.empty.
        self.undefined: frozenset[int] = frozenset(i for i, call in enumerate(self.calls) if _is_undefined(call))
        self.unfinished: bool = is_unfinished(recording)  # whether it was killed, or is still running
        ends = [end.calls for end in recording.ends]
        # The number of optimizer steps before each call.
        self.steps: list[int] = [bisect.bisect_right(ends, i) for i in range(len(self.calls))]
        end = ends[-1] if self.unfinished and ends else len(self.calls)
        # The numbers of the calls that the program made, without those of compiled code, those that only allocate
        # memory, and those after the last step of a run that was killed.
        self.own: list[int] = [
            i
            for i, call in enumerate(self.calls[:end])
            if call.own and call.policy_source != COMPILED and i not in self.undefined and i not in outside
        ]
        self.compiled: bool = any(one.kind == "compiled" for one in recording.not_seen) or any(
            call.policy_source == COMPILED for call in self.calls
        )
        # The first source of each parameter and buffer.
        self.named: dict[str, Source] = {
            source.name: source
            for source in reversed(self.sources)
            if source.kind in ("parameter", "buffer") and source.name
        }
        self._parameters: dict[int, str] = {}  # what `parameter_of` has found
        self.initial: frozenset[int] = self._initial()  # the calls that only initialize parameters and buffers
        # The digests of all inputs and results.
        self.contents: frozenset[str] = frozenset(
            [one.digest for reads in recording.reads.values() for one in reads]
            + [one.digest for values in recording.values.values() for one in values]
        )

    def _initial(self) -> frozenset[int]:
        waiting = [i for source in self.named.values() if source.step == 0 for i in source.written_by]
        found: set[int] = set()
        while waiting:
            i = waiting.pop()
            if i >= 0 and i not in found and i < len(self.calls):
                found.add(i)
                waiting += [writer for read in self.reads(i) for writer in read.written_by]
        return frozenset(found)

    def reads(self, i: int) -> Sequence[Read]:
        """What a call reads, by input; () if it is unknown."""
        return self.recording.reads.get(i, ())

    def is_outside(self, read: Read) -> bool:
        """Whether no recorded call has made what a call reads, and it is no parameter or state."""
        made = (self.sources[-1 - w].kind != "input" if w < 0 else w not in self.undefined for w in read.written_by)
        return bool(read.digest) and not any(made)

    def values(self, i: int) -> Sequence[Values]:
        """The values of a call's results; () without."""
        return self.recording.values.get(i, ())

    def results(self, i: int) -> tuple[str, ...]:
        """The digests of a call's results; () if one is unknown."""
        found = tuple(values.digest for values in self.values(i))
        return found if all(found) else ()

    def content(self, i: int) -> tuple[str, ...]:
        """The digests of a call's results, or of what one without results reads, as item(); () if one is unknown."""
        if self.calls[i].outputs:
            return self.results(i)
        found = tuple(read.digest for read in self.reads(i))
        return found if all(found) else ()

    def items(self, i: int) -> list[tuple[Any, ...]]:
        """What a call of lists reads and writes by item, whatever their order; [] if something is unknown."""
        if "_foreach_" not in self.calls[i].op:
            return []
        call, found = self.calls[i], dict[str, list[Any]]()
        reads = [one.digest for one in self.reads(i)]
        for infos, digests in ((call.inputs, reads), (call.outputs, self.results(i))):
            for info, digest in zip(infos, digests, strict=False):
                name, _, number = info.name.rpartition("[")
                found.setdefault(number.rstrip("]"), []).append((name, info.shape, str(info.dtype), digest))
        return sorted(tuple(item) for item in found.values()) if self.results(i) else []

    def tells(self, i: int) -> bool:
        """Whether a call's results identify it: not zeros of a backward, which those of several steps of a loop are."""
        return self.calls[i].phase != "backward" or any(values.amax != 0.0 for values in self.values(i))

    def is_transparent(self, i: int) -> bool:
        """Whether a call is a view or a conversion."""
        call = self.calls[i]
        return facts_of(call.name).keeps_elements and call.op not in ("aten::clone", "aten::contiguous")

    def computes(self, i: int) -> bool:
        """Whether a call has results of its own: it is no view or conversion, and no question such as item()."""
        return bool(self.calls[i].outputs) and not self.is_transparent(i)

    def converts(self, i: int) -> bool:
        """Whether a call copies elements to a tensor of another dtype, as the call that reads it tells."""
        call = self.calls[i]
        return facts_of(call.name).is_copy and len({info.dtype for info in call.inputs}) > 1

    def makes_state(self, i: int) -> bool:
        """Whether a call makes a state from nothing, such as GradScaler's first scale, which is compared itself."""
        return self.calls[i].phase == "optimizer" and not self.calls[i].inputs

    def updates(self, i: int) -> bool:
        """Whether a call writes to its arguments."""
        call = self.calls[i]
        return (
            call.op.endswith("_")
            or call.overload.endswith("out")
            or any(not info.name.isdigit() for info in call.outputs)
        )

    def chain(self, writer: int) -> list[int]:
        """A writer, and if it is a copy or a conversion what it has converted, and so on."""
        found = [writer]
        while writer >= 0 and facts_of(self.calls[writer].name).keeps_elements:
            reads = self.reads(writer)
            if not reads or len(reads[0].written_by) != 1:
                break
            (writer,) = reads[0].written_by
            found.append(writer)
        return found

    def values_of(self, writer: int, digest: str = "") -> Values:
        """The values of what a writer, as in `Read`, left in memory: of several results, those with the digest."""
        if writer < 0:
            return self.sources[-1 - writer].values
        found = self.values(writer)
        fitting = [one for one in found if one.digest == digest]
        return fitting[0] if fitting else found[0] if len(found) == 1 else EMPTY

    def rounding(self, i: int) -> float:
        """The relative L2 error of a call's results that other rounding explains."""
        # 8 units in the last place of their dtype, and sqrt(n) of float32's, if an element is the sum of n terms.
        call, unit = self.calls[i], 0.0
        for one in self.chain(i):
            if one >= 0:
                infos = self.calls[one].outputs
                dtypes = [info.dtype for info in infos if info.dtype.is_floating_point or info.dtype.is_complex]
                unit = max([unit, *(torch.finfo(dtype).eps for dtype in dtypes)])
        results = max((math.prod(info.shape) for info in call.outputs), default=1) or 1
        terms = max(
            (max([*info.shape, math.prod(info.shape[1:]), math.prod(info.shape) // results]) for info in call.inputs),
            default=1,
        )
        return 8 * unit + math.sqrt(terms) * min(unit, torch.finfo(torch.float32).eps)

    def parameter_of(self, i: int) -> str:
        """The parameter or buffer to which a call writes in place; "" if it writes to another tensor."""
        writer, digest = i, ""
        passed: list[int] = []
        while writer >= 0 and writer not in self._parameters and self.updates(writer) and self.reads(writer):
            results, reads = self.results(writer), self.reads(writer)
            read = reads[results.index(digest) if digest in results[: len(reads)] else 0]
            if not read.written_by:
                return ""
            passed += [writer] if len(results) < 2 else []
            writer, digest = read.written_by[-1], read.digest
        source = self.sources[-1 - writer] if writer < 0 else None
        name = self._parameters.get(writer, "")
        if source is not None and source.kind in ("parameter", "buffer"):
            name = source.name
        self._parameters.update(dict.fromkeys(passed, name))
        return name

    def parameters_of_loop(self, calls: Sequence[int]) -> list[str]:
        """Of the calls of an optimizer's step, the parameters that each, or else the next such call, writes to."""
        found, name = list[str](), ""
        for i in reversed(calls):
            name = (self.parameter_of(i) if self.updates(i) else "") or name
            found.append(name)
        return found[::-1]

    def inner(self, i: int) -> list[int]:
        """The calls inside of a call, which stand before it."""
        start = i
        while start > 0 and not self.calls[start - 1].own:
            start -= 1
        return list(range(start, i))
