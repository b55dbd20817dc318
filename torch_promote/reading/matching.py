"""`Match`: two implementations of one model, paired by the values of what they compute.

NOTE [ How results are paired ]
Results with equal bits form a class. Classes of both runs are a pair if the error between them, which their sketches
tell, is within a tolerance that follows from the dtypes; of several, the nearest. The members of a class are paired in
the order of the runs. What is left is compared by what does not depend on the order of the elements: their number,
norm, extremes and exponents, if the shapes differ; zeros count as padding. So is one result with those of consecutive
calls of one line, as in a loop. Constants, of which there are equal ones by chance, are paired only if calls of one op
made them from inputs that are a pair.

NOTE [ Where an implementation goes wrong ]
A call is right if one of its results, or of the views of them, has a counterpart, or if a call that reads it is right:
a program may compute in other steps what another computes in one. The first call that depends on data and is not right
is where the first program leaves the second. The same from the other side gives the call of the second. Tables that
depend on no data, such as masks and rotary embeddings, are to blame if that call reads them and the other program has
a similar one.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from torch_promote.errors import OptionError
from torch_promote.observe.ops import facts_of
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
    module_name,
    percent,
    short_line,
    spell_number,
)
from torch_promote.report.base import Fact as ReportFact

if TYPE_CHECKING:
    from torch_promote.observe.call import Call
    from torch_promote.recording.recording import Recording, Source
    from torch_promote.recording.values import Values

#: The relative L2 error up to which results are a pair, by the dtype that most rounding is in, for a program of at most
#: so many calls that read from each other. It grows with the root of their number.
_TOLERANCES = {torch.float64: 1e-11, torch.float32: 1.2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_DEPTH, _LARGEST_TOLERANCE = 100, 0.1
#: Ops that autocast runs in lower precision.
_PRODUCT = re.compile("linear|mm|matmul|conv|attention|einsum|lstm|gru|rnn|dot")
#: The share of calls in a dtype from which it is that of a program, and no island in it.
_SHARE_OF_A_DTYPE = 1 / 2
#: The error from which two results are not nearly the same.
_MOST_OF_NEAR = 0.5
#: A result that is nearer by a factor of ten may be so many calls later.
_CALLS_OF_A_DECADE, _SMALLEST = 8.0, 1e-12
#: The calls behind the first wrong one among which the nearest results are looked for.
_REACH = 12
#: A pair whose error is so many times that of its inputs, and of rounding, is where errors begin to grow.
_GROWS, _ROUNDS = 20.0, 1.0
#: The fewest elements that are told by their norm, extremes and exponents.
_FEWEST = 16
_BEGIN_TO_EXCEED, _NO_COUNTERPART = "errors begin to exceed rounding", "no counterpart, on right inputs"
#: Ops that move elements, besides views and conversions.
_MOVING = re.compile(
    "aten::(cat|concat|concatenate|hstack|vstack|stack|repeat|repeat_interleave|tile|pad|constant_pad_nd|roll|flip|"
    "index|index_select|gather|clone|contiguous|reshape|copy_)$"
)
_CHUNK = 4_000_000  # entries of a table of distances


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
        error = self.relative_l2
        return {**sides, "relative_l2": error if error is None or math.isfinite(error) else str(error)}


class _Result(NamedTuple):
    call: int  # its number, or -1 - i for a source
    place: int  # the index of the result
    values: Values
    is_moved: bool  # whether the call only moves elements


class _Pair(NamedTuple):
    one: _Result
    other: _Result
    error: float
    is_same_order: bool  # False if the elements are in another order


class _Side:
    """A run, prepared: its results by digest, and which calls read which."""

    def __init__(self, recording: Recording) -> None:
        self.run = run = Run(recording)
        known = [i for i in run.own if i not in run.initial and run.calls[i].phase != "optimizer"]
        self.own: list[int] = known
        # Those that returned their argument, as a dropout does outside of training.
        returns = {i for i in known if run.reads(i) and run.results(i) == (run.reads(i)[0].digest,)}
        self.moves: frozenset[int] = frozenset(i for i in range(len(run.calls)) if i in returns or _moves(run, i))
        self.classes: dict[str, list[_Result]] = defaultdict(list)
        for i, call in enumerate(run.calls):
            if i not in run.undefined and i not in run.initial and call.phase != "optimizer":
                for place, values in enumerate(run.values(i)):
                    self._add(_Result(i, place, values, i in self.moves))
        for number, source in enumerate(run.sources):
            if source.kind not in ("state", "gradient"):
                self._add(_Result(-1 - number, 0, source.values, True))
        self.writers: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.views: dict[int, list[int]] = defaultdict(list)
        self.depends: set[int] = set()  # the calls that depend on parameters, floating inputs or random numbers
        written_by = {writer for i in known for read in run.reads(i) for writer in read.written_by}
        for i in known:
            writers = list(dict.fromkeys(writer for read in run.reads(i) for writer in read.written_by))
            self.writers[i] = writers
            if i in recording.draws or any(self._is_data(writer) for writer in writers):
                self.depends.add(i)
            is_view = i not in written_by and (i in returns or run.is_transparent(i))
            for writer in writers:
                (self.views if is_view else self.readers)[writer].append(i)
        self.depends = self.depends or set(known)
        self.computing: list[int] = [i for i in known if run.computes(i) and i not in returns]

    def _add(self, result: _Result) -> None:
        if result.values.digest:
            found = self.classes[result.values.digest]
            # Complex numbers have the bits of their real view, which has counts.
            is_real_view = bool(found) and result.values.count > found[0].values.count
            found.insert(0 if is_real_view else len(found), result)

    def _is_data(self, writer: int) -> bool:
        if writer >= 0:
            return writer in self.depends
        source = self.run.sources[-1 - writer]
        return source.kind == "parameter" or (source.kind == "input" and bool(source.values.count))

    def call(self, number: int) -> Call:
        return self.run.calls[number]

    def module(self, number: int) -> str | None:
        return self.run.calls[number].module if number >= 0 else None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The coarsest floating dtype in which a good part of the products of the forward are computed."""
        calls = [self.call(i) for i in self.computing if i in self.depends and i not in self.moves]
        forward = [call for call in calls if call.phase == "forward"]
        products = [call for call in forward if _PRODUCT.search(call.op)]
        dtypes = (info.dtype for call in products or forward for info in call.outputs)
        found = Counter(dtype for dtype in dtypes if dtype in _TOLERANCES)
        known = [dtype for dtype, number in found.items() if number > _SHARE_OF_A_DTYPE * found.total()]
        return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    @cached_property
    def depth(self) -> int:
        """The length of the longest chain of calls that read from each other and compute."""
        found: dict[int, int] = {}
        for i in self.own:
            before = max((found.get(writer, 0) for writer in self.writers[i]), default=0)
            found[i] = before + (i not in self.moves)
        return max(found.values(), default=0)

    @cached_property
    def outputs(self) -> list[int]:
        """The calls of the forward whose results no later call computes with."""
        return [
            i
            for i in self.computing
            if self.call(i).phase == "forward" and i in self.depends and not self.readers.get(i) and self.run.values(i)
        ]


def _moves(run: Run, i: int) -> bool:
    call = run.calls[i]
    return run.is_transparent(i) or _MOVING.match(call.op) is not None or facts_of(call.name).is_view


def _is_constant(values: Values) -> bool:
    """Whether equal values elsewhere say nothing: nothing but zeros and one round number, or no floating numbers."""
    if not values.l2:
        return True
    if values.amax is None:  # complex numbers
        return False
    return values.amax == values.min_nonzero and (values.count > 1 or float(values.amax * 1024).is_integer())


def _nonzeros(values: Values) -> int:
    return round(values.count * (1.0 - values.zeros))


def _exponents(values: Values) -> dict[Any, float]:
    return dict(values.exponents) | {"inf": values.infs * values.count, "nan": values.nans * values.count}


class _Pairing:
    """The pairs of results of two runs; see NOTE [ How results are paired ]."""

    def __init__(self, one: _Side, other: _Side, tolerance: float) -> None:
        self.one, self.other, self.tolerance = one, other, tolerance
        self._sides = one, other
        self.pairs: list[_Pair] = []
        self.of: tuple[dict[tuple[int, int], _Pair], dict[tuple[int, int], _Pair]] = {}, {}
        self._keys = [
            [key for key, found in side.classes.items() if not _is_constant(found[0].values)] for side in (one, other)
        ]
        self._tables = [self._table(side, keys) for side, keys in zip((one, other), self._keys, strict=True)]
        self._by_sketch()
        self._by_facts()
        self._by_parts()
        self._constants()
        self.pairs.sort(key=lambda pair: (pair.one.call < 0, abs(pair.one.call), pair.one.place))

    @staticmethod
    def _table(side: _Side, keys: Sequence[Any]) -> torch.Tensor:
        """The sketches of classes, as float64 of shape (classes, 16)."""
        rows = [unpack_sketch(side.classes[key][0].values.sketch) or [0.0] * 16 for key in keys]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 16)

    def _add(self, side: int, i: int, j: int, error: float, is_same_order: bool) -> None:
        """Pairs the members of a class of one side and one of the other, in the order of the runs."""
        classes = self._sides[side].classes[self._keys[side][i]], self._sides[1 - side].classes[self._keys[1 - side][j]]
        # Those that compute first: a view of one program may be a call of the other.
        orders = [sorted(found, key=lambda one: (one.is_moved, one.call < 0, one.call)) for found in classes]
        ones, others = orders if side == 0 else orders[::-1]
        for place, one in enumerate(ones):
            self._add_pair(_Pair(one, others[min(place, len(others) - 1)], error, is_same_order))
        for place, other in enumerate(others):
            pair = _Pair(ones[min(place, len(ones) - 1)], other, error, is_same_order)
            self.of[1].setdefault((other.call, other.place), pair)

    def _add_pair(self, pair: _Pair) -> None:
        if self.of[0].setdefault((pair.one.call, pair.one.place), pair) is pair:
            self.pairs.append(pair)

    def _by_sketch(self) -> None:
        groups: list[dict[int, list[int]]] = [defaultdict(list), defaultdict(list)]
        for side in (0, 1):
            for place in range(len(self._keys[side])):
                groups[side][self._values(side, place).count].append(place)
        for count in groups[0].keys() & groups[1].keys():
            known = {self._keys[1][j]: j for j in groups[1][count]}
            for i in groups[0][count]:
                j = known.get(self._keys[0][i])
                if j is not None:
                    self._add(0, i, j, 0.0, True)
            for side in (0, 1):
                left = [i for i in groups[side][count] if not self._is_paired(side, i)]
                for i, j in self._nearest(side, left, groups[1 - side][count]):
                    error = relative_error(self._values(side, i), self._values(1 - side, j))
                    if error is not None and error <= self.tolerance:
                        self._add(side, i, j, error, True)

    def _values(self, side: int, place: int) -> Values:
        return self._sides[side].classes[self._keys[side][place]][0].values

    def _is_paired(self, side: int, place: int) -> bool:
        first = self._sides[side].classes[self._keys[side][place]][0]
        return (first.call, first.place) in self.of[side]

    def _nearest(self, side: int, mine: Sequence[int], theirs: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields classes, with the nearest of the other run, of the same number of elements."""
        chunk = max(1, _CHUNK // max(len(theirs), 1))
        for start in range(0, len(mine), chunk):
            rows = list(mine[start : start + chunk])
            distances = torch.cdist(self._tables[side][rows], self._tables[1 - side][list(theirs)])
            yield from zip(rows, (theirs[place] for place in distances.argmin(1).tolist()), strict=True)

    def _by_facts(self) -> None:
        """Pairs what is left by what does not depend on the order of the elements."""
        norms = [
            sorted((self._values(side, place).l2 or 0.0, place) for place in range(len(self._keys[side])))
            for side in (0, 1)
        ]
        for side in (0, 1):
            for i in range(len(self._keys[side])):
                values = self._values(side, i)
                if values.count < _FEWEST or len(values.exponents) < 3 or self._is_paired(side, i):
                    continue
                fitting = self._of_norm(norms[1 - side], values.l2 or 0.0)
                j = next((j for j in fitting if self._is_in_another_order(side, i, j)), None)
                if j is not None:
                    self._add(side, i, j, 0.0, False)

    def _of_norm(self, norms: Sequence[tuple[float, int]], norm: float) -> list[int]:
        """Those of classes, sorted by norm, that have a norm."""
        start = bisect.bisect(norms, (norm * (1 - self.tolerance), -1))
        return [j for one, j in norms[start : start + _MOST_PLACES] if one <= norm * (1 + self.tolerance)]

    def _by_parts(self) -> None:
        """Pairs what is left with what a loop of the other run computes in parts, by consecutive calls of a line."""
        for side in (0, 1):
            # Of the other run, with their norms, by the number of elements but zeros.
            wholes: dict[int, list[tuple[float, int]]] = defaultdict(list)
            for j in range(len(self._keys[1 - side])):
                values = self._values(1 - side, j)
                if not self._is_paired(1 - side, j) and len(values.exponents) >= 3:
                    bisect.insort(wholes[_nonzeros(values)], (values.l2 or 0.0, j))
            loops: dict[tuple[Any, ...], list[_Result]] = defaultdict(list)
            run = self._sides[side].run
            for i in self._sides[side].own:
                call = run.calls[i]
                # A loop in a module, or over modules, such as experts.
                modules = dict.fromkeys((call.module, re.sub(r"\b\d+\b", "*", call.module)))
                for place, values in enumerate(run.values(i)):
                    if not _is_constant(values) and _nonzeros(values):
                        for module in modules:
                            loops[call.op, call.line, call.phase, module, place].append(
                                _Result(i, place, values, False)
                            )
            for loop in loops.values() if wholes else ():
                sums = list(itertools.accumulate((_nonzeros(one.values) for one in loop), initial=0))
                squares = list(itertools.accumulate(((one.values.l2 or 0.0) ** 2 for one in loop), initial=0.0))
                ends = {size: end for end, size in enumerate(sums)}
                for start, size in enumerate(sums):
                    for count, norms in wholes.items():
                        end = ends.get(size + count, start)
                        if end - start < 2:
                            continue
                        parts = loop[start:end]
                        for j in self._of_norm(norms, math.sqrt(squares[end] - squares[start])):
                            if self._has_the_elements(self._values(1 - side, j), [one.values for one in parts]):
                                self._add_parts(side, j, parts)
                                break

    def _add_parts(self, side: int, j: int, parts: Sequence[_Result]) -> None:
        for whole in self._sides[1 - side].classes[self._keys[1 - side][j]]:
            for part in parts:
                pair = _Pair(*((part, whole) if side == 0 else (whole, part)), 0.0, False)
                self.pairs.append(pair)
                self.of[side].setdefault((part.call, part.place), pair)
                self.of[1 - side].setdefault((whole.call, whole.place), pair)

    def _has_the_elements(self, whole: Values, parts: Sequence[Values]) -> bool:
        """Whether several tensors have the elements of one but for zeros, by norm, extremes and exponents."""
        size, most = whole.l2 or 0.0, whole.amax or 0.0
        if abs(math.hypot(*(one.l2 or 0.0 for one in parts)) - size) > self.tolerance * size:
            return False
        if abs(max(one.amax or 0.0 for one in parts) - most) > self.tolerance * most:
            return False
        least = min((one.min_nonzero for one in parts if one.min_nonzero), default=0.0)
        if abs(least - (whole.min_nonzero or 0.0)) > self.tolerance * most:
            return False
        apart = Counter(_exponents(whole))
        for one in parts:
            apart.subtract(_exponents(one))
        return sum(map(abs, apart.values())) <= 2 * self.tolerance * whole.count + (0 if self.tolerance < 1e-3 else 2)

    def _is_in_another_order(self, side: int, i: int, j: int) -> bool:
        one, other = self._values(side, i), self._values(1 - side, j)
        if not self._has_the_elements(one, [other]):
            return False
        if not self._shapes(side, i).isdisjoint(self._shapes(1 - side, j)):  # a permutation, and no layout
            return False
        # Of what has a counterpart in its own order, only copies in another order have the same elements.
        mine = self._sides[side].classes[self._keys[side][i]]
        if self._is_paired(1 - side, j) and not any(result.is_moved for result in mine):
            return False
        tables = self._tables[side][i], self._tables[1 - side][j]
        return one.count != other.count or float((tables[0] + tables[1]).norm()) > 0.1 * float(tables[0].norm())

    def _shapes(self, side: int, place: int) -> set[tuple[int, ...]]:
        """The shapes in which a class was computed, or moved, without dimensions of one element."""
        run, members = self._sides[side].run, self._sides[side].classes[self._keys[side][place]]
        infos = (
            run.calls[one.call].outputs[one.place] if one.call >= 0 else run.sources[-1 - one.call].info
            for one in [one for one in members if not one.is_moved] or members
        )
        return {tuple(size for size in info.shape if size > 1) for info in infos}

    def _constants(self) -> None:
        """Pairs constants, and what has no floating numbers, if a call of one op made them from pairs."""
        made = {key: found for key, found in self.other.classes.items() if _is_constant(found[0].values)}
        for key, ones in self.one.classes.items():
            for result in ones if key in made else ():
                fitting = (one for one in made[key][:_MOST_PLACES] if self._is_made_alike(result, one))
                partner = next(fitting, None)
                if partner is not None:
                    self._add_pair(pair := _Pair(result, partner, 0.0, True))
                    self.of[1].setdefault((partner.call, partner.place), pair)

    def _is_made_alike(self, one: _Result, other: _Result) -> bool:
        if one.call < 0 or other.call < 0:
            return one.call < 0 and other.call < 0 and one.values.l2 is None  # such as token ids
        if self.one.call(one.call).op != self.other.call(other.call).op:
            return False
        waiting = [
            found.other.call for writer in self.one.writers.get(one.call, ()) for found in self.pairs_of(0, writer)
        ]
        partners = set[int]()
        while waiting:  # a pair may be of a view, whose memory another call has written
            if (j := waiting.pop()) not in partners:
                partners.add(j)
                waiting += self.other.writers.get(j, ()) if j in self.other.moves else ()
        return not partners.isdisjoint(self.other.writers.get(other.call, ()))

    def pairs_of(self, side: int, call: int) -> list[_Pair]:
        """The pairs of a call's results, or of a source."""
        run = self._sides[side].run
        places = range(len(run.values(call))) if call >= 0 else range(1)
        return [pair for place in places if (pair := self.of[side].get((call, place))) is not None]

    @cached_property
    def right(self) -> tuple[set[int], set[int]]:
        """The calls of both runs that are right; see NOTE [ Where an implementation goes wrong ]."""
        return self._right(0), self._right(1)

    def _right(self, side: int) -> set[int]:
        mine = self._sides[side]
        found: set[int] = set()
        for i in reversed(mine.own):
            known = {values.digest for values in mine.run.values(i) if not _is_constant(values)}
            around = (*mine.readers.get(i, ()), *mine.views.get(i, ()))
            read = known & {read.digest for k in around for read in mine.run.reads(k)}
            # Of several results, such as the states of an LSTM, those that are read count.
            parts = [{digest} for digest in read] or [known or set(mine.run.results(i))]
            if all(self._is_right(side, i, part, found) for part in parts) or (not known and self.pairs_of(side, i)):
                found.add(i)
        return found

    def _is_right(self, side: int, i: int, digests: Iterable[str], right: set[int]) -> bool:
        """Whether what a call computed is right, by all parts that views make of it, or by its readers in `right`."""
        mine = self._sides[side]
        whole, parts = set(digests), []
        for view in mine.views.get(i, ()):
            infos = mine.call(view)
            if infos.outputs and not whole.isdisjoint(read.digest for read in mine.run.reads(view)):
                if math.prod(infos.outputs[0].shape) < math.prod(infos.inputs[0].shape):
                    parts += [values.digest for values in mine.run.values(view)]
                else:
                    whole.update(mine.run.results(view))
        if any(
            (result.call, result.place) in self.of[side] for digest in whole for result in mine.classes.get(digest, ())
        ):
            return True
        for reader in mine.readers.get(i, ()):
            if (
                reader in right
                and not self._is_number(side, reader)
                and not whole.isdisjoint(read.digest for read in mine.run.reads(reader))
            ):
                return True
        parts = [part for part in parts if part not in whole]
        return bool(parts) and all(self._is_right(side, i, [part], right) for part in parts)

    def _is_number(self, side: int, i: int) -> bool:
        """Whether a call returns few numbers, such as a loss, which tell little of what it read."""
        return max((values.count for values in self._sides[side].run.values(i)), default=0) < _FEWEST

    def wrong(self, side: int, phases: Iterable[str]) -> list[int]:
        """The calls that depend on data, compute, and are not right, in the order of the run."""
        mine = self._sides[side]
        return [
            i
            for i in mine.computing
            if i not in self.right[side]
            and i in mine.depends
            and i not in mine.moves
            and mine.call(i).phase in phases
            and (mine.call(i).phase == "forward" or mine.readers.get(i))
            and not all(map(_is_constant, mine.run.values(i)))
            and (mine.readers.get(i) or not facts_of(mine.call(i).name).overwrites)  # such as weights that are loaded
        ]

    def error_between(self, one: int, other: int) -> float | None:
        """The smallest error between what two calls computed, or parts of it; None if no two can be compared."""
        known = [
            [values for k in (i, *side.views.get(i, ())) for values in side.run.values(k) if values.l2]
            for side, i in ((self.one, one), (self.other, other))
        ]
        errors = [relative_error(mine, theirs) for mine in known[0] for theirs in known[1] if mine.count >= _FEWEST]
        return min((error for error in errors if error is not None), default=None)


# --- weights


class _Weight(NamedTuple):
    name: str
    source: Source
    rows: torch.Tensor
    columns: torch.Tensor
    width: int  # the elements of a row
    height: int  # the elements of a column


class _Segment(NamedTuple):
    start: int  # in the weight of the first run
    other: str
    at: int  # in the weight of the second run
    size: int


def _weights_of(side: _Side) -> list[_Weight]:
    """The parameters and buffers of a run, in the order in which they are read."""
    found = []
    for source in dict.fromkeys(side.run.sources):
        if side.run.named.get(source.name) is not source or not source.values.count:
            continue
        rows, columns = map(unpack_projections, source.projections)
        size, is_matrix = source.values.count, bool(len(columns))
        width, height = size // max(len(rows), 1), size // max(len(columns), 1)
        found.append(_Weight(source.name, source, rows, columns, width, height if is_matrix else 1))
    return found


def _pair_weights(pairing: _Pairing) -> dict[str, str | None]:
    """For each parameter and buffer of the first run, what has its values in the second, or None."""
    # "name", "name[0:64]" (rows), "name[:, 0:64]" (columns), "name.T" (transposed), "[0:64] = name, [64:128] = ...".
    ones, others = _weights_of(pairing.one), _weights_of(pairing.other)
    found: dict[str, str | None] = {}
    pools = {
        (kind, size): _Pool([(one.name, getattr(one, kind)) for one in others if getattr(one, across) == size])
        for kind, across in (("rows", "width"), ("columns", "height"))
        for size in {getattr(one, across) for one in others}
    }
    for weight in ones:
        found[weight.name] = None
        if not _is_constant(weight.source.values):
            rounds = _rounding_of([weight], others)
            errors = [(relative_error(weight.source.values, one.source.values), one.name) for one in others]
            error, name = min(((error, name) for error, name in errors if error is not None), default=(math.inf, ""))
            found[weight.name] = name if error <= rounds else _in_parts(weight, pools, rounds)
    return found


class _Pool:
    """The rows or columns of one length of all weights of a run."""

    def __init__(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        known = [(name, lines) for name, lines in weights if len(lines)]
        self.sizes: dict[str, int] = {name: len(lines) for name, lines in known}
        self._names = list(self.sizes)
        self._starts = [0]
        for size in self.sizes.values():
            self._starts.append(self._starts[-1] + size)
        self._lines = torch.cat([lines for _, lines in known]) if known else torch.empty(0)

    def cover(self, lines: torch.Tensor, rounds: float) -> list[_Segment] | None:
        """Segments that have all rows of a weight, in its order; None if a row is in none."""
        least = min(2 if rounds <= _WEIGHT_ROUNDS else _LEAST_ROUNDED, len(lines))
        tolerance = rounds * float(lines.square().mean().sqrt())
        found: list[_Segment] = []
        start = 0
        while start < len(lines):
            best = _Segment(start, "", 0, 0)
            last = min(least, len(lines) - start) - 1  # the first row and this one, before all between
            if last >= len(self._lines):
                return None
            fits = (self._lines[: len(self._lines) - last] - lines[start]).abs() <= tolerance
            fits &= (self._lines[last:] - lines[start + last]).abs() <= tolerance
            for place in fits.nonzero().flatten()[:_MOST_PLACES].tolist():
                owner = bisect.bisect(self._starts, place) - 1
                size = min(len(lines) - start, self._starts[owner + 1] - place)
                apart = (lines[start : start + size] - self._lines[place : place + size]).abs() > tolerance
                size = int(apart.int().argmax()) if bool(apart.any()) else size
                if size > best.size:
                    best = _Segment(start, self._names[owner], place - self._starts[owner], size)
            if best.size <= last or (best.size == 1 and len(self._lines) > _MOST_SINGLE):
                return None
            found.append(best)
            start += best.size
        return found

    def permuted(self, lines: torch.Tensor, rounds: float) -> str | None:
        """The weight that has these rows in another order, as rotary embeddings of another convention need them."""
        tolerance = rounds * float(lines.square().mean().sqrt()) if len(lines) else 0.0
        for name, start in zip(self._names, self._starts, strict=False):
            theirs = self._lines[start : start + self.sizes[name]]
            if 1 < len(theirs) == len(lines) and bool(
                ((theirs.sort().values - lines.sort().values).abs() <= tolerance).all()
            ):
                return name
        return None


def _rounding_of(ones: Sequence[_Weight], others: Sequence[_Weight]) -> float:
    """The relative error up to which weights are equal: that of the coarsest dtype, if their dtypes differ."""
    dtypes = {one.source.info.dtype for one in (*ones, *others)}
    return 2 * max(torch.finfo(dtype).eps for dtype in dtypes) if len(dtypes) > 1 else _WEIGHT_ROUNDS


def _in_parts(weight: _Weight, pools: Mapping[tuple[str, int], _Pool], rounds: float) -> str | None:
    for mine, size, theirs, form in (
        ("rows", weight.width, "rows", "{name}[{ranges}]"),
        ("columns", weight.height, "columns", "{name}[:, {ranges}]"),
        ("rows", weight.width, "columns", "{name}.T[{ranges}]"),
        ("columns", weight.height, "rows", "{name}.T[:, {ranges}]" if weight.width > 1 else "{name}[{ranges}]"),
    ):
        lines, pool = getattr(weight, mine), pools.get((theirs, size))
        segments = pool.cover(lines, rounds) if pool is not None and len(lines) else None
        if pool is not None and segments:
            return _spelled(segments, pool.sizes, form)
    rows = pools.get(("rows", weight.width))
    name = None if rows is None else rows.permuted(weight.rows, rounds)
    return None if name is None else f"{name}[rows in another order]"


#: Other kernels may sum the product of a row in another order.
_WEIGHT_ROUNDS = 2e-5
#: The fewest rows that are told apart if they are rounded.
_LEAST_ROUNDED = 8
#: The rows among which a single one is not found by chance.
_MOST_SINGLE = 4096
#: The places among which the start of a part is looked for.
_MOST_PLACES = 64


def _spelled(segments: Sequence[_Segment], sizes: Mapping[str, int], form: str) -> str:
    texts = []
    for name in dict.fromkeys(one.other for one in segments):
        ranges = [one for one in segments if one.other == name]
        is_whole = len(ranges) == 1 and ranges[0].size == sizes[name]
        text = form.format(name=name, ranges=", ".join(f"{one.at}:{one.at + one.size}" for one in ranges))
        if is_whole:
            text = f"{name}.T" if ".T[" in form else name
        places = ", ".join(f"{one.start}:{one.start + one.size}" for one in ranges)
        texts.append((places, text))
    return texts[0][1] if len(texts) == 1 else ", ".join(f"[{places}] = {text}" for places, text in texts)


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
        near: Calls with right inputs and nearly the same results, and pairs where errors begin to exceed rounding.
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
        return {
            "outputs_match": self.outputs_match,
            "matched": self.matched,
            "first": None if self.first is None else self.first.to_dict(),
            "modules": self.modules,
            "weights": self.weights,
            "near": [one.to_dict() for one in self.near],
        }

    def content(self) -> Content:
        """Returns the sentence, the near misses, the maps of modules and weights, and the two programs."""
        good = None if self.outputs_match and self.near else self.outputs_match
        return Content("two implementations", self.answer, list(self._numbers()), list(self._parts()), good)

    def _numbers(self) -> Iterator[ReportFact]:
        yield "outputs", "match" if self.outputs_match else "differ"
        yield (
            "results with a counterpart",
            percent(self.matched),
            f"of {self.compared[0]:,} in A; B has {self.compared[1]:,}",
        )
        yield "tolerance", spell_number(self.tolerance), "relative L2"
        if self.reordered:
            yield "in another order", f"{self.reordered:,}", "pairs, by number, norm, extremes and exponents alone"
        if self.weights:
            paired = sum(one is not None for one in self.weights.values())
            yield (
                "weights",
                f"{paired:,} of {len(self.weights):,}",
                "of A were found in B by their values; constants are not",
            )

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
        raise OptionError(f"`tolerance` is a finite number of 0 or more, got {tolerance!r}.")
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
    growth = math.sqrt(max(_DEPTH, one.depth, other.depth) / _DEPTH)
    known = min(_TOLERANCES[dtype] * growth, _LARGEST_TOLERANCE)
    pairing = _Pairing(one, other, known if tolerance is None else float(tolerance))
    return _Answer(pairing).match()


def _place(call: Call) -> str:
    line = f", {short_line(call.line)}" if call.line else ""
    phase = "" if call.phase == "forward" else f" ({call.phase})"
    return f"{call.op.removeprefix('aten::')} in {module_name(call.module)}{phase}{line}"


class _Answer:
    def __init__(self, pairing: _Pairing) -> None:
        self.pairing = pairing
        self.one, self.other = pairing.one, pairing.other
        self.weights = _pair_weights(pairing)
        self.wrong_ends: list[str] = []  # outputs, losses and gradients, as sentences
        self.evidence: list[str] = []

    def match(self) -> Match:
        self._compare_ends()
        first = self._first() if self.wrong_ends else None
        near = self._near(first)
        counted = [self._results(side) for side in (0, 1)]
        paired = [result for result in counted[0] if result in self.pairing.of[0]]
        base = [name for text in self.weights.values() if text for name in self._names_in(text)]
        alone = [one.name for one in _weights_of(self.other) if one.name not in base]
        return Match(
            not self.wrong_ends,
            len(paired) / len(counted[0]) if counted[0] else 0.0,
            first,
            self._modules(),
            self.weights,
            near,
            self.pairing.tolerance,
            self._sentence(first, near, len(paired), len(counted[0])),
            [*reversed(self.wrong_ends), *self.evidence],  # the first outputs are inner ones in many programs
            (len(counted[0]), len(counted[1])),
            sum(not pair.is_same_order for pair in self.pairing.pairs),
            alone,
            self._sides(first),
        )

    def _results(self, number: int) -> list[tuple[int, int]]:
        """The results of a program's calls that its pairs are counted among: no constants."""
        side = (self.one, self.other)[number]
        return [
            (i, place)
            for i in side.own
            for place, values in enumerate(side.run.values(i))
            if values.digest and not _is_constant(values)
        ]

    # --- outputs, losses and gradients

    def _compare_ends(self) -> None:
        outputs = self.one.outputs
        lacking = [
            [i for i in side.outputs if not self._is_paired_output(number, i)]
            for number, side in enumerate((self.one, self.other))
        ]
        self.wrong_ends += [f"The output of {_place(self.one.call(i))} has no counterpart." for i in lacking[0]]
        if outputs and not lacking[0] and lacking[1] and len(lacking[1]) == len(self.other.outputs):
            self.wrong_ends.append(f"The output of {_place(self.other.call(lacking[1][-1]))} in B has no counterpart.")
        errors = [pair.error for i in outputs for pair in self.pairing.pairs_of(0, i) if pair.is_same_order]
        if errors:
            self.evidence.append(f"The outputs of A differ by at most {spell_number(max(errors))} (relative L2).")
        ends = self.one.run.recording.ends, self.other.run.recording.ends
        tolerance = self.pairing.tolerance
        for step, (mine, theirs) in enumerate(zip(*ends, strict=False)):
            allowed = tolerance * (step + 1)  # an optimizer adds to the error of each step
            for place, (loss, other_loss) in enumerate(zip(mine.losses, theirs.losses, strict=False)):
                error = relative_error(loss, other_loss)
                self._tell(f"Loss {place} of step {step}", error, allowed)
            if len(mine.losses) != len(theirs.losses):
                self.wrong_ends.append(f"Step {step} has {len(mine.losses)} losses in A, {len(theirs.losses)} in B.")
            self._compare_gradients(step, mine.gradients, theirs.gradients, allowed)
        if len(ends[0]) != len(ends[1]):
            self.evidence.append(f"A has {len(ends[0]):,} steps, B {len(ends[1]):,}: the first ones were compared.")
        if not outputs and not any(end.losses for end in ends[0]):
            self.wrong_ends.append("A has no output: no result that depends on parameters or inputs is left unread.")

    def _is_paired_output(self, number: int, i: int) -> bool:
        views = (self.one, self.other)[number].views.get(i, ())
        pairs = [pair for k in (i, *views) for pair in self.pairing.pairs_of(number, k)]
        return any(pair.one.call >= 0 and pair.other.call >= 0 for pair in pairs)  # an input is no result

    def _tell(self, what: str, error: float | None, allowed: float) -> None:
        if error is not None and error > allowed:
            self.wrong_ends.append(f"{what} differs by {spell_number(error)} (relative L2).")
        elif error is not None:
            self.evidence.append(f"{what} differs by {spell_number(error)} (relative L2): within the tolerance.")

    def _compare_gradients(
        self, step: int, mine: Mapping[str, Values], theirs: Mapping[str, Values], allowed: float
    ) -> None:
        """Compares gradients of weights that are whole in both, and the norms of those that B joins or splits."""
        largest = max((one.l2 or 0.0 for one in mine.values()), default=0.0)
        joined: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in mine:
            joined[tuple(self._names_in(self.weights.get(name) or ""))].append(name)
        errors: list[tuple[float, str]] = []
        for others, names in joined.items():
            if not others or not all(other in theirs for other in others):
                continue
            ones, twos = [mine[name] for name in names], [theirs[other] for other in others]
            sizes = [math.hypot(*(one.l2 or 0.0 for one in found)) for found in (ones, twos)]
            if self.weights[names[0]] == others[0]:
                error = relative_error(ones[0], twos[0])
            elif sum(one.count for one in ones) == sum(one.count for one in twos):
                error = abs(sizes[0] - sizes[1]) / max(*sizes, _SMALLEST)
            else:
                error = None
            if error is not None and largest:  # a gradient may consist of rounding alone
                errors.append((error * min(1.0, max(sizes) / (_SMALL_GRADIENT * largest)), names[0]))
        if errors:
            error, name = max(errors)
            what = f"The gradient of {name} in step {step}, the worst of {len(errors):,},"
            self._tell(what, error, 4 * allowed)

    def _names_in(self, text: str) -> list[str]:
        """The weights of B that a value of `weights` names."""
        parts = [part.rpartition(" = ")[2] for part in text.split(", ")]
        names = [end for part in parts for end in (part, part.partition("[")[0].removesuffix(".T"))]
        return sorted({name for name in names if name in self.other.run.named})

    # --- where they part

    def _first(self) -> NearMiss | None:
        """Where A goes on without a counterpart, and the nearest that B computes there."""
        wrong, jumps = [self.pairing.wrong(side, ("forward", "recompute")) for side in (0, 1)], self._jumps()
        if not any(wrong) and jumps:
            return self._jump(jumps[0])
        if not any(wrong):
            wrong = [self.pairing.wrong(side, ("backward",)) for side in (0, 1)]
        if not any(wrong):
            ends = [i for i in self.one.outputs if not self.pairing.pairs_of(0, i)]
            return NearMiss(self.one.call(ends[0]), None, None, "has no counterpart") if ends else None
        first, partner = (found[0] if found else None for found in wrong)
        other = self._hidden(len(self.one.run.calls) if first is None else first) or self._table((first, partner))
        if other is not None:
            return other
        error = None if first is None or partner is None else self.pairing.error_between(first, partner)
        if first is None or partner is None or self.one.call(first).op != self.other.call(partner).op:
            near: list[tuple[float, float, int, int]] = []
            for rank, i in enumerate(wrong[0][:_REACH]):
                for other_rank, j in enumerate(wrong[1][:_REACH]):
                    off = None if rank and other_rank else self.pairing.error_between(i, j)
                    if off is not None and off < _MOST_OF_NEAR:
                        score = rank + other_rank + _CALLS_OF_A_DECADE * math.log10(max(off, _SMALLEST))
                        near.append((score, off, i, j))
            if near:
                _, error, first, partner = min(near)
        earlier = [pair for pair in jumps if first is not None and pair.one.call < first]
        if earlier and error is not None and error < _GROWS * earlier[0].error:
            return self._jump(earlier[0])
        calls = [None if k is None else side.call(k) for side, k in ((self.one, first), (self.other, partner))]
        return NearMiss(calls[0], calls[1], error, _NO_COUNTERPART)

    def _hidden(self, end: int) -> NearMiss | None:
        """The same op on the same inputs with another result, before a call; what reads it may hide the difference."""
        readers: dict[tuple[str, int], list[int]] = defaultdict(list)  # of B, by op and the last that they read
        for j in self.other.computing:
            if not self.pairing.pairs_of(1, j):
                readers[self.other.call(j).op, max(self.other.writers[j], default=-1)].append(j)
        for i in self.one.computing if readers else ():
            if i >= end:
                break
            if i in self.one.moves or i not in self.one.depends or self.pairing.pairs_of(0, i):
                continue
            inputs = {pair.other.call for writer in self.one.writers[i] for pair in self.pairing.pairs_of(0, writer)}
            inputs |= {k for j in inputs & self.other.moves for k in self._behind(1, j)}  # a part of what they made
            for j in [j for writer in sorted(inputs) for j in readers.get((self.one.call(i).op, writer), ())]:
                error = self.pairing.error_between(i, j)
                is_alike = inputs.issuperset(writer for writer in self.other.writers[j] if writer >= 0)
                if is_alike and error is not None and self.pairing.tolerance < error < _MOST_OF_NEAR:
                    text = "the same op on the same inputs, with another result"
                    return NearMiss(self.one.call(i), self.other.call(j), error, text)
        return None

    def _table(self, starts: Sequence[int | None]) -> NearMiss | None:
        """A table that depends on no data, such as a mask, which the first wrong calls read, and B has otherwise."""
        found = []
        for side, start in zip((self.one, self.other), starts, strict=True):
            found.append([] if start is None else self._tables_before(side, start))
        read = [set() if start is None else self._behind(number, start) for number, start in enumerate(starts)]
        for i in found[0]:
            for j in found[1]:
                error = self.pairing.error_between(i, j)
                mine, theirs = self.one.call(i), self.other.call(j)
                # Of masks of integers and bools, only the bits are known: those that the calls themselves read.
                is_other = error is None and i in read[0] and j in read[1] and mine.op == theirs.op
                if (error is not None and error < _MOST_OF_NEAR) or (is_other and self._is_discrete(i, j)):
                    return NearMiss(
                        mine, theirs, error, "a table that depends on no data, read by the first wrong call"
                    )
        return None

    def _is_discrete(self, i: int, j: int) -> bool:
        infos = self.one.call(i).outputs, self.other.call(j).outputs
        return [(one.dtype, one.shape) for one in infos[0]] == [(one.dtype, one.shape) for one in infos[1]] and not any(
            one.dtype.is_floating_point for one in infos[0]
        )

    def _tables_before(self, side: _Side, start: int) -> list[int]:
        """The calls that depend on no data, have no counterpart, and whose results a call reads; in order."""
        number = int(side is self.other)
        waiting, found = [start], set[int]()
        while waiting:
            for writer in side.writers.get(waiting.pop(), ()):
                is_right = writer in self.pairing.right[number] and self.pairing.pairs_of(number, writer)
                is_way = writer in side.moves if writer in side.depends else not is_right
                if writer >= 0 and writer not in found and is_way:
                    found.add(writer)
                    waiting.append(writer)
        return sorted(i for i in found if i not in side.depends and i not in side.moves)

    def _near(self, first: NearMiss | None) -> list[NearMiss]:
        """The first difference, others on right inputs, and where errors begin to exceed rounding."""
        jumps = self._jumps()
        start = self._hidden(jumps[0].one.call) if first is None and jumps else first
        found = [start] if start is not None and start.relative_l2 is not None else []
        wrong = [self.pairing.wrong(side, ("forward", "recompute")) for side in (0, 1)]
        fronts = [[i for i in wrong[side] if self._behind(side, i).isdisjoint(wrong[side])][:_REACH] for side in (0, 1)]
        for i in fronts[0] if first is not None else ():
            errors = [(error, j) for j in fronts[1] if (error := self.pairing.error_between(i, j)) is not None]
            error, j = min(errors, default=(math.inf, -1))
            if error < _MOST_OF_NEAR:
                found.append(NearMiss(self.one.call(i), self.other.call(j), error, _NO_COUNTERPART))
        found += [self._jump(pair) for pair in jumps]
        known: dict[tuple[int, int], NearMiss] = {}
        for one in found:
            known.setdefault((id(one.a), id(one.b)), one)
        return list(known.values())[:20]

    def _jump(self, pair: _Pair) -> NearMiss:
        calls = self.one.call(pair.one.call), self.other.call(pair.other.call)
        return NearMiss(*calls, pair.error, _BEGIN_TO_EXCEED)

    def _behind(self, number: int, i: int) -> set[int]:
        """The calls that a call reads from, through those that only move elements."""
        side = (self.one, self.other)[number]
        waiting, found = [i], set[int]()
        while waiting:
            for writer in side.writers.get(waiting.pop(), ()):
                if writer >= 0 and writer not in found:
                    found.add(writer)
                    if writer in side.moves:
                        waiting.append(writer)
        return found

    def _jumps(self) -> list[_Pair]:
        """Pairs whose error is far above that of their inputs and above what rounding explains."""
        found = []
        for pair in self.pairing.pairs:
            i, j = pair.one.call, pair.other.call
            if i < 0 or j < 0 or not pair.is_same_order or i not in self.one.writers or i in self.one.moves:
                continue
            inputs = [known.error for writer in self._behind(0, i) for known in self.pairing.pairs_of(0, writer)]
            rounding = max(self.one.run.rounding(i), self.other.run.rounding(j))
            if pair.error > max(_GROWS * max(inputs, default=0.0), _ROUNDS * rounding):
                found.append(pair)
        return found[:_REACH]

    # --- maps

    def _modules(self) -> dict[str, str]:
        """For each module of A, that of B with which it has the largest share of pairs in common."""
        ends: list[tuple[str, str]] = []
        for pair in self.pairing.pairs:
            one, other = self.one.module(pair.one.call), self.other.module(pair.other.call)
            if one is not None and other is not None and not pair.one.is_moved and self.one.call(pair.one.call).own:
                ends.append((one, other))
        for name, text in self.weights.items():
            ends += [(name.rpartition(".")[0], other.rpartition(".")[0]) for other in self._names_in(text or "")]
        sizes: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        common: dict[str, Counter[str]] = defaultdict(Counter)
        for one, other in ends:
            for path in _ancestors(one):
                common[path].update(_ancestors(other))
                sizes[0][path] += 1
            sizes[1].update(_ancestors(other))
        return {
            path: max(found, key=lambda other: (found[other] ** 2 / sizes[1][other], len(other)))
            for path, found in common.items()
            if path
        }

    def _sentence(self, first: NearMiss | None, near: Sequence[NearMiss], paired: int, results: int) -> str:
        share = f"{paired:,} of {results:,} results of the reference have a counterpart."
        within = f"within {spell_number(self.pairing.tolerance)} (relative L2)"
        if not self.wrong_ends and near:
            return f"All outputs match {within}, but not to rounding. {self._described(near[0])} {share}"
        if not self.wrong_ends:
            coarse = max(self.one.dtype, self.other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            hides = f" The rounding of {dtype_name(coarse)} may hide a difference that float32 shows."
            more = hides if coarse in LOWER_DTYPES else ""
            return f"The port (B) computes what the reference (A) computes: all outputs match {within}.{more} {share}"
        if first is None:
            return f"The outputs differ: {self.wrong_ends[-1]} {share}"
        return f"{self._until(first)}{self._described(first)} {share}"

    def _until(self, first: NearMiss) -> str:
        """Up to where A and B compute the same: the last pair that the first wrong call reads from."""
        if first.a is None:
            return ""
        i = next(k for k, call in enumerate(self.one.run.calls) if call is first.a)
        before: set[int] = set()
        waiting = [i]
        while waiting and not before:
            behind = {writer for k in waiting for writer in self._behind(0, k)}
            before = {k for k in behind if k in self.pairing.right[0] and self.pairing.pairs_of(0, k)}
            waiting = sorted(behind - before)
        last = max(before - self.one.moves or before, default=None)
        if last is None:
            return ""
        return f"The port (B) computes what the reference (A) computes up to {_place(self.one.call(last))}. "

    def _described(self, first: NearMiss) -> str:
        one, other = first.a, first.b
        if one is None:
            assert other is not None
            return f"{_place(other)} in B has no counterpart in A."
        text = f"{_place(one)} has no counterpart"
        if other is None:
            return f"{text}."
        if first.text == _BEGIN_TO_EXCEED and first.relative_l2 is not None:
            error = spell_number(first.relative_l2)
            return f"In {_place(one)} (B: {_place(other)}), {first.text}: {error}."
        if first.relative_l2 is not None and first.relative_l2 < _MOST_OF_NEAR:
            return f"{text}; nearest: {_place(other)}, off by {spell_number(first.relative_l2)} (relative L2)."
        off = "" if first.relative_l2 is None else f", off by {spell_number(first.relative_l2)} (relative L2)"
        return f"{text}; the first call of B without one: {_place(other)}{off}."

    # --- the page

    def _sides(self, first: NearMiss | None) -> Sides:
        """The calls of both programs that compute, around the first difference if there are many."""
        rows: list[list[tuple[str, str, str]]] = []
        places: list[dict[int, int]] = []
        marked: list[int | None] = []
        for side, call in ((self.one, first and first.a), (self.other, first and first.b)):
            own = [i for i in side.computing if side.run.steps[i] == side.run.steps[side.computing[0]]]
            place = next((k for k, i in enumerate(own) if side.call(i) is call), None)
            start = max(0, min((place or 0) - _MOST_SHOWN // 2, len(own) - _MOST_SHOWN))
            shown = own[start : start + _MOST_SHOWN]
            marked.append(None if place is None else place - start)
            places.append({i: k for k, i in enumerate(shown)})
            calls = [side.call(i) for i in shown]
            rows.append(
                [(one.op.removeprefix("aten::"), module_name(one.module), short_line(one.line)) for one in calls]
            )
        links: dict[tuple[int, int], str] = {}
        for pair in self.pairing.pairs:
            ends = [
                next((known[i] for i in (call, *side.writers.get(call, ())) if i in known), None)  # views are not shown
                for side, call, known in zip(
                    (self.one, self.other), (pair.one.call, pair.other.call), places, strict=True
                )
            ]
            if ends[0] is not None and ends[1] is not None:
                links.setdefault((ends[0], ends[1]), "same" if pair.is_same_order else "reordered")
        if marked[0] is not None and marked[1] is not None:
            links[marked[0], marked[1]] = "wrong"
        wrong = [
            [place for i, place in places[k].items() if i not in self.pairing.right[k] and i in side.depends]
            for k, side in enumerate((self.one, self.other))
        ]
        note = (
            "Calls of the first step in their order. A line joins results with equal values; dashed: equal but for the "
            "order of the elements; red: where the programs part. A call in red has no counterpart, nor has what is "
            "computed from it."
        )
        found = [(one, other, kind) for (one, other), kind in sorted(links.items())]
        return Sides("The two programs", ("A", "B"), (rows[0], rows[1]), found, (wrong[0], wrong[1]), note)


#: A gradient below this share of the largest one may consist of rounding.
_SMALL_GRADIENT = 3e-2
_MOST_SHOWN = 300


def _ancestors(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: end + 1]) for end in range(len(parts)))]
