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
or setting) results may round differently. A relative L2 error of up to 8 units in the last place of the result's dtype,
and sqrt(n) of float32's, in which sums of lower precision are computed, is attributed to that; n is the number of terms
that an element may be summed from, at most. The walk then goes on behind such a call, without the events that a
rounding error sets off in the calls that read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from torch_promote.observe.alignment import align
from torch_promote.observe.events import COMPILED_FUNCTION
from torch_promote.observe.run import Run, is_close, is_random, relative_error, rounding_of

if TYPE_CHECKING:
    from torch_promote.observe.events import Call, Source
    from torch_promote.observe.values import Values

__all__ = ["Event", "Gap", "Kind", "Pair", "Walk", "common_module"]

Kind: TypeAlias = Literal["policy", "input", "weight", "op", "rounding", "structure"]
"""What explains the difference between two runs."""

#: Compiled functions round more often, and less, than the calls that they replace.
_COMPILED_ROUNDS = 16.0


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
        complete: Whether each recording has all calls of its run.

    Attributes:
        pairs: The calls that both runs made, without transparent ones, in the order of the first run.
        gaps: The others, without those in `tail`.
        tail: The calls behind the end of the other run's recording; None if there are none.
        event: The first event that explains the difference; None if there is none.
        rounded: The calls whose results differ by rounding, on equal inputs.
        errors: For each pair, the relative error of its results.
    """

    def __init__(self, one: Run, other: Run, may_round: bool, complete: tuple[bool, bool]) -> None:
        self.one: Run = one
        self.other: Run = other
        self.runs: tuple[Run, Run] = one, other
        self._may_round = may_round
        self.pairs: list[Pair] = []
        self.gaps: list[Gap] = []
        self.tail: Gap | None = None
        self.event: Event | None = None
        self.rounded: list[tuple[Pair, float]] = []
        self.errors: list[float | None] = []
        self._views: list[Pair] = []  # equal inputs, other contents
        self._equal: tuple[set[int], set[int]] = set(), set()  # calls with equal results
        self._gap_of: tuple[dict[int, Gap], dict[int, Gap]] = {}, {}
        self._walk(complete)

    # --- the order

    def _aligned(self) -> dict[int, int]:
        """The calls of the first run that the second made as well."""
        places: dict[tuple[int, str, str, bool], tuple[list[int], list[int]]] = {}
        for side, run in enumerate(self.runs):
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

    def _walk(self, complete: tuple[bool, bool]) -> None:
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
        if gap is not None and ((not gap.one and not complete[0]) or (not gap.other and not complete[1])):
            self.tail = self.gaps.pop()
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
        dtypes = (_dtypes(run.calls[k], "outputs") for run, k in zip(self.runs, pair, strict=True))
        if one and other and one != other and len({*dtypes}) == 1 and not self._places(pair, converted=False):
            self._views.append(pair)

    def _see(self, pair: Pair) -> None:
        one, other = self.one.calls[pair.one], self.other.calls[pair.other]
        results = self.one.results(pair.one), self.other.results(pair.other)
        dtypes = _dtypes(one, "outputs"), _dtypes(other, "outputs")
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
        elif is_random(one.name):  # such as uniform_() of memory that is not initialized
            differing = [place for place in differing if self._is_defined(pair, place)]
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
        same_size = len(one) != 1 or len(other) != 1 or one[0].count == other[0].count
        return same_size and self._is_defined(pair, place)

    def _is_defined(self, pair: Pair, place: int) -> bool:
        """Whether calls or the program have put into memory what an input has."""
        return not any(
            run.undefined.intersection(run.calls[k].reads[place]) for run, k in zip(self.runs, pair, strict=True)
        )

    def _written(self, pair: Pair, place: int) -> tuple[tuple[Values, ...], tuple[Values, ...]]:
        """What the last call that wrote an input computed, in both runs."""
        one, other = (
            run.values_of(run.chain(run.calls[k].reads[place][-1])[-1], run.calls[k].inputs[place])
            for run, k in zip(self.runs, pair, strict=True)
        )
        return one, other

    def _is_tainted(self, side: int, i: int) -> bool:
        """Whether a call reads what differs between the runs."""
        run, other = self.runs[side], self.runs[1 - side]
        for read in run.calls[i].reads:
            for writer in read:
                root = run.chain(writer)[-1]
                if root >= 0 and not (root in self._equal[side] or root in run.initial or root in run.undefined):
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
            for side, run in enumerate(self.runs):
                for k in {k for writer in run.calls[pair[side]].reads[place] for k in run.chain(writer)}:
                    gap = self._gap_of[side].get(k)
                    if gap is not None:
                        found = self._input_error(pair, place)
                        if self.one.compiled != self.other.compiled:
                            return self._of_compiled(gap, pair, place)
                        if gap.tainted and self.rounded:
                            return None
                        return self._of_gap(gap, found if found is not None else error)
                    if k in run.undefined:
                        what = f"It reads what {run.calls[k].op} has left in memory, and no recorded call has computed."
                        return Event("input", pair.one, pair.other, error, evidence=(what,))
                    if k >= 0 and k not in self._equal[side] and k == run.chain(k)[-1]:
                        clean[side] = False
            roots = [
                [run.chain(writer)[-1] for writer in run.calls[k].reads[place]]
                for run, k in zip(self.runs, pair, strict=True)
            ]
            sources += [(a, b) for a, b in zip(*roots, strict=False) if a < 0 and b < 0 and self._differ(a, b)]
        contents = [
            sorted(run.contents(k, place, converted=False) for place in range(len(run.calls[k].reads)))
            for run, k in zip(self.runs, pair, strict=True)
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
        calls = [[run.calls[k] for k in ks] for run, ks in zip(self.runs, (gap.one, gap.other), strict=True)]
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
                for run, known, others in zip(self.runs, inputs, (self.other.batches, self.one.batches), strict=True)
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
                for run, place in zip(self.runs, places, strict=True)
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
        for side, run in enumerate(self.runs):
            for writer in (writer for place in differing for writer in run.calls[pair[side]].reads[place]):
                root = run.chain(writer)[-1]
                if root < 0 and not self._is_known(run.sources[-1 - root], self.runs[1 - side]):
                    return False
        return True

    def _of_sources(self, pair: Pair, sources: list[tuple[int, int]]) -> Event:
        weights = [(a, b) for a, b in sources if self.one.sources[-1 - a].kind != "input"]
        unseen = self._other_weight() if weights and self.one.compiled != self.other.compiled else None
        if unseen is not None:
            return unseen
        a, b = (weights or sources)[0]
        one, other = self.one.sources[-1 - a], self.other.sources[-1 - b]
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
            evidence = (f"{self.described(gap)}, and what is read after it differs.",)
            return Event("structure", *self.first_of(gap), error, evidence=evidence)
        one, other = self.one.calls[gap.one[-1]], self.other.calls[gap.other[-1]]
        evidence = (f"{self.described(gap)}.",)
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
            for run, calls in zip(self.runs, (gap.one, gap.other), strict=True)
        ]
        return bool(last[0] and last[1] and last[0] != last[1] and counts[0] == counts[1])

    def described(self, gap: Gap) -> str:
        """What the runs call in one place: "A calls aten::exp where B calls aten::sin", "Only A calls aten::exp"."""
        calls = [[run.calls[k] for k in found] for run, found in zip(self.runs, (gap.one, gap.other), strict=True)]
        ops = [", ".join(dict.fromkeys(call.op for call in found)) for found in calls]
        if ops[0] == ops[1]:  # other overloads
            ops = [", ".join(dict.fromkeys(call.name for call in found)) for found in calls]
        if not (gap.one and gap.other):
            return f"Only {'A' if gap.one else 'B'} calls {ops[0] or ops[1]}"
        return f"A calls {ops[0]} where B calls {ops[1]}"

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
