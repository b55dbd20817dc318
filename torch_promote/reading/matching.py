"""`Match`: two implementations of one model, paired by the values of what they compute.

NOTE [ How results are paired ]
Results with equal bits form a class. Classes of both runs are a pair if the error between them, which their sketches
tell, is within a tolerance that follows from the dtypes; of several, the nearest. The members of a class are paired in
the order of the runs. What is left is compared by what does not depend on the order of the elements: their number,
norm, extremes and exponents, if the shapes differ; zeros count as padding. So is one result with those of consecutive
calls of one line, as in a loop. Constants, of which there are equal ones by chance, are paired only if one op made
both.

NOTE [ Where an implementation goes wrong ]
A call is right if one of its results, or of the views of them, has a counterpart, or if a call that reads it is right:
a program may compute in other steps what another computes in one. The first call that depends on data and is not right
is where the first program leaves the second. The same from the other side gives the call of the second.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch

from torch_promote.errors import OptionError, shown
from torch_promote.observe.ops import facts_of
from torch_promote.reading.pairing import where_of
from torch_promote.reading.run import Run, relative_error
from torch_promote.recording.values import unpack_projections, unpack_sketch
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name
from torch_promote.report.base import (
    Column,
    Content,
    Listing,
    Part,
    Report,
    Sides,
    Table,
    ancestors,
    module_name,
    percent,
    short_line,
    spell_number,
)
from torch_promote.report.base import Fact as ReportFact
from torch_promote.report.codec import encode

if TYPE_CHECKING:
    from torch_promote.observe.call import Call
    from torch_promote.recording.recording import Read, Recording, Source
    from torch_promote.recording.values import Values

#: The relative L2 error up to which results are a pair, by the dtype of most products, for a forward of at most so many
#: calls that compute. It grows with the root of their number.
_TOLERANCES = {torch.float64: 1e-11, torch.float32: 1.2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_MOST_CALLS, _LARGEST_TOLERANCE = 100, 0.1
#: Ops that autocast runs in lower precision.
_PRODUCT = re.compile("linear|mm|matmul|conv|attention|einsum|lstm|gru|rnn|dot")
#: Ops that move elements, besides views and conversions, and those that pick some: of weights, an embedding does that.
_MOVING = re.compile(
    "aten::(cat|concat|concatenate|hstack|vstack|stack|repeat|repeat_interleave|tile|pad|constant_pad_nd|roll|flip|"
    "clone|contiguous|reshape|copy_)$"
)
_PICKING = re.compile("aten::(index|index_select|gather)$")
#: The error from which two results are not nearly the same; and that for a call that joins results without counterpart.
_MOST_OF_NEAR, _MOST_OF_JOINED = 0.5, 0.7
#: A result that is nearer by a factor of ten may be so many calls later.
_CALLS_OF_A_DECADE, _SMALLEST = 8.0, 1e-12
#: The calls behind the first wrong one among which the nearest results are looked for.
_REACH = 12
#: A pair whose error is so many times that of its inputs, and more than rounding, is where errors begin to grow.
_GROWS = 20.0
#: The fewest elements that are told by their norm, extremes and exponents.
_FEWEST = 16
#: The entries of a table of distances, and the results or rows that are compared because one number of them fits.
_CHUNK, _MOST_PLACES = 4_000_000, 64
#: The relative errors up to which rows of weights are equal, of which other kernels may sum the product in another
#: order; the fewest rows that are told apart if they are rounded, and the most of which a single one is told.
_WEIGHT_ROUNDS, _LEAST_ROUNDED, _MOST_SINGLE = 2e-5, 8, 4096
#: A gradient below this share of the largest one may consist of rounding.
_SMALL_GRADIENT = 3e-2
#: The calls of a program on the page.
_MOST_SHOWN = 300
_COMPUTES = "The port (B) computes what the reference (A) computes"
_BEGIN_TO_EXCEED, _NO_COUNTERPART = "errors begin to exceed rounding", "no counterpart"


@dataclass(frozen=True, slots=True)
class NearMiss:
    """Two calls that compute nearly the same, or the call where a program goes wrong without a counterpart.

    Attributes:
        a: The call in the first run; None without one.
        b: The call in the second run.
        relative_l2: The estimated relative L2 error between their results; None if they cannot be compared.
        text: What was found, in a few words.
    """

    a: Call | None
    b: Call | None
    relative_l2: float | None
    text: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        sides = {
            name: None if one is None else {"op": one.op, "module": one.module, "line": one.line}
            for name, one in (("a", self.a), ("b", self.b))
        }
        return {**sides, "relative_l2": encode(self.relative_l2)}


class _Result(NamedTuple):
    call: int  # its number, or -1 - i for a source
    place: int  # the index of the result
    values: Values


_Class: TypeAlias = list[_Result]  # results of a run with equal bits


class _Pair(NamedTuple):
    ends: tuple[_Result, _Result]  # in A and in B
    error: float
    is_same_order: bool  # False if the elements are in another order


class _Side:
    """A run, prepared: its results by their bits, which calls read which, and the pairs of its results."""

    def __init__(self, recording: Recording) -> None:
        self.run = run = Run(recording)
        self.own: list[int] = [i for i in run.own if i not in run.initial and run.calls[i].phase != "optimizer"]
        self.reads: list[list[Read]] = [self._reads(i, call) for i, call in enumerate(run.calls)]
        # Those that returned their argument, as a dropout does outside of training.
        returns = {i for i in self.own if run.reads(i) and run.results(i) == (run.reads(i)[0].digest,)}
        # The calls that only move elements, and the sources.
        self.moves: set[int] = returns.union(range(-len(run.sources), 0))
        for i, call in enumerate(run.calls):
            picked = itertools.chain(*(read.written_by for read in self.reads[i][:1]))
            picks = _PICKING.match(call.op) and max(picked, default=0) >= 0
            if run.is_transparent(i) or picks or _MOVING.match(call.op) or facts_of(call.name).is_view:
                self.moves.add(i)
        self.writers: dict[int, list[int]] = {i: self._writers(i) for i in self.own}
        written = set(itertools.chain(*self.writers.values()))
        # Calls whose results are memory that others have written.
        self.is_view: set[int] = {i for i in self.own if i not in written and (i in returns or run.is_transparent(i))}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.views: dict[int, list[int]] = defaultdict(list)
        for i, writers in self.writers.items():
            for writer in writers:
                (self.views if i in self.is_view else self.readers)[writer].append(i)
        optimizer = {i for i, call in enumerate(run.calls) if call.phase == "optimizer"}
        self.updating: set[int] = set(itertools.chain(*map(self._writers, optimizer)))  # what the optimizer reads
        # Parameters, floating inputs and what depends on them; and the calls that do, or depend on random numbers.
        is_data = [one.kind == "parameter" or (one.kind == "input" and one.values.count) for one in run.sources]
        sources = {-1 - k for k, is_one in enumerate(is_data) if is_one}
        self.data: set[int] = _closure(sources | optimizer, self._readers_of)
        depends = _closure(self.data.union(recording.draws), self._readers_of)
        # Nothing of the model is computed from preparations, such as initial weights that are overwritten.
        seeds = [i for i in (*self.data.difference(self.moves), *self.updating) if i in self.writers]
        near = _closure(seeds, lambda i: [k for k in (*self.writers[i], *self._readers_of(i)) if k in self.writers])
        self.own = [i for i in self.own if i in near or not near]
        self.depends: set[int] = depends.intersection(self.writers) or set(self.own)
        self.computing: list[int] = [i for i in self.own if run.computes(i) and i not in returns]
        self.classes: dict[str, _Class] = self._classes()
        self.telling: list[_Class] = [found for found in self.classes.values() if not _is_constant(found[0].values)]
        self.pairs: dict[tuple[int, int], _Pair] = {}  # by call and place
        self.paired: set[str] = set()  # the digests of what has a counterpart

    def _writers(self, i: int) -> list[int]:
        """What has written the memory that a call reads."""
        return list(dict.fromkeys(itertools.chain(*(read.written_by for read in self.reads[i]))))

    def _reads(self, i: int, call: Call) -> list[Read]:
        """What a call reads, without memory that it overwrites, and tensors whose shape or dtype alone a view takes."""
        names = [info.name.partition("[")[0] for info in call.inputs]
        own = set(names[:1] if self.run.is_transparent(i) else names) - facts_of(call.name).ignored
        return [read for name, read in zip(names, self.run.reads(i), strict=False) if name in own]

    def _readers_of(self, i: int) -> list[int]:
        """The calls that read a result."""
        return [*self.readers[i], *self.views[i]]

    def _classes(self) -> dict[str, _Class]:
        """The results with equal bits, by their digest; of constants, by digest and op."""
        run, found = self.run, defaultdict[str, _Class](list)
        left_out = run.initial.union(run.own, run.undefined).difference(self.own)
        results = [
            ("", _Result(-1 - number, 0, source.values))
            for number, source in enumerate(run.sources)
            if source.kind not in ("state", "gradient")
        ]
        for i, call in enumerate(run.calls):
            if i not in left_out and call.phase != "optimizer":
                results += [(call.op, _Result(i, place, values)) for place, values in enumerate(run.values(i))]
        for op, result in results:
            if result.values.digest:
                found[result.values.digest + (f" {op}" if _is_constant(result.values) else "")].append(result)
        for one in found.values():
            # Complex numbers have the bits of their real view, which has counts. A view may be a call of the other run.
            one.sort(key=lambda end: (not end.values.count, end.call in self.moves, end.call < 0, end.call))
        return found

    def call(self, number: int) -> Call:
        return self.run.calls[number]

    def pairs_of(self, call: int) -> list[_Pair]:
        """The pairs of a call's results, or of a source."""
        places = range(len(self.run.values(call)) if call >= 0 else 1)
        return [self.pairs[call, place] for place in places if (call, place) in self.pairs]

    def in_order(self, digest: str) -> set[tuple[int, int]]:
        """The calls of A and of B that computed, in the same order, what has a digest."""
        pairs = [self.pairs.get((end.call, end.place)) for end in self.classes.get(digest, ())]
        return {(pair.ends[0].call, pair.ends[1].call) for pair in pairs if pair is not None and pair.is_same_order}

    def read_from_others(self, calls: Sequence[int]) -> dict[str, int]:
        """What calls read, but for weights: by digest, who wrote it."""
        reads = [read for read in itertools.chain(*(self.reads[i] for i in calls)) if read.digest and read.written_by]
        found = [(read.digest, max(read.written_by)) for read in reads]
        return {digest: i for digest, i in found if i not in calls and (i >= 0 or self.run.sources[~i].kind == "input")}

    def behind(self, i: int) -> set[int]:
        """The calls that a call reads from, through those that only move elements."""
        found = _closure(self.writers.get(i, ()), lambda k: self.writers.get(k, ()) if k in self.moves else ())
        return {k for k in found if k >= 0}

    def joins(self, i: int) -> bool:
        """Whether a call joins results without a counterpart, as those of a layer and of its adapter."""
        return sum(k in self.depends and not self.pairs_of(k) for k in self.writers[i]) > 1

    @cached_property
    def forward(self) -> list[int]:
        """The calls of the forward that compute something from data."""
        return [i for i in self.computing if i in self.depends and self.call(i).phase == "forward"]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating dtype in which most products of the forward are computed."""
        products = [i for i in self.forward if _PRODUCT.search(self.call(i).op)] or self.forward
        found = Counter(info.dtype for i in products for info in self.call(i).outputs if info.dtype in _TOLERANCES)
        return max(found, key=found.__getitem__, default=torch.float32)

    @cached_property
    def outputs(self) -> list[_Result]:
        """What leaves the forward: no later call computes numbers from it, but item() or argmax may read it."""
        ahead = Counter[int](dict.fromkeys(self.updating, 2))  # what is computed from a call's results
        ranks = Counter[int]({i: _rank(self.call(i)) for i in self.computing})
        for i in reversed(self.own):
            for writer in self.writers[i]:
                ahead[writer] = max(ahead[writer], ahead[i], ranks[i])
        found: list[_Result] = []
        for i in self.forward:
            values, places = self.run.values(i), set[int]()
            # Integers and bools that leave the program, such as tokens, not those of a layer, as numbers of experts.
            is_end = i in self.data and not self.call(i).module and (ahead[i] < ranks[i] or not self.readers[i])
            if values and (ahead[i] < 2 == ranks[i] or is_end):
                # Of several results, the first that tells, such as the values of topk.
                places.add(next((place for place, one in enumerate(values) if not _is_constant(one)), 0))
            read = set().union(
                *({read.digest for read in self.reads[k]} for k in self.readers[i] if self.call(k).phase == "forward")
            )
            for place, (info, one) in enumerate(zip(self.call(i).outputs, values, strict=False)):
                if not info.name.isdigit() and one.l2 and one.digest not in read and i not in self.updating:
                    places.add(place)  # an argument that the call has written, such as running statistics
            found += [_Result(i, place, values[place]) for place in sorted(places)]
        return found

    @cached_property
    def right(self) -> set[int]:
        """The calls that are right, found from the last to the first: what a right call reads is right."""
        found, right, read_later = set[int](), set(self.paired), set[str]()  # the calls; and by digest
        parts: dict[str, list[str]] = defaultdict(list)  # what views make of what they read, by digest
        for i in reversed(self.own):
            known = {values.digest: values for values in self.run.values(i) if not _is_constant(values)}
            read, results = {one.digest for one in self.reads[i]}, self.run.results(i)
            right.update(one for one in known if parts[one] and right.issuperset(parts[one]))
            # Of several results, such as the states of an LSTM, those that are read count.
            is_read = read_later.intersection(known)
            is_right = right.issuperset(is_read) if is_read else not right.isdisjoint(known or results)
            if is_right or (not known and self.pairs_of(i)):
                found.add(i)
            read_later |= read
            sizes = [
                math.prod(info.shape) for infos in (self.call(i).outputs, self.call(i).inputs) for info in infos[:1]
            ]
            if i in self.is_view and sizes[0] < sizes[-1]:
                parts.update({one: [*parts[one], *results] for one in read})
            # Few numbers, such as a loss, and constants tell little of what they were computed from.
            elif is_right and (i in self.is_view or max((one.count for one in known.values()), default=0) >= _FEWEST):
                right |= read
        return found

    def wrong(self, *phases: str) -> list[int]:
        """The calls that depend on data, compute, and are not right, in the order of the run."""
        left = self.depends.intersection(self.computing).difference(self.right, self.moves)
        own = [
            i for i in sorted(left) if self.call(i).phase in phases and not all(map(_is_constant, self.run.values(i)))
        ]
        return [i for i in own if self.readers[i] or self.call(i).phase == "forward"]


def _closure(start: Iterable[int], next_of: Callable[[int], Iterable[int]]) -> set[int]:
    """What can be reached in a graph."""
    found, waiting = set[int](), [*start]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += next_of(i)
    return found


def _rank(call: Call) -> int:
    """2 if a call has floating or complex results, 1 if it has integers."""
    dtypes = [info.dtype for info in call.outputs]
    return max((2 if one.is_floating_point or one.is_complex else int(one != torch.bool) for one in dtypes), default=0)


def _is_constant(values: Values) -> bool:
    """Whether equal values elsewhere say nothing: nothing but zeros and one round number, or no floating numbers."""
    if not values.l2:
        return True
    if values.amax is None:  # complex numbers
        return False
    return values.amax == values.min_nonzero and (values.count > 1 or float(values.amax * 1024).is_integer())


def _norm(results: Sequence[_Result]) -> float:
    return results[0].values.l2 or 0.0


def _elements(parts: Sequence[Values]) -> tuple[float, float, float, Counter[Any]]:
    """What does not depend on the order of the elements of tensors: norm, extremes and exponents, without zeros."""
    exponents = Counter[Any]()
    for one in parts:
        exponents.update(dict(one.exponents) | {"inf": round(one.infs * one.count), "nan": round(one.nans * one.count)})
    extremes = min(one.min_nonzero or 0.0 for one in parts), max(one.amax or 0.0 for one in parts)
    return math.hypot(*(one.l2 or 0.0 for one in parts)), *extremes, exponents


class _Pairing:
    """The pairs of results of two runs; see NOTE [ How results are paired ]."""

    def __init__(self, one: _Side, other: _Side, tolerance: float) -> None:
        self.sides, self.tolerance = (one, other), tolerance
        for key in [known for known in one.classes if known in other.classes]:  # equal bits
            self._add(0, one.classes[key], other.classes[key])
        for step in (self._by_sketch, self._by_elements, self._by_parts):
            step(0, one, other)
            step(1, other, one)

    def _add(
        self, number: int, mine: Sequence[_Result], theirs: Sequence[_Result], error: float = 0.0, in_order: bool = True
    ) -> None:
        """Pairs results of a run with those of the other in their order; if one has fewer, its last with the rest."""
        for place in range(max(len(mine), len(theirs)) if mine and theirs else 0):
            ends = mine[min(place, len(mine) - 1)], theirs[min(place, len(theirs) - 1)]
            pair = _Pair(ends[::-1] if number else ends, error, in_order)
            for side, end in zip(self.sides, pair.ends, strict=True):
                side.pairs.setdefault((end.call, end.place), pair)
                side.paired.add(end.values.digest)

    def _by_sketch(self, number: int, mine: _Side, theirs: _Side) -> None:
        """Pairs what is left with the nearest of the other run that has as many elements."""
        by_count = defaultdict[int, tuple[list[_Class], list[_Class]]](lambda: ([], []))
        for place, side in enumerate((mine, theirs)):
            for found in side.telling:
                if place or found[0].values.digest not in mine.paired:
                    by_count[found[0].values.count][place].append(found)
        for left, others in by_count.values():
            if left and others:
                tables = [
                    torch.tensor([unpack_sketch(one[0].values.sketch) or [0.0] * 16 for one in classes]).double()
                    for classes in (left, others)
                ]
                rows = tables[0].split(max(1, _CHUNK // len(others)))
                nearest = torch.cat([torch.cdist(some, tables[1]).argmin(1) for some in rows])
                for one, other in zip(left, (others[place] for place in nearest.tolist()), strict=True):
                    error = relative_error(one[0].values, other[0].values)
                    if error is not None and error <= self.tolerance:
                        self._add(number, one, other, error)

    def _left(self, side: _Side) -> list[_Class]:
        """What is left of a run that its elements tell, by norm."""
        left = [one for one in side.telling if one[0].values.digest not in side.paired]
        return sorted((one for one in left if len(one[0].values.exponents) >= 3), key=_norm)

    def _by_elements(self, number: int, mine: _Side, theirs: _Side) -> None:
        """Pairs what is left by what does not depend on the order of the elements, if the shapes differ."""
        by_norm = sorted(theirs.telling, key=_norm)
        for one in self._left(mine):
            if one[0].values.count >= _FEWEST:
                shapes, known = _shapes(mine, one), self.wholes(by_norm, [one[0].values])
                other = next((other for other in known if shapes.isdisjoint(_shapes(theirs, other))), ())
                self._add(number, one, other, in_order=False)

    def _by_parts(self, number: int, mine: _Side, theirs: _Side) -> None:
        """Pairs what is left with what a loop of a run computes in parts, by consecutive calls of a line."""
        wholes: dict[int, list[_Class]] = defaultdict(list)  # by the number of elements but zeros
        for found in self._left(theirs):
            wholes[_elements([found[0].values])[3].total()].append(found)
        loops: dict[tuple[Any, ...], list[_Result]] = defaultdict(list)
        for i in mine.own if wholes else ():
            call = mine.call(i)
            for place, values in enumerate(mine.run.values(i)):
                if not _is_constant(values):
                    # A loop in a module, or over modules, such as experts.
                    for module in {call.module, re.sub(r"\b\d+\b", "*", call.module)}:
                        loops[call.op, call.line, call.phase, module, place].append(_Result(i, place, values))
        for loop in loops.values():
            counts = (_elements([one.values])[3].total() for one in loop)
            sums = list(itertools.accumulate(counts, initial=0))
            ends = {size: end for end, size in enumerate(sums)}
            for (start, size), (count, candidates) in itertools.product(enumerate(sums), wholes.items()):
                parts = loop[start : ends.get(size + count, start)]
                if len(parts) > 1:
                    whole = next(self.wholes(candidates, [one.values for one in parts]), ())
                    self._add(number, parts, whole, in_order=False)

    def wholes(self, by_norm: Sequence[_Class], parts: Sequence[Values]) -> Iterator[_Class]:
        """Those that have the elements of several tensors but for zeros, by norm, extremes and exponents."""
        norm, least, largest, exponents = _elements(parts)
        start = bisect.bisect_left(by_norm, norm * (1 - self.tolerance), key=_norm)
        for found in by_norm[start : start + _MOST_PLACES]:
            norm_of_whole, smallest, amax, off = _elements([found[0].values])
            if norm_of_whole > norm * (1 + self.tolerance):
                return
            off.subtract(exponents)
            is_near = max(abs(largest - amax), abs(least - smallest)) <= self.tolerance * amax
            if is_near and sum(map(abs, off.values())) <= 2 * self.tolerance * found[0].values.count + 2:
                yield found

    def error_between(self, one: int, other: int) -> float | None:
        """The smallest error between what two calls computed, or parts of it; None if no two can be compared."""
        known = [
            [values for k in (i, *side.views.get(i, ())) for values in side.run.values(k) if values.l2]
            for side, i in zip(self.sides, (one, other), strict=True)
        ]
        errors = [relative_error(mine, theirs) for mine in known[0] for theirs in known[1] if mine.count >= _FEWEST]
        return min((error for error in errors if error is not None), default=None)


def _shapes(side: _Side, results: Sequence[_Result]) -> set[tuple[int, ...]]:
    """The shapes in which a class was computed, or moved, without dimensions of one element."""
    infos = (
        side.call(one.call).outputs[one.place] if one.call >= 0 else side.run.sources[-1 - one.call].info
        for one in [one for one in results if one.call not in side.moves] or results
    )
    return {tuple(size for size in info.shape if size > 1) for info in infos}


# --- weights


class _Lines(NamedTuple):
    """The rows or columns of a weight, with a number for each. A vector is a row, and each of its elements is one."""

    name: str
    is_columns: bool
    length: int  # of a row or column
    numbers: torch.Tensor


class _Segment(NamedTuple):
    start: int  # in the lines of A
    lines: _Lines  # of B
    at: int  # in these
    size: int


def _weights_of(side: _Side) -> list[Source]:
    """The parameters and buffers of a run, in the order in which they are read."""
    return [one for one in side.run.sources if side.run.named.get(one.name) is one and one.values.count]


def _lines_of(weight: Source) -> list[_Lines]:
    rows, columns = map(unpack_projections, weight.projections)
    length = weight.values.count // max(len(rows), 1)
    both = (False, length, rows), (length > 1, weight.values.count // max(len(columns), 1), columns)
    return [_Lines(weight.name, *one) for one in both if len(one[2])]


def _pair_weights(ones: Sequence[Source], others: Sequence[Source]) -> dict[str, tuple[str | None, list[str]]]:
    """For each parameter and buffer of A, what has its values in B, as in `Match.weights`, and the names in that."""
    pools: dict[int, list[_Lines]] = defaultdict(list)  # by length
    for lines in itertools.chain(*map(_lines_of, others)):
        pools[lines.length].append(lines)
    found: dict[str, tuple[str | None, list[str]]] = {}
    for weight in ones:
        # The rounding of the coarsest dtype, if their dtypes differ.
        dtypes = {one.info.dtype for one in (weight, *others)}
        rounds = 2 * max(torch.finfo(dtype).eps for dtype in dtypes) if len(dtypes) > 1 else _WEIGHT_ROUNDS
        errors = ((relative_error(weight.values, one.values), one.name) for one in others)
        error, name = min(((error, name) for error, name in errors if error is not None), default=(math.inf, ""))
        if error <= rounds and not _is_constant(weight.values):
            found[weight.name] = name, [name]
        else:
            found[weight.name] = _in_parts(weight, pools, rounds)
    return found


def _in_parts(weight: Source, pools: Mapping[int, Sequence[_Lines]], rounds: float) -> tuple[str | None, list[str]]:
    """What has the rows or the columns of a weight."""
    for mine in (one for one in _lines_of(weight) if one.length in pools and not _is_constant(weight.values)):
        pool = sorted(pools[mine.length], key=lambda one: one.is_columns != mine.is_columns)
        tolerance = rounds * float(mine.numbers.square().mean().sqrt())
        segments = _cover(mine.numbers, pool, tolerance, 2 if rounds <= _WEIGHT_ROUNDS else _LEAST_ROUNDED)
        if segments:
            return _spelled(mine, segments), sorted({one.lines.name for one in segments})
        for other in pool:  # as rotary embeddings of another convention need them
            if not mine.is_columns and len(mine.numbers) == len(other.numbers) > 1:
                apart = mine.numbers.sort().values - other.numbers.sort().values
                if apart.abs().max() <= tolerance:
                    return f"{other.name}[rows in another order]", [other.name]
    return None, []


def _cover(lines: torch.Tensor, pool: Sequence[_Lines], tolerance: float, least: int) -> list[_Segment]:
    """Segments of at least so many lines that have all lines of a weight, in its order; none if a line is in none."""
    known = torch.cat([one.numbers for one in pool])
    starts = [0, *itertools.accumulate(len(one.numbers) for one in pool)]
    found: list[_Segment] = []
    start = 0
    while start < len(lines):
        shortest = lines[start : start + least]
        fits = ((known.unfold(0, len(shortest), 1) - shortest).abs() <= tolerance).all(1)
        best = _Segment(start, pool[0], 0, 0)
        for place in fits.nonzero().flatten()[:_MOST_PLACES].tolist():
            owner = bisect.bisect(starts, place) - 1
            at = place - starts[owner]
            theirs = pool[owner].numbers[at : at + len(lines) - start]
            fitting = (lines[start : start + len(theirs)] - theirs).abs() <= tolerance
            size = int(fitting.long().cumprod(0).sum())
            best = max(best, _Segment(start, pool[owner], at, size), key=lambda one: one.size)
        if best.size < len(shortest) or (best.size == 1 and len(known) > _MOST_SINGLE):
            return []
        found.append(best)
        start += best.size
    return found


def _spelled(mine: _Lines, segments: Sequence[_Segment]) -> str:
    texts = {}
    for lines in dict.fromkeys(one.lines for one in segments):
        ranges = [one for one in segments if one.lines is lines]
        text = lines.name + ".T" * (lines.is_columns != mine.is_columns)
        if len(ranges) > 1 or ranges[0].size < len(lines.numbers):
            text += "[" + ":, " * mine.is_columns + ", ".join(f"{one.at}:{one.at + one.size}" for one in ranges) + "]"
        texts[", ".join(f"{one.start}:{one.start + one.size}" for one in ranges)] = text
    at_all = len(texts) == 1
    return ", ".join(text if at_all else f"[{at}] = {text}" for at, text in texts.items())


# --- the answer


@dataclass(frozen=True, repr=False)
class Match(Report):
    """Two implementations of one model, A (the reference) and B (the port), paired by the values of their results.

    Attributes:
        outputs_match: Whether all outputs of A have a counterpart in B: results that no later call computes with,
            losses, and gradients if both have them.
        matched: The share of A's results that have a counterpart, 0 to 1.
        first: Where A goes on without a counterpart in B: a `NearMiss`; None if the outputs match.
        modules: The modules of B that compute what the modules of A compute, by path.
        weights: For each parameter and buffer that A reads, what has its values in B: "name", "name[0:64]" (rows),
            "name[:, 0:64]" (columns), "name.T" (transposed), "[0:64] = q, [64:128] = k", "name[rows in another order]";
            None if nothing has, or if it is a constant.
        near: The first difference, if both calls can be compared, and where errors begin to exceed rounding.
        tolerance: The relative L2 error up to which results are a pair.
        answer: What the comparison found, as a sentence.
        evidence: What else was compared, as sentences.
        compared: The number of results of A, and of B.
        reordered: The number of pairs whose elements are in another order.
        alone: The parameters and buffers of B that have no counterpart in A.
        sides: The calls of both runs with lines between pairs, for the page.

    Example:
        >>> import torch, torch_promote as tp
        >>> x = torch.arange(32.0)
        >>> def run(function):
        ...     with tp.trace(values=True) as report:
        ...         function(x.sin()).cos()
        ...     return report
        >>> found = run(torch.square).diff(run(lambda y: y * y), match=True)
        >>> found.outputs_match, found.matched
        (True, 1.0)
    """

    NOUN: ClassVar[str] = "match"
    FORMAT: ClassVar[str] = "torch_promote match"
    NOT_LOADED: ClassVar[str] = "a match cannot be read from {path}. Compare the recordings: tp.diff(a, b, match=True)."

    outputs_match: bool
    matched: float
    first: NearMiss | None = None
    modules: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str | None] = field(default_factory=dict)
    near: list[NearMiss] = field(default_factory=list)
    tolerance: float = 0.0
    answer: str = ""
    evidence: list[str] = field(default_factory=list)
    compared: tuple[int, int] = (0, 0)
    reordered: int = 0
    alone: list[str] = field(default_factory=list)
    sides: Sides | None = None

    def __bool__(self) -> bool:
        """Whether the implementations differ, as the truth of a `Difference`."""
        return not self.outputs_match

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-compatible values: "outputs_match", "matched", "first", "modules", "weights", "near"."""
        names = "outputs_match", "matched", "first", "modules", "weights", "near"
        return {name: encode(getattr(self, name)) for name in names}

    def content(self) -> Content:
        """Returns the sentence, the near misses, the maps of modules and weights, and the two programs."""
        good = None if self.outputs_match and self.near else self.outputs_match
        return Content("two implementations", self.answer, list(self._numbers()), list(self._parts()), good)

    def _numbers(self) -> Iterator[ReportFact]:
        yield "outputs", "match" if self.outputs_match else "differ"
        one, other = self.compared
        yield "results with a counterpart", percent(self.matched), f"of {one:,} in A; B has {other:,}"
        yield "tolerance", spell_number(self.tolerance), "relative L2"
        if self.reordered:
            yield "in another order", f"{self.reordered:,}", "pairs, by number, norm, extremes and exponents alone"
        if self.weights:
            paired = sum(one is not None for one in self.weights.values())
            what = "of A were found in B by their values; constants are not"
            yield "weights", f"{paired:,} of {len(self.weights):,}", what

    def _parts(self) -> Iterator[Part]:
        yield Listing("What was compared", self.evidence, most=20)
        rows: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # the first of equal calls, such as those of several steps
        for one in self.near:
            calls = [None if call is None else f"{call.op} in {module_name(call.module)}" for call in (one.a, one.b)]
            lines = [call.line if call else None for call in (one.a, one.b)]
            rows.setdefault((one.text, *calls, *lines), (one.text, *calls, one.relative_l2, *lines))
        columns = "what", Column("A", "name"), Column("B", "name"), Column("relative L2", "number")
        places = Column("line in A", "line"), Column("line in B", "line")
        yield Table("Near misses", (*columns, *places), list(rows.values()), most=10)
        if self.sides is not None:
            yield self.sides
        names = Column("A", "name"), Column("B", "name")
        yield Table("Modules", names, [(module_name(a), module_name(b)) for a, b in self.modules.items()], most=20)
        weights = [(name, other or "(none that is told from others)") for name, other in self.weights.items()]
        weights += [("(none that is told from others)", name) for name in self.alone]
        yield Table("Weights", names, weights, most=20)


def match_recordings(before: Recording, after: Recording, tolerance: float | None = None) -> Match:
    """Pairs the results of two recordings with values, or raises OptionError if they cannot be paired."""
    if tolerance is not None and (not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf):
        raise OptionError(f"`tolerance` is a finite number of 0 or more, got {shown(tolerance)}.")
    for name, recording in (("A", before), ("B", after)):
        if not recording.values:
            raise OptionError(f"{name} has no values, by which results are paired. Trace with `values=True`.")
        if recording.dropped:
            raise OptionError(
                f"{name} lacks {recording.dropped:,} calls beyond `max_calls`, without which results have no "
                "counterpart. Raise `max_calls`, or trace fewer steps."
            )
    one, other = _Side(before), _Side(after)
    dtype = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    growth = math.sqrt(max(_MOST_CALLS, len(one.forward), len(other.forward)) / _MOST_CALLS)
    known = min(_TOLERANCES[dtype] * growth, _LARGEST_TOLERANCE)
    pairing = _Pairing(one, other, known if tolerance is None else float(tolerance))
    return _Answer(pairing).match()


class _Answer:
    def __init__(self, pairing: _Pairing) -> None:
        self.pairing = pairing
        self.one, self.other = self.sides = pairing.sides
        weights = [_weights_of(side) for side in self.sides]
        self.evidence: list[str] = []
        if weights[0] and not weights[1]:
            self.evidence.append("Weights were not compared: B reads none that is a module's.")
        self.weights = _pair_weights(*weights) if weights[1] else {}
        named = set(itertools.chain(*(names for _, names in self.weights.values())))
        self.alone = [one.name for one in weights[1] if one.name not in named]
        self.wrong_ends: list[str] = []  # outputs, losses and gradients, as sentences
        self.lacking: list[int] = []  # the outputs of A without a counterpart
        # Of the first difference: whether no call is nearer to either, the ops before it without a counterpart, and the
        # sentences that follow it.
        self.is_near, self.skipped, self.remarks = True, list[str](), list[str]()
        self.jumps: dict[int, NearMiss] = {}  # by calls of A: where errors begin to exceed rounding
        self.hidden: dict[int, NearMiss] = {}  # the same op on the same inputs, with another result
        self._find_misses()

    def match(self) -> Match:
        self._compare_ends()
        first = self._first() if self.wrong_ends else None
        # The first difference, even one that the tolerance hides, and where errors begin to exceed rounding.
        hidden = (
            [one for i, one in self.hidden.items() if i < min(self.jumps, default=-1)] if first is None else [first]
        )
        near = [one for one in hidden[:1] if one.relative_l2 is not None]
        near += [one for one in [*self.jumps.values()][:_REACH] if one != first]
        counted = [
            [one for i in side.own for one in side.run.values(i) if not _is_constant(one)] for side in self.sides
        ]
        paired = sum(one.digest in self.one.paired for one in counted[0])
        share = f"{paired:,} of {len(counted[0]):,} results of the reference have a counterpart."
        return Match(
            outputs_match=not self.wrong_ends,
            matched=paired / len(counted[0]) if counted[0] else 0.0,
            first=first,
            modules=self._modules(),
            weights={name: text for name, (text, _) in self.weights.items()},
            near=near,
            tolerance=self.pairing.tolerance,
            answer=f"{self._sentence(first, near)} {share}",
            evidence=[*reversed(self.wrong_ends), *self.evidence],  # the first outputs are inner ones in many programs
            compared=(len(counted[0]), len(counted[1])),
            reordered=sum(not pair.is_same_order for pair in self.one.pairs.values()),
            alone=self.alone,
            sides=self._sides(first),
        )

    # --- outputs, losses and gradients

    def _compare_ends(self) -> None:
        outputs, lacking = self.one.outputs, list[list[_Result]]()
        for number, (side, other) in enumerate((self.sides, self.sides[::-1])):
            # Other ops may compute the same constant, such as an accuracy or a token.
            same = {(values.digest, values.count) for end in other.outputs for values in other.run.values(end.call)}
            left = [end for end in side.outputs if (end.values.digest, end.values.count) not in same]
            lacking.append([end for end in left if not self._counterparts(number, end)])
        sizes, unknown = {one.values.count for one in lacking[1]}, list[str]()
        for one in lacking[0]:
            name = self.one.call(one.call).outputs[one.place].name
            if name.isdigit() or one.values.count in sizes:
                self.lacking.append(one.call)
                what = "output" if name.isdigit() else name
                self.wrong_ends.append(f"The {what} of {_place(self.one.call(one.call))} has no counterpart.")
            else:  # the name of an argument that the call has written
                unknown.append(name)
        if unknown:
            what = f"{len(unknown):,} results of A ({', '.join(dict.fromkeys(unknown))})"
            self.evidence.append(f"Not compared: {what}, as B has none of their size.")
        # B may go on from what is A's last output.
        known, last = {one.values.digest for one in self.other.outputs}, self.other.outputs[-1:]
        counterparts = self._counterparts(0, outputs[-1]) if outputs else set[str]()
        if counterparts and known.isdisjoint(counterparts) and last and last[0] in lacking[1]:
            self.wrong_ends.append(f"The output of {_place(self.other.call(last[0].call))} in B has no counterpart.")
        pairs = [self.one.pairs.get((one.call, one.place)) for one in outputs]
        errors = [pair.error for pair in pairs if pair is not None and pair.is_same_order]
        if errors:
            share = f"{len(errors):,} of {len(pairs):,}" if len(errors) < len(pairs) else "The"
            self.evidence.append(f"{share} outputs of A differ by at most {spell_number(max(errors))} (relative L2).")
        ends = self.one.run.recording.ends, self.other.run.recording.ends
        for step, (mine, theirs) in enumerate(zip(*ends, strict=False)):
            allowed = self.pairing.tolerance * (step + 1)  # an optimizer adds to the error of each step
            for place, losses in enumerate(zip(mine.losses, theirs.losses, strict=False)):
                self._tell(f"Loss {place} of step {step}", relative_error(*losses), allowed)
            if len(mine.losses) != len(theirs.losses):
                self.wrong_ends.append(f"Step {step} has {len(mine.losses)} losses in A, {len(theirs.losses)} in B.")
            self._compare_gradients(step, mine.gradients, theirs.gradients, 4 * allowed)
        if len(ends[0]) != len(ends[1]):
            self.evidence.append(f"A has {len(ends[0]):,} steps, B {len(ends[1]):,}: the first ones were compared.")
        if not self.one.outputs and not any(end.losses for end in ends[0]):
            self.wrong_ends.append("A has no output: no result that depends on parameters or inputs is left unread.")

    def _counterparts(self, number: int, end: _Result) -> set[str]:
        """The digests of what the other run has for an output, or for views of it; an input is no counterpart."""
        side = self.sides[number]
        views = side.views[end.call] if side.call(end.call).outputs[end.place].name.isdigit() else ()
        pairs = [pair for k in views for pair in side.pairs_of(k)]
        pairs += [side.pairs[key] for key in [(end.call, end.place)] if key in side.pairs]
        return {pair.ends[1 - number].values.digest for pair in pairs if min(one.call for one in pair.ends) >= 0}

    def _tell(self, what: str, error: float | None, allowed: float) -> None:
        if error is not None and error > allowed:
            self.wrong_ends.append(f"{what} differs by {spell_number(error)} (relative L2).")
        elif error is not None:
            self.evidence.append(f"{what} differs by {spell_number(error)} (relative L2): within the tolerance.")

    def _compare_gradients(
        self, step: int, mine: Mapping[str, Values], theirs: Mapping[str, Values], allowed: float
    ) -> None:
        """Compares the gradients of weights that are whole in both."""
        least = _SMALL_GRADIENT * max((one.l2 or 0.0 for one in (*mine.values(), *theirs.values())), default=0.0)
        errors: list[tuple[float, str]] = []
        for name, (other, _) in self.weights.items():
            if name in mine and other is not None and other in theirs:
                error = relative_error(mine[name], theirs[other])
                size = max(mine[name].l2 or 0.0, theirs[other].l2 or 0.0)
                if error is not None and size:  # a gradient may consist of rounding alone
                    errors.append((error * min(1.0, size / least), name))
        if errors:
            error, name = max(errors)
            self._tell(f"The gradient of {name} in step {step}, the worst of {len(errors):,},", error, allowed)

    # --- where they part

    def _miss(self, i: int | None, j: int | None, error: float | None, text: str) -> NearMiss:
        one, other = (None if k is None else side.call(k) for side, k in zip(self.sides, (i, j), strict=True))
        return NearMiss(one, other, error, text)

    def _first(self) -> NearMiss | None:
        """Where A goes on without a counterpart, and the nearest that B computes there."""
        wrong = [side.wrong("forward", "recompute") for side in self.sides]
        if not any(wrong) and self.jumps:
            return next(iter(self.jumps.values()))
        if not any(wrong):
            wrong = [side.wrong("backward") for side in self.sides]
        if not any(wrong):
            return self._miss(self.lacking[0], None, None, "has no counterpart") if self.lacking else None
        first, partner = (found[0] if found else None for found in wrong)
        for i, hidden in self.hidden.items():
            if first is None or i < first:
                return hidden
        known: list[tuple[float, float, int, int]] = []
        for (rank, i), (other_rank, j) in itertools.product(*(enumerate(calls[:_REACH]) for calls in wrong)):
            off = self.pairing.error_between(i, j)
            is_joined = (rank and self.one.joins(i)) or (other_rank and self.other.joins(j))
            if off is not None and off < (_MOST_OF_JOINED if is_joined else _MOST_OF_NEAR):
                score = rank + other_rank + _CALLS_OF_A_DECADE * math.log10(max(off, _SMALLEST))
                known.append((score, off, i, j))
        known.sort()
        # Those of which no call is nearer to another.
        nearest = [one for one in known if one == next(two for two in known if one[2] == two[2] or one[3] == two[3])]
        found = [one for one in nearest if first == one[2] or partner == one[3]]
        error = None if first is None or partner is None else self.pairing.error_between(first, partner)
        _, error, first, partner = found[0] if found else (0.0, error, first, partner)
        calls = [[] if i is None else own[: own.index(i) + 1] for i, own in zip((first, partner), wrong, strict=True)]
        text = self._see_inputs(calls[0], [] if found else calls[1])  # what is near has no other order
        if first is not None and partner is not None and not found:
            self._see_passed(first, partner)
        self.is_near = bool(found)
        self.skipped = [self.one.call(k).op.removeprefix("aten::") for k in calls[0][:-1]]
        return self._miss(first, partner, error, text)

    def _see_inputs(self, *calls: Sequence[int]) -> str:
        """Says whether calls of A read what B has in the same order; remarks what B has in another."""
        one, other = self.sides
        mine, theirs = (side.read_from_others(known) for side, known in zip(self.sides, calls, strict=True))
        lacking = {key: i for key, i in mine.items() if not (key in other.run.contents or one.in_order(key))}
        for (digest, i), (known, j) in itertools.product(lacking.items(), theirs.items()):
            # A transpose of what B reads, a view of the same result, is no other order.
            is_view = not {i, *one.views[i]}.isdisjoint(k for k, _ in other.in_order(known))
            ends = one.classes.get(digest, [])[:1] + other.classes.get(known, [])[:1]
            is_told = len(ends) > 1 and min(i, j) >= 0 and ends[0].values.count >= _FEWEST and not is_view
            if is_told and any(self.pairing.wholes([ends[1:]], [ends[0].values])):
                what = f"B the same numbers in another order, from {_place(other.call(j))}"
                self.remarks.append(f"A reads the result of {_place(one.call(i))}, {what}.")
                return f"{_NO_COUNTERPART}, input reordered"
        pairs = {digest: [pair.is_same_order for pair in one.pairs_of(i)] for digest, i in lacking.items()}
        parts = [i for digest, i in lacking.items() if i >= 0 and digest not in one.paired and not all(pairs[digest])]
        if parts and len(calls[0]) == 1:
            what = "but not the part and order of them that is read here"
            self.remarks.append(f"B has the elements of {_place(one.call(parts[0]))}, {what}.")
        return _NO_COUNTERPART + ", on right inputs" * all(map(any, pairs.values()))

    def _see_passed(self, i: int, j: int) -> None:
        """Remarks that B's call reads what A's first reads, where in A the same op reads that call's result."""
        one, other = self.sides
        ends = [{k for k, _ in other.in_order(digest)} & one.behind(i) for digest in other.read_from_others([j])]
        alike = [k for k in one.computing if i in one.behind(k) and one.call(k).op == other.call(j).op]
        if ends and all(ends) and alike and not self.remarks:
            read, reader, op = one.call(min(ends[0])), one.call(alike[0]), one.call(i).op.removeprefix("aten::")
            self.remarks.append(f"It reads the result of {_place(read)}, where {_place(reader)} reads that of {op}.")

    def _find_misses(self) -> None:
        """Finds where errors begin, and where one op has other results on the same inputs, which readers may hide."""
        one, other = self.sides
        unpaired: dict[str, list[tuple[int, set[int]]]] = defaultdict(list)  # of B, with what they read, by op
        for j in other.computing:
            if not other.pairs_of(j):
                unpaired[other.call(j).op].append((j, other.behind(j) - other.moves))
        for i in (i for i in one.computing if i in one.depends and i not in one.moves):
            behind, pairs = one.behind(i), one.pairs_of(i)
            inputs = [pair for writer in behind for pair in one.pairs_of(writer)]
            largest = _GROWS * max((pair.error for pair in inputs), default=0.0)
            for j, error in ((pair.ends[1].call, pair.error) for pair in pairs if pair.is_same_order):
                if j >= 0 and error > max(largest, one.run.rounding(i), other.run.rounding(j)):
                    self.jumps.setdefault(i, self._miss(i, j, error, _BEGIN_TO_EXCEED))
            known = {pair.ends[1].call for pair in inputs}
            for j, read in unpaired[one.call(i).op] if not pairs and (known or not behind) else ():
                off = self.pairing.error_between(i, j) if known.issuperset(read) else None
                if off is not None and self.pairing.tolerance < off < _MOST_OF_NEAR:
                    self.hidden.setdefault(
                        i, self._miss(i, j, off, "the same op on the same inputs, with another result")
                    )

    # --- maps

    def _modules(self) -> dict[str, str]:
        """For each module of A, that of B with which it has the largest share of pairs in common."""
        ends: list[tuple[str, str]] = []
        for pair in (*self.one.pairs.values(), *self.other.pairs.values()):
            i, j = (end.call for end in pair.ends)
            if j >= 0 and i not in self.one.moves and self.one.call(i).own:
                ends.append((self.one.call(i).module, self.other.call(j).module))
        for name, (_, others) in self.weights.items():
            ends += [(name.rpartition(".")[0], other.rpartition(".")[0]) for other in others]
        sizes: Counter[str] = Counter()
        common: dict[str, Counter[str]] = defaultdict(Counter)
        for one, other in ends:
            sizes.update(ancestors(other))
            for path in ancestors(one):
                common[path].update(ancestors(other))
        return {
            path: max(found, key=lambda other: (found[other] ** 2 / sizes[other], len(other)))
            for path, found in common.items()
            if path
        }

    def _sentence(self, first: NearMiss | None, near: Sequence[NearMiss]) -> str:
        within = f"within {spell_number(self.pairing.tolerance)} (relative L2)"
        if first is not None:
            one, good = self.one, self.one.depends.difference(self.one.moves)
            at = next((i for i in one.computing if one.call(i) is first.a), -1)
            right = [i for i in one.computing if i < at and i in good and one.pairs_of(i)]
            until = [f"{_COMPUTES} up to {_place(one.call(i))}." for i in right[-1:]]
            steps = one.run.steps[at] if at >= 0 else 0
            after = [f"This is after {steps:,} optimizer step{'s' * (steps > 1)}."] if steps else []
            ops = ", ".join(dict.fromkeys(self.skipped))
            before = [f"Before it, A calls {ops} without a counterpart."] if ops else []
            return " ".join([*until, self._described(first), *self.remarks, *after, *before])
        if self.wrong_ends:
            return f"The outputs differ: {self.wrong_ends[-1]}"
        if near:
            return f"All outputs match {within}, but not to rounding. {self._described(near[0])}"
        coarse = max(self.one.dtype, self.other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        hides = f" The rounding of {dtype_name(coarse)} may hide a difference that float32 shows."
        more = hides if coarse in LOWER_DTYPES else ""
        return f"{_COMPUTES}: all outputs match {within}.{more}"

    def _described(self, miss: NearMiss) -> str:
        one, other = ("" if call is None else _place(call) for call in (miss.a, miss.b))
        if not one:
            return f"{other} in B has no counterpart in A."
        if miss.text == _BEGIN_TO_EXCEED:
            return f"In {one} (B: {other}), {miss.text}: {spell_number(miss.relative_l2)}."
        if not other:
            return f"{one} has no counterpart."
        what = "nearest" if self.is_near else "the first call of B without one"
        off = "" if miss.relative_l2 is None else f", off by {spell_number(miss.relative_l2)} (relative L2)"
        return f"{one} has no counterpart; {what}: {other}{off}."

    # --- the page

    def _sides(self, first: NearMiss | None) -> Sides:
        """The calls of both programs that compute, around the first difference if there are many."""
        rows: list[list[tuple[str, str, str]]] = []
        places: list[dict[int, int]] = []  # of calls in the rows
        wrong: list[list[int]] = []
        parting: list[int | None] = []
        for side, call in zip(self.sides, (first and first.a, first and first.b), strict=True):
            own = [k for k in side.computing if side.run.steps[k] == side.run.steps[side.computing[0]]]
            at = next((place for place, k in enumerate(own) if side.call(k) is call), None)
            start = max(0, min((at or 0) - _MOST_SHOWN // 2, len(own) - _MOST_SHOWN))
            places.append({k: place for place, k in enumerate(own[start : start + _MOST_SHOWN])})
            parting.append(None if at is None else at - start)
            row = map(side.call, places[-1])
            rows.append([(one.op.removeprefix("aten::"), module_name(one.module), short_line(one.line)) for one in row])
            wrong.append([place for k, place in places[-1].items() if k not in side.right and k in side.depends])
        links: dict[tuple[int | None, int | None], str] = {}
        for pair in (*self.one.pairs.values(), *self.other.pairs.values()):
            ends = [
                next((known[i] for i in (end.call, *side.writers.get(end.call, ())) if i in known), None)
                for side, end, known in zip(self.sides, pair.ends, places, strict=True)  # views are not shown
            ]
            links.setdefault((ends[0], ends[1]), "same" if pair.is_same_order else "reordered")
        links[parting[0], parting[1]] = "wrong"
        note = (
            "Calls of the first step in their order. A line joins results with equal values; dashed: equal but for the "
            "order of the elements; red: where the programs part. A call in red has no counterpart, nor has what is "
            "computed from it."
        )
        found = sorted((i, j, kind) for (i, j), kind in links.items() if i is not None and j is not None)
        return Sides("The two programs", ("A", "B"), (rows[0], rows[1]), found, (wrong[0], wrong[1]), note)


def _place(call: Call) -> str:
    """Where a call is, in a sentence."""
    return where_of([call]).removeprefix("aten::")
