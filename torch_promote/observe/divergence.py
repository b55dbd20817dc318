"""The comparison of two recordings with values: which call differs first, and why.

NOTE [ Where runs part ]
The calls of the program are walked in the order in which the first run made them. A call has equal inputs if what wrote
them left equal bits in both runs; the writers themselves need not be aligned. The first of these events explains the
difference:

- A call reads a parameter, a buffer or a batch with other contents.
- A call with equal inputs has other results.
- A call reads what calls that only one run has made, and the contents differ.

Views, and conversions of dtypes, are transparent. A call whose inputs are equal but for such conversions ran in another
dtype. Calls of one run alone that do not change what later calls read are reported if nothing else differs. What runs
before the first call of the model to initialize a parameter is not compared: the parameter is, where it is first read.

NOTE [ What counts as rounding ]
If nothing differs that may select other kernels, every difference has a cause. Otherwise (another PyTorch, device, CPU
or setting) results may round differently, and a relative L2 error of up to (4 + sqrt(n)) units in the last place of the
result's dtype is attributed to that; n is the number of terms that an element may be summed from, at most. The walk
then goes on behind such a call, without the events that a rounding error sets off in the calls that read it.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from torch_promote.observe.alignment import align
from torch_promote.observe.events import COMPILED, COMPILED_CALLS, COMPILED_FUNCTION, Call
from torch_promote.observe.findings import is_uninitialized, is_view
from torch_promote.observe.ops import find_overload
from torch_promote.observe.values import Values, distance

if TYPE_CHECKING:
    from torch_promote.observe.events import Recording, Source, TensorInfo

__all__ = [
    "Event",
    "Gap",
    "Kind",
    "Pair",
    "Run",
    "Walk",
    "common_module",
    "is_close",
    "is_random",
    "relative_error",
    "rounding_of",
]

Kind: TypeAlias = Literal["policy", "input", "weight", "op", "rounding", "structure"]
"""What explains the difference between two runs."""

_CONVERSIONS = re.compile(
    r"aten::(to|_to_copy|type_as|_autocast_to_\w+|_unsafe_view|_reshape_alias|lift|lift_fresh|lift_fresh_copy|contiguous)$"
)
_COPIES = ("aten::contiguous",)  # transparent to what is read, and calls of their own if only one run has them
_RANDOM = re.compile(
    r"\w+::_?(fused_|native_)?(alpha_|feature_)?(dropout|bernoulli|rand|normal|uniform|multinomial|poisson|exponential"
    r"|geometric|cauchy|log_normal|random|rrelu|binomial|sample_dirichlet|standard_gamma)"
)
#: Compiled functions round more often, and less, than the calls that they replace.
_COMPILED_ROUNDS = 16.0


@functools.lru_cache(maxsize=4096)
def _is_conversion(op: str) -> bool:
    return _CONVERSIONS.match(op) is not None


@functools.lru_cache(maxsize=4096)
def _is_transparent(name: str) -> bool:
    op = name.partition(".")[0]
    return (_is_conversion(op) and op not in _COPIES) or is_view(name)


@functools.lru_cache(maxsize=4096)
def is_random(name: str) -> bool:
    """Whether an op draws random numbers.

    Example:
        >>> is_random("aten::dropout"), is_random("aten::uniform_"), is_random("aten::mul.Tensor")
        (True, True, False)
    """
    if _RANDOM.match(name):
        return True
    try:
        return torch.Tag.nondeterministic_seeded in find_overload(name).tags
    except (AttributeError, RuntimeError, KeyError, ValueError, TypeError):
        return False  # an op of another PyTorch release or the program


# --- numbers


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
    return unit * (4 + math.sqrt(terms))


def is_close(error: float | None, call: Call) -> bool:
    """Whether other rounding explains an error of a call's results."""
    return error is not None and error <= rounding_of(call)


# --- one run


class Run:
    """A recording, prepared for the comparison.

    Attributes:
        calls: Its calls.
        sources: Its sources.
        own: The indices of the calls that the program made, without those of compiled code, and those that only
            allocate memory, such as torch.empty.
        steps: The number of optimizer steps before each call.
        initial: The indices of calls that only initialize parameters.
        compiled: Whether compiled functions ran.
        gradients: For each step, the largest L2 norm of a gradient.
    """

    def __init__(self, recording: Recording) -> None:
        self.calls: Sequence[Call] = recording.calls
        self.sources: Sequence[Source] = recording.sources
        own = (i for i, call in enumerate(self.calls) if call.own and call.said_by != COMPILED)
        self.own: list[int] = [i for i in own if not is_uninitialized(self.calls[i].op)]
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

    def digests(self, writer: int, info: TensorInfo | None = None) -> tuple[str, ...]:
        """The digests of what a call or source left in memory.

        Args:
            writer: As in `Call.reads`.
            info: The tensor that is read: of several results, those that fit it count.
        """
        return tuple(values.digest for values in self.values_of(writer, info))

    def values_of(self, writer: int, info: TensorInfo | None = None) -> tuple[Values, ...]:
        """The values of what a call or source left in memory, with the arguments of `digests`."""
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
        while writer >= 0 and (_is_conversion(self.calls[writer].op) or self.is_transparent(writer)):
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
            found += self.digests(chain[-1], info)
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


# --- two runs


class Pair(NamedTuple):
    """The same call in both runs."""

    one: int
    other: int


@dataclass
class Gap:
    """Calls that stand in one place, and that only one run made, or the runs made differently.

    Attributes:
        one: Those of the first run, without transparent ones.
        other: Those of the second run.
        tainted: Whether they read what differed before.
    """

    one: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    tainted: bool = False


@dataclass(frozen=True)
class Event:
    """Where runs part.

    Attributes:
        kind: What explains it.
        one: The call in the first run; None if only the second made it.
        other: The call in the second run.
        error: The relative error of what differs; None if it is unknown.
        parameter: The parameter or buffer that differs.
        evidence: What is known of it, in sentences.
        sources: The sources that differ.
        op: What differs, if it is not that call: "torch.compile".
        module: Its module.
    """

    kind: Kind
    one: int | None
    other: int | None
    error: float | None = None
    parameter: str = ""
    evidence: tuple[str, ...] = ()
    sources: tuple[tuple[int, int], ...] = ()
    op: str = ""
    module: str | None = None


class Walk:
    """Walks through two runs.

    Args:
        one: The first run.
        other: The second run.
        may_round: Whether other kernels may have run, so that a small error is rounding.

    Attributes:
        pairs: The calls that both runs made, without transparent ones, in the order of the first run.
        gaps: The others.
        event: The first event that explains the difference; None if there is none.
        rounded: The calls whose results differ by rounding, on equal inputs.
        errors: For each pair, the relative error of its results.
    """

    def __init__(self, one: Run, other: Run, may_round: bool) -> None:
        self.one: Run = one
        self.other: Run = other
        self._may_round = may_round
        self.pairs: list[Pair] = []
        self.gaps: list[Gap] = []
        self.event: Event | None = None
        self.rounded: list[tuple[Pair, float]] = []
        self.errors: list[float | None] = []
        self._views: list[Pair] = []  # equal inputs, other contents
        self._equal: tuple[set[int], set[int]] = set(), set()  # calls with equal results
        self._gap_of: tuple[dict[int, Gap], dict[int, Gap]] = {}, {}
        self._changed: set[int] = set()  # ids of gaps that change what later calls read
        self._walk()

    # --- the order

    def _aligned(self) -> dict[int, int]:
        """The calls of the first run that the second made as well."""
        places: dict[tuple[int, str, str, bool], tuple[list[int], list[int]]] = {}
        for side, run in enumerate((self.one, self.other)):
            for i in run.own:
                if i not in run.initial:
                    call = run.calls[i]
                    key = run.steps[i], call.phase, call.module, run.is_transparent(i)
                    places.setdefault(key, ([], []))[side].append(i)
        found: dict[int, int] = {}
        for ones, others in places.values():
            one = [(self.one.calls[i].name, len(self.one.calls[i].inputs)) for i in ones]
            other = [(self.other.calls[j].name, len(self.other.calls[j].inputs)) for j in others]
            contents = [self.one.results(i) for i in ones], [self.other.results(j) for j in others]
            found |= {ones[i]: others[j] for i, j in align(one, other, contents)}
        return found

    def _order(self) -> Iterator[tuple[int | None, int | None]]:
        """The calls of both runs: those of the first in its order, the others where they ran."""
        aligned = self._aligned()
        place_of = {j: i for i, j in aligned.items()}
        after: dict[int, list[int]] = {}
        place = -1
        for j in self.other.own:
            if j in self.other.initial:
                continue
            if j in place_of:
                place = max(place, place_of[j])
            else:
                after.setdefault(place, []).append(j)
        for j in after.get(-1, ()):
            yield None, j
        for i in self.one.own:
            if i not in self.one.initial:
                yield i, aligned.get(i)
                for j in after.get(i, ()):
                    yield None, j

    def _walk(self) -> None:
        gap: Gap | None = None
        for i, j in self._order():
            if i is not None and j is not None:
                pair = Pair(i, j)
                if self.one.is_transparent(i):
                    self._see_view(pair)
                    continue
                gap = None
                self._see(pair)
                continue
            side, run, k = (0, self.one, i) if i is not None else (1, self.other, j)
            assert k is not None
            if run.is_transparent(k):
                continue
            if gap is None:
                gap = Gap()
                self.gaps.append(gap)
            (gap.one, gap.other)[side].append(k)
            self._gap_of[side][k] = gap
            if not gap.tainted and self._is_tainted(side, k):
                gap.tainted = True
        for one in self.gaps:
            if self.event is not None:
                break
            if self.one.compiled != self.other.compiled:
                self._compare_compiled(one)
            elif self._is_replacement_that_differs(one):
                self._put(self._of_gap(one, None))

    def _put(self, event: Event) -> None:
        if self.event is None:
            self.event = event

    # --- pairs

    def _see_view(self, pair: Pair) -> None:
        one, other = self.one.results(pair.one), self.other.results(pair.other)
        if one and other and one != other and not self._places(pair, converted=False):
            dtypes = [
                [info.dtype for info in run.calls[k].outputs] for run, k in ((self.one, pair[0]), (self.other, pair[1]))
            ]
            if dtypes[0] == dtypes[1]:
                self._views.append(pair)

    def _see(self, pair: Pair) -> None:
        one, other = self.one.calls[pair.one], self.other.calls[pair.other]
        results = self.one.results(pair.one), self.other.results(pair.other)
        dtypes = [tuple(info.dtype for info in call.outputs) for call in (one, other)]
        same = results[0] == results[1] and dtypes[0] == dtypes[1]
        error = 0.0 if same else self.error_of(pair)
        self.pairs.append(pair)
        self.errors.append(error)
        differing = self._places(pair, converted=True)
        if same:
            self._equal[0].add(pair.one)
            self._equal[1].add(pair.other)
        if self.event is not None:
            return
        if differing and not self._places(pair, converted=False):
            differing = []  # equal but for conversions
        if same:
            differing = [place for place in differing if self._is_comparable(pair, place)]
        if differing:
            event = self._of_inputs(pair, differing, error)
            if event is not None:
                self._put(event)
                return
        if differing:
            if self._may_round and dtypes[0] != dtypes[1] and _dtypes(one, "inputs") == _dtypes(other, "inputs"):
                self._put(self._of_results(pair, error))
        elif not same and ((results[0] and results[1]) or dtypes[0] != dtypes[1]):
            event = self._of_results(pair, error)
            if event.kind == "op" and self._may_round and is_close(error, one):
                self.rounded.append((pair, error or 0.0))
            else:
                self._put(event)

    def error_of(self, pair: Pair) -> float | None:
        """The largest relative error of the results of a call."""
        values = zip(self.one.calls[pair.one].values, self.other.calls[pair.other].values, strict=False)
        errors = [error for one, other in values if (error := relative_error(one, other)) is not None]
        return max(errors, default=None)

    def _places(self, pair: Pair, *, converted: bool) -> list[int]:
        """The inputs of a call whose contents differ."""
        found = []
        reads = self.one.calls[pair.one].reads, self.other.calls[pair.other].reads
        for place in range(min(map(len, reads))):
            if reads[0][place] and reads[1][place]:
                one = self.one.contents(pair.one, place, converted=converted)
                other = self.other.contents(pair.other, place, converted=converted)
                if one and other and one != other:
                    found.append(place)
        return found

    def _is_comparable(self, pair: Pair, place: int) -> bool:
        """Whether what wrote an input has as many elements in both runs. Otherwise, the runs read it by other views."""
        one, other = self._written(pair, place)
        return len(one) != 1 or len(other) != 1 or one[0].count == other[0].count

    def _written(self, pair: Pair, place: int) -> tuple[tuple[Values, ...], tuple[Values, ...]]:
        """What the last call that wrote an input computed, in both runs."""
        found: list[tuple[Values, ...]] = []
        for run, k in ((self.one, pair.one), (self.other, pair.other)):
            call = run.calls[k]
            found.append(run.values_of(run.chain(call.reads[place][-1])[-1], call.inputs[place]))
        return found[0], found[1]

    def _writers(self, side: int, i: int, place: int) -> set[int]:
        run = (self.one, self.other)[side]
        return {k for writer in run.calls[i].reads[place] for k in run.chain(writer)}

    def _is_tainted(self, side: int, i: int) -> bool:
        """Whether a call reads what differs between the runs."""
        run, other = (self.one, self.other) if side == 0 else (self.other, self.one)
        for read in run.calls[i].reads:
            for writer in read:
                root = run.chain(writer)[-1]
                if root >= 0 and root not in self._equal[side] and root not in run.initial:
                    gap = self._gap_of[side].get(root)
                    if gap is None or gap.tainted:
                        return True
                elif root < 0 and not self._is_known(run.sources[-1 - root], other):
                    return True
        return False

    def _is_known(self, source: Source, other: Run) -> bool:
        """Whether the other run has a source with these contents."""
        named = other.named.get(source.name)
        if named is not None:
            return named.values.digest == source.values.digest
        return source.values.digest in other.batches

    # --- causes

    def _of_inputs(self, pair: Pair, differing: list[int], error: float | None) -> Event | None:
        """What explains that inputs of a call differ; None if an earlier difference does."""
        sources: list[tuple[int, int]] = []
        clean = [True, True]
        for place in differing:
            writers = self._writers(0, pair.one, place), self._writers(1, pair.other, place)
            for side, run in ((0, self.one), (1, self.other)):
                for k in writers[side]:
                    gap = self._gap_of[side].get(k)
                    if gap is not None:
                        self._changed.add(id(gap))
                        found = self._input_error(pair, place)
                        if self.one.compiled != self.other.compiled:
                            return self._of_compiled(gap, pair, place)
                        if gap.tainted and self.rounded:
                            return None
                        return self._of_gap(gap, found if found is not None else error)
                    if k >= 0 and k not in self._equal[side] and k == run.chain(k)[-1]:
                        clean[side] = False
            roots = [
                [run.chain(writer)[-1] for writer in run.calls[k].reads[place]]
                for run, k in ((self.one, pair.one), (self.other, pair.other))
            ]
            sources += [(a, b) for a, b in zip(*roots, strict=False) if a < 0 and b < 0 and self._differ(a, b)]
        contents = [
            sorted(run.contents(k, place, converted=False) for place in range(len(run.calls[k].reads)))
            for run, k in ((self.one, pair.one), (self.other, pair.other))
        ]
        if contents[0] == contents[1] or (any(clean) and self._is_rewired(pair, differing, sources)):
            what = (
                "It reads its inputs in another order."
                if contents[0] == contents[1]
                else ("It reads other tensors in the two runs, which both have: calls are in another order.")
            )
            return self.reordered() or Event("op", pair.one, pair.other, error, evidence=(what,))
        return self._of_sources(pair, sources) if sources else None

    def _input_error(self, pair: Pair, place: int) -> float | None:
        """The relative error of an input of a call."""
        one, other = self._written(pair, place)
        if len(one) == len(other):
            errors = [relative_error(a, b) for a, b in zip(one, other, strict=True)]
            return max((error for error in errors if error is not None), default=None)
        # Compiled code wrote one of what the other run's call did, such as the gradients of a norm's weight and bias.
        errors = [relative_error(a, b) for a in one for b in other]
        return min((error for error in errors if error is not None), default=None)

    def _of_compiled(self, gap: Gap, pair: Pair, place: int) -> Event | None:
        """What explains that a call reads what a compiled function computed in one of the runs.

        A gradient may consist of rounding alone, such as that of the bias of attention's keys. So a small one may have
        the errors of the step's largest one.
        """
        read, error = self.one.calls[pair.one], self._input_error(pair, place)
        values, step = self._written(pair, place)[0], self.one.steps[pair.one]
        largest = self.one.gradients[step] if read.phase != "forward" and step < len(self.one.gradients) else 0.0
        share = min((values[0].l2 or 0.0) / largest, 1.0) if values and largest else 1.0
        # After a step, the weights differ as well.
        has_rounded = any(self.one.steps[earlier.one] < step for earlier, _ in self.rounded)
        if error is None or has_rounded or error * share <= _COMPILED_ROUNDS * rounding_of(read):
            self.rounded.append((pair, error or 0.0))
            return None
        return self._other_weight() or self._other_input() or self._of_graph(gap, read.op, error)

    def _of_graph(self, gap: Gap, reader: str, error: float) -> Event:
        side, calls = (self.one, gap.one) if gap.one else (self.other, gap.other)
        evidence = (
            f"{reader} reads what compiled code computed in one of the runs, and it differs by more than rounding.",
        )
        return Event(
            "op",
            gap.one[-1] if gap.one else None,
            None,
            error,
            evidence=evidence,
            op="torch.compile",
            module=common_module(side.calls[k].module for k in calls),
        )

    def _compare_compiled(self, gap: Gap) -> None:
        """Compares what compiled functions return, which no later call reads, with what the other run computes."""
        calls = [
            [run.calls[k] for k in ks] for run, ks in zip((self.one, self.other), (gap.one, gap.other), strict=True)
        ]
        if self.one.compiled:
            calls.reverse()
        candidates = [one for call in calls[0] for one in zip(call.outputs, call.values, strict=False)]
        for call in calls[1]:
            if call.op != COMPILED_FUNCTION or (gap.tainted and self.rounded):
                continue
            if not call.outputs:  # PyTorch 2.11 does not tell what a compiled function returns
                event = self._other_weight() or self._other_input()
                if event is not None:
                    self._put(event)
                    return
            for info, values in zip(call.outputs, call.values, strict=False):
                fitting = [one for known, one in candidates if (known.dtype, known.shape) == (info.dtype, info.shape)]
                errors = [error for one in fitting if (error := relative_error(one, values)) is not None]
                if not errors or min(errors) == 0.0:
                    continue
                if min(errors) > _COMPILED_ROUNDS * rounding_of(call):
                    event = self._other_weight() or self._other_input()
                    self._put(event or self._of_graph(gap, "The program", min(errors)))
                    return
                self.rounded.append((Pair(gap.one[-1], gap.other[-1]), min(errors)))

    def _other_input(self) -> Event | None:
        """The first input of a forward that the other run does not have."""
        for inputs in zip(self.one.inputs.values(), self.other.inputs.values(), strict=False):
            found = [
                next(
                    (
                        read
                        for digest, read in known.items()
                        if run.calls[read[0]].phase == "forward" and digest not in others
                    ),
                    None,
                )
                for run, known, others in zip(
                    (self.one, self.other), inputs, (self.other.batches, self.one.batches), strict=True
                )
            ]
            if None not in found:
                (i, a), (j, b) = (one for one in found if one is not None)
                error = relative_error(self.one.sources[-1 - a].values, self.other.sources[-1 - b].values)
                one, other = (None, j) if self.one.compiled else (i, None)  # the call of the run whose calls are seen
                return Event("input", one, other, error, sources=((a, b),))
        return None

    def _other_weight(self) -> Event | None:
        """The first parameter or buffer that differs, with the call of the run that is not compiled that reads it."""
        for name, one in self.one.named.items():
            other = self.other.named.get(name)
            if other is None or one.values.digest == other.values.digest:
                continue
            places = -1 - self.one.sources.index(one), -1 - self.other.sources.index(other)
            readers = [
                next((k for k in run.own if any(place in read for read in run.calls[k].reads)), None)
                for run, place in ((self.one, places[0]), (self.other, places[1]))
            ]
            reader, its = (None, readers[1]) if self.one.compiled else (readers[0], None)
            if reader is not None or its is not None:
                error = relative_error(one.values, other.values)
                return Event("weight", reader, its, error, name, (), (places,))
        return None

    def reordered(self) -> Event | None:
        """What explains other results if a step reads the same inputs in another order; None if it does not."""
        for one, other in zip(self.one.inputs.values(), self.other.inputs.values(), strict=False):
            for (digest, (i, a)), (other_digest, (j, b)) in zip(one.items(), other.items(), strict=False):
                if digest != other_digest:
                    if one.keys() != other.keys():
                        return None
                    error = relative_error(self.one.sources[-1 - a].values, self.other.sources[-1 - b].values)
                    return Event("input", i, j, error, sources=((a, b),))
        return None

    def _differ(self, one: int, other: int) -> bool:
        return self.one.sources[-1 - one].values.digest != self.other.sources[-1 - other].values.digest

    def _is_rewired(self, pair: Pair, differing: list[int], sources: list[tuple[int, int]]) -> bool:
        """Whether a call reads tensors that both runs have, in other places."""
        for a, b in sources:
            one, other = self.one.sources[-1 - a], self.other.sources[-1 - b]
            if one.kind == other.kind == "input" or one.name == other.name:
                return False
            if not self._is_known(one, self.other) or not self._is_known(other, self.one):
                return False
        for side, run, k in ((0, self.one, pair.one), (1, self.other, pair.other)):
            other_run = (self.other, self.one)[side]
            for place in differing:
                for writer in run.calls[k].reads[place]:
                    root = run.chain(writer)[-1]
                    if root < 0 and not self._is_known(run.sources[-1 - root], other_run):
                        return False
        return True

    def _of_sources(self, pair: Pair, sources: list[tuple[int, int]]) -> Event:
        def info(side: int, place: int) -> Source:
            return (self.one, self.other)[side].sources[-1 - place]

        weights = [(a, b) for a, b in sources if info(0, a).kind != "input"]
        unseen = self._other_weight() if weights and self.one.compiled != self.other.compiled else None
        if unseen is not None:
            return unseen
        inputs = [(a, b) for a, b in sources if info(0, a).kind == "input"]
        chosen = weights or inputs
        one, other = info(0, chosen[0][0]), info(1, chosen[0][1])
        error = relative_error(one.values, other.values)
        if one.info.dtype is not other.info.dtype and error is not None and error < 1e-2:
            return Event("policy", pair.one, pair.other, error, one.name if weights else "", (), tuple(sources))
        if not weights and self.one.calls[pair.one].phase not in ("forward", "recompute"):
            if any(call.op.startswith("c10d::") for call in self.one.calls):  # another rank has sent it
                return Event("input", pair.one, pair.other, error, "", (), tuple(sources))
            evidence = ("It reads what no recorded call has written, such as a sum of gradients: it differs.",)
            return Event("op", pair.one, pair.other, error, evidence=evidence)
        kind: Kind = "weight" if weights else "input"
        return Event(kind, pair.one, pair.other, error, one.name if weights else "", (), tuple(sources))

    def _of_results(self, pair: Pair, error: float | None) -> Event:
        """What explains that the results of a call with equal inputs differ."""
        one, other = self.one.calls[pair.one], self.other.calls[pair.other]
        kind: Kind = "op"
        evidence: list[str] = []
        casted = self._places(pair, converted=True)
        inner = self.one.inner(pair.one), self.other.inner(pair.other)
        if _dtypes(one, "outputs") != _dtypes(other, "outputs") or _dtypes(one, "ran_with") != _dtypes(
            other, "ran_with"
        ):
            kind = "policy"
            evidence.append(f"On equal inputs, it ran as {one.dtypes} in A and as {other.dtypes} in B.")
        elif casted and is_random(one.name) is False:
            kind = "policy"
            evidence.append("Its inputs were converted to another dtype before, which rounded them.")
        elif one.policy != other.policy:
            kind = "policy"
            evidence.append(f"Its policy is {one.policy_name or 'none'} in A and {other.policy_name or 'none'} in B.")
        elif is_random(one.name) and inner[0] == inner[1]:  # attention may draw some, and ran another kernel otherwise
            kind = "input"
            evidence.append(f"{one.op} draws random numbers: its inputs are equal, and its results are not.")
        elif self._views:
            view = self._views[0]
            evidence.append("On equal inputs, this view has other elements: its arguments differ.")
            return Event("op", view.one, view.other, self.error_of(view), evidence=tuple(evidence))
        else:
            evidence.append("Its inputs have equal bits in both runs, and its results do not.")
            if inner[0] != inner[1]:
                names = [", ".join(dict.fromkeys(one)) or "no other op" for one in inner]
                evidence.append(f"It called {names[0]} in A, and {names[1]} in B.")
        return Event(kind, pair.one, pair.other, error, evidence=tuple(evidence))

    def _of_gap(self, gap: Gap, error: float | None) -> Event:
        if not (gap.one and gap.other):
            side = "A" if gap.one else "B"
            evidence = (f"Only {side} makes this call, and what is read after it differs.",)
            return Event("structure", *self.first_of(gap), error, evidence=evidence)
        one, other = self.one.calls[gap.one[-1]], self.other.calls[gap.other[-1]]
        names = [
            ", ".join(dict.fromkeys(run.calls[k].op for k in calls))
            for run, calls in ((self.one, gap.one), (self.other, gap.other))
        ]
        evidence = (f"A calls {names[0]} where B calls {names[1]}.",)
        kind: Kind = "policy" if _dtypes(one, "outputs") != _dtypes(other, "outputs") else "op"
        found = self.error_of(Pair(gap.one[-1], gap.other[-1]))
        return Event(kind, gap.one[-1], gap.other[-1], error if found is None else found, evidence=evidence)

    def _is_replacement_that_differs(self, gap: Gap) -> bool:
        """Whether two runs compute something in other ways, with other results, which no later call reads."""
        if not (gap.one and gap.other) or (gap.tainted and self.rounded):
            return False
        last = self.one.results(gap.one[-1]), self.other.results(gap.other[-1])
        counts = [
            [values.count for values in run.calls[calls[-1]].values]
            for run, calls in ((self.one, gap.one), (self.other, gap.other))
        ]
        return bool(last[0] and last[1] and last[0] != last[1] and counts[0] == counts[1])

    def first_of(self, gap: Gap) -> tuple[int | None, int | None]:
        """The first call of a gap in each run."""
        return (gap.one[0] if gap.one else None), (gap.other[0] if gap.other else None)


def _dtypes(call: Call, what: str) -> tuple[torch.dtype, ...]:
    return tuple(info.dtype for info in getattr(call, what))


def common_module(paths: Iterable[str]) -> str:
    """The innermost module that contains others.

    Example:
        >>> common_module(["blocks.0.up", "blocks.0.down"]), common_module(["a", "b"])
        ('blocks.0', '')
    """
    parts = [path.split(".") for path in paths]
    common: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
