"""Which calls of two runs are the same, and what is told of those that one run alone made.

NOTE [ How the calls of two runs belong together ]
The calls that the program made are aligned by step, phase and module (see `alignment`), and stand in the order of the
first run. Calls that one run alone made stand in gaps. Some of these are no difference: those that compute what the
other run reads from outside with equal bits, such as a batch that a worker made, and those among them that no other
call reads.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch_promote.observe.ops import facts_of
from torch_promote.reading.alignment import align, rising
from torch_promote.report.base import module_name, short_line, some_of

if TYPE_CHECKING:
    from torch_promote.observe.call import Argument, Call
    from torch_promote.reading.run import Run

#: Arguments that say where and how a tensor is made, and not what is in it.
_OF_NO_EFFECT = frozenset({"device", "non_blocking", "copy", "pin_memory", "memory_format", "layout"})


class Pair(NamedTuple):
    """The same call in both runs."""

    one: int
    other: int


@dataclass(eq=False)
class Gap:
    """Calls that stand in one place, and that only one run made, or the runs made differently."""

    one: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    is_first: bool = False  # whether no aligned call stands before them
    tainted: bool = False  # whether they read what differed before


class Pairing:
    """The calls of two runs, side by side."""

    def __init__(
        self,
        one: Run,
        other: Run,
        complete: tuple[bool, bool],  # whether each recording has all calls of its run
    ) -> None:
        self.one: Run = one
        self.other: Run = other
        self.runs: tuple[Run, Run] = one, other
        self.gaps: list[Gap] = []  # the calls of one run alone, without those in `tail`
        self.tail: Gap | None = None  # the calls behind the end of the other run's recording; None if there are none
        self.moved: int = 0  # the number of calls in both runs that the second made in another order
        self.reads_alone: bool = False  # whether a call in both runs reads what calls of one run alone have written
        #: The calls of each run alone that compute what the other one reads from outside with equal bits.
        self.received: tuple[set[int], set[int]] = set(), set()
        #: Those that stand among these, and that only such calls read, such as random numbers of an augmentation.
        self.beside: tuple[set[int], set[int]] = set(), set()
        #: By the number of a call, that of the same call in the other run, and the gap of one that only this run made.
        self.partners: tuple[dict[int, int], dict[int, int]] = {}, {}
        self.gap_of: tuple[dict[int, Gap], dict[int, Gap]] = {}, {}
        #: What the calls are that only initialize parameters.
        self._initial = [{self._sort(side, k) for k in run.initial} for side, run in enumerate(self.runs)]
        #: The calls of both runs: those of the first in its order, the others where they ran.
        self.order: list[tuple[int | None, int | None]] = list(self._order())
        self._find_gaps(complete)
        self._find_received()

    # --- the order

    def _aligned(self, views: bool, known: Mapping[int, int]) -> dict[int, int]:
        """The calls of the first run that the second made as well; views and conversions, between those known."""
        kept = rising([known[i] for i in sorted(known)])
        found = self._views_of_moved({j: i for i, j in known.items()}, kept)
        taken = found, set(found.values())
        between = [i for i in sorted(known) if known[i] in kept], sorted(kept)
        places: dict[tuple[int, str, str, int], tuple[list[int], list[int]]] = {}
        for side, run in enumerate(self.runs):
            for i in run.own:
                if i not in run.initial and run.is_transparent(i) == views and i not in taken[side]:
                    call = run.calls[i]
                    key = run.steps[i], call.phase, call.module, bisect.bisect(between[side], i)
                    places.setdefault(key, ([], []))[side].append(i)
        for calls in places.values():
            found |= self._aligned_in_place(*calls)
        return found

    def _aligned_in_place(self, ones: list[int], others: list[int], of_one: bool = False) -> dict[int, int]:
        """The same calls among those of one place, which may be all `of_one` parameter of an optimizer."""
        sides = tuple(zip(self.runs, (ones, others), strict=True))
        made: tuple[dict[str, list[Call]], dict[str, list[Call]]] = {}, {}
        for (run, calls), by_name in zip(sides, made, strict=True):
            for i in calls:
                by_name.setdefault(run.calls[i].name, []).append(run.calls[i])
        ordered: set[str] = set()  # the same loop in both runs, such as over experts, has arguments in one order
        # Calls of other shapes are the same calls only if both runs make as many of the op.
        reshaped: set[str] = set()
        for name, one in made[0].items():
            other = made[1].get(name, [])
            if [call.arguments for call in one] == [call.arguments for call in other]:
                ordered.add(name)
            if len(one) == len(other) and Counter(map(input_shapes, one)) != Counter(map(input_shapes, other)):
                reshaped.add(name)
        shaped, plain, read, equal, written = (cast(tuple[list[Any], list[Any]], ([], [])) for _ in range(5))
        for side, (run, calls) in enumerate(sides):
            for i in calls:
                call = run.calls[i]
                name, arguments = call.name, call.arguments
                # What makes tensors of nothing is known by their dtypes: of the state of an optimizer, or of a scaler.
                shapes: tuple[Any, ...] = input_shapes(call) or tuple(info.dtype for info in call.outputs)
                plain[side].append((name, len(shapes)))
                shaped[side].append((name, len(shapes) if name in reshaped else shapes))
                results = run.tells(i) and run.content(i)
                same: Any = results and (name, shapes, results, arguments if name in ordered else ())
                equal[side].append(same)
                read[side].append(same and (*same, *(one.digest for one in run.reads(i))))
        if (shaped[0], read[0]) == (shaped[1], read[1]):
            return dict(zip(ones, others, strict=True))
        if not of_one and ones and self.one.calls[ones[0]].phase == "optimizer":
            # The loop of an optimizer may have its parameters in another order.
            loops = [run.parameters_of_loop(calls) for run, calls in sides]
            orders = [[*dict.fromkeys(loop)] for loop in loops]
            if orders[0] != orders[1] and {*orders[0]} == {*orders[1]}:
                found = {ones[i]: others[j] for i, j in align([], [read])}
                left: dict[str, tuple[list[int], list[int]]] = {}
                for side, aligned in enumerate((found.keys(), {*found.values()})):
                    for i, name in zip(sides[side][1], loops[side], strict=True):
                        if i not in aligned:
                            left.setdefault(name, ([], []))[side].append(i)
                for calls_of_one in left.values():
                    found |= self._aligned_in_place(*calls_of_one, of_one=True)
                return found
        for (run, calls), keys in zip(sides, written, strict=True):
            # As many calls of an op that write to one parameter belong together as well.
            named = [(run.calls[i].name, run.updates(i) and run.parameter_of(i)) for i in calls]
            counts = Counter(named)
            keys += [key[1] and (*key, counts[key]) for key in named]
        return {ones[i]: others[j] for i, j in align([shaped, plain], [read, equal, written])}

    def _views_of_moved(self, place_of: Mapping[int, int], kept: set[int]) -> dict[int, int]:
        """The views before calls that the second run made in another order, and of their results, if they are equal."""
        calls, keys = (cast(tuple[list[Any], list[Any]], ([], [])) for _ in range(2))
        moved = {i for j, i in place_of.items() if j not in kept}, place_of.keys() - kept
        for side, run in enumerate(self.runs if all(moved) else ()):
            reader = -1
            for k in reversed(run.own):
                if not run.is_transparent(k):
                    reader = k
                    continue
                around = reader, *(writer for read in run.reads(k) for writer in read.written_by)
                known = next((one for one in around if one in moved[side]), -1)
                if known >= 0:
                    calls[side].append(k)
                    key = known == reader, place_of[known] if side else known, run.calls[k].name
                    keys[side].append((*key, input_shapes(run.calls[k]), run.results(k)))
        return {calls[0][i]: calls[1][j] for i, j in align([], [keys])}

    def _move_equal(self, aligned: dict[int, int], of_module: bool) -> None:
        """Aligns calls that have an equal one in another place of the other run, such as draws that a worker needs."""

        def known(side: int, k: int) -> Any:
            run, call = self.runs[side], self.runs[side].calls[k]
            results = not run.updates(k) and run.content(k)
            reads = (one.digest for one in run.reads(k))
            module = of_module and call.module
            return results and (call.name, module, input_shapes(call), call.arguments, results, *reads)

        # Those that stand where another call of the op does may be aligned anew, if all of them find an equal one.
        loose = {i: j for i, j in aligned.items() if self.one.results(i) != self.other.results(j)}
        taken = aligned.keys() - loose.keys(), {*aligned.values()} - {*loose.values()}
        free: tuple[dict[Any, list[int]], dict[Any, list[int]]] = {}, {}
        for side, run in enumerate(self.runs):
            for k in run.own:
                if not (k in taken[side] or k in run.initial or run.is_transparent(k)) and (key := known(side, k)):
                    free[side].setdefault(key, []).append(k)
        found = {i: j for key, calls in free[0].items() for i, j in zip(calls, free[1].get(key, ()), strict=False)}
        while True:
            back = {j: i for i, j in found.items()}
            kept = {i for i, j in loose.items() if i not in found or j not in back}
            kept_others = {loose[i] for i in kept}
            left = {i: j for i, j in found.items() if i not in kept and j not in kept_others}
            if len(left) == len(found):
                break
            found = left
        aligned |= found

    def _order(self) -> Iterator[tuple[int | None, int | None]]:
        """The calls of both runs: those of the first in its order, the others where they ran."""
        aligned = self._aligned(False, {})
        for of_module in (True, False):  # modules may have other names
            self._move_equal(aligned, of_module)
        self.moved = len(aligned) - len(rising([aligned[i] for i in sorted(aligned)]))
        aligned |= self._aligned(True, aligned)
        kept = rising([aligned[i] for i in sorted(aligned)])
        place_of = {j: i for i, j in aligned.items()}
        self.partners = aligned, place_of
        after: dict[int, list[int]] = {}
        place = -1
        for j in self.other.own:
            if j in self.other.initial:
                continue
            if j in kept:
                place = place_of[j]
            elif j not in place_of:
                after.setdefault(place, []).append(j)
        for j in after.get(-1, ()):
            yield None, j
        for i in self.one.own:
            if i not in self.one.initial:
                yield i, aligned.get(i)
                for j in after.get(i, ()):
                    yield None, j

    def _find_gaps(self, complete: tuple[bool, bool]) -> None:
        gap: Gap | None = None
        has_pair = False
        last: tuple[int, str] = 0, ""
        for i, j in self.order:
            if i is not None and j is not None:
                if not self.one.is_transparent(i):
                    gap, has_pair = None, True
                continue
            side, k = (0, i) if i is not None else (1, j)
            assert k is not None
            before, last = last, (side, self.runs[side].calls[k].phase)
            if gap is None or (before[0] != side and before[1] != last[1]):  # calls of two phases replace no other
                gap = Gap(is_first=not has_pair)
                self.gaps.append(gap)
            (gap.one, gap.other)[side].append(k)
            self.gap_of[side][k] = gap
        if gap is not None and ((not gap.one and not complete[0]) or (not gap.other and not complete[1])):
            self.tail = self.gaps.pop()

    def _find_received(self) -> None:
        """Finds the calls of one run alone that compute what the other reads from outside, such as from a worker."""
        for side, run in enumerate(self.runs):
            partners, alone, other = self.partners[side], self.gap_of[side], self.runs[1 - side]
            needed: set[int] = set()  # the calls that another call reads
            received: set[int] = set()
            making: set[Gap] = set()  # of calls that have made what was received
            for k in reversed(run.own):
                if k in received and k not in needed and k not in partners:
                    self.received[side].add(k)
                    making |= {alone[k]} if k in alone else set()
                elif run.is_transparent(k) and k not in partners:
                    continue
                elif alone.get(k) in making and k not in needed:
                    self.beside[side].add(k)
                    continue
                theirs = other.reads(partners[k]) if k in partners else ()
                for read, of_other in itertools.zip_longest(run.reads(k), theirs[: len(run.reads(k))]):
                    same = of_other is not None and other.is_outside(of_other) and read.digest == of_other.digest
                    if same or k in self.received[side]:
                        received.update(read.written_by)
                    elif k in needed or not run.is_transparent(k):  # not a view alone
                        needed.update(read.written_by)
                    self.reads_alone |= k in partners and not same and not alone.keys().isdisjoint(read.written_by)
            for k in sorted(self.beside[side]):  # not what computes with the model's results, such as a log
                writers = {w for read in run.reads(k) for w in read.written_by if w in partners or w in alone}
                if writers - received - self.beside[side]:
                    self.beside[side].remove(k)

    @property
    def other_names(self) -> dict[str, str]:
        """The modules of the second run whose calls are those of one module of the first with another name."""
        found: dict[str, set[str]] = {}
        for i, j in sorted(self.partners[0].items()):
            if not self.one.is_transparent(i):
                found.setdefault(self.other.calls[j].module, set()).add(self.one.calls[i].module)
        return {name: next(iter(known)) for name, known in found.items() if len(known) == 1 and name not in known}

    # --- two calls

    def inner_pairs(self, pair: Pair) -> list[Pair]:
        """The calls inside of a call that both runs made."""
        inner = self.one.inner(pair.one), self.other.inner(pair.other)
        names = [[run.calls[k].name for k in calls] for run, calls in zip(self.runs, inner, strict=True)]
        return [Pair(inner[0][i], inner[1][j]) for i, j in align([(names[0], names[1])])]

    def differing_arguments(self, pair: Pair) -> dict[str, tuple[Argument, Argument]]:
        """The arguments that differ, with both values; by their texts, since 0.0 == -0.0 and NaN != NaN."""
        one, other = (dict(run.calls[k].arguments) for run, k in zip(self.runs, pair, strict=True))
        return {
            name: (one.get(name), other.get(name))
            for name in dict.fromkeys([*one, *other])
            if name not in _OF_NO_EFFECT and argument_text(one.get(name)) != argument_text(other.get(name))
        }

    # --- calls of one run alone

    def sides(self, gap: Gap) -> tuple[tuple[Run, list[int]], tuple[Run, list[int]]]:
        """The runs, and the calls of each."""
        return (self.one, gap.one), (self.other, gap.other)

    def computing(self, gap: Gap) -> list[list[int]]:
        """The calls that compute, without those that copy to another dtype or layout or only initialize parameters."""
        return [
            [
                k
                for k in calls
                if run.computes(k)
                and not run.converts(k)
                and run.calls[k].op != "aten::contiguous"
                and self._sort(side, k) not in self._initial[1 - side]
                and k not in self.received[side] | self.beside[side]
            ]
            for side, (run, calls) in enumerate(self.sides(gap))
        ]

    def shown(self, gap: Gap) -> list[list[int]]:
        """The calls that a sentence names: without views, and those of which the other run reads the results."""
        found = [
            [k for k in calls if not (run.is_transparent(k) or k in received or k in beside)]
            for (run, calls), received, beside in zip(self.sides(gap), self.received, self.beside, strict=True)
        ]
        return found if any(found) else [gap.one, gap.other]

    def is_foreign(self, gap: Sequence[Sequence[int]]) -> bool:
        """Whether calls of one run alone are in a place where the other run calls no such op in its forward at all."""
        return any(
            run.calls[k].phase == "forward" and not self.called[1 - side][place_of(run.calls[k])]
            for side, run in enumerate(self.runs)
            for k in gap[side]
        )

    def depends_on_version(self, gap: Gap) -> bool:
        """Whether versions of PyTorch alone explain calls of one run alone."""
        # These are calls in a backward, and those that a line makes instead of others: another overload of aten::fill_.
        made = [
            {run.calls[i].line for i in calls if run.calls[i].phase in ("forward", "recompute")}
            for run, calls in self.sides(gap)
        ]
        if gap.one and gap.other:
            return made[0] == made[1]
        run, calls, lines = (self.one, gap.one, made[0]) if gap.one else (self.other, gap.other, made[1])
        start, end = bisect.bisect_left(run.own, calls[0]), bisect.bisect_right(run.own, calls[-1])
        around = {run.calls[i].line for i in (*run.own[max(start - 1, 0) : start], *run.own[end : end + 1])}
        return lines <= around

    def accumulated(self, gap: Gap) -> str:
        """Says if one run alone adds to the gradients of an earlier step."""
        for side, (run, calls) in enumerate(self.sides(gap)):
            for k in calls:
                writers = run.reads(k)[0].written_by if run.calls[k].op == "aten::add_" and run.reads(k) else ()
                if run.calls[k].phase == "backward" and any(w >= 0 and run.steps[w] < run.steps[k] for w in writers):
                    step = max(run.steps[w] for w in writers if w >= 0)
                    return f" {'AB'[side]} adds to a gradient of step {step}."
        return ""

    def not_detached(self, gap: Gap) -> str:
        """Says if a run has no backward where it alone calls detach before."""
        phases = [{run.calls[k].phase for k in calls} for run, calls in self.sides(gap)]
        if {"backward"} not in phases or set() not in phases:
            return ""
        side = phases.index(set())
        run = self.runs[side]
        last = (gap.one or gap.other)[0]
        found = [
            k for k in self.gap_of[side] if facts_of(run.calls[k].name).is_detach and run.calls[k].phase == "forward"
        ]
        found = [k for k in found if run.steps[k] == self.runs[1 - side].steps[last]]
        found = [k for k in found if not self.called[1 - side][_line_of(run.calls[k])]]
        return f" Only {'AB'[side]} calls {where_of([run.calls[found[0]]])}." if found else ""

    def _sort(self, side: int, k: int) -> tuple[Any, ...]:
        run = self.runs[side]
        call = run.calls[k]
        return run.steps[k], call.phase, call.module, call.name

    @functools.cached_property
    def called(self) -> list[Counter[tuple[str, ...]]]:
        """How often each run makes such a call: in a module and a phase, and at a line of them."""
        return [Counter(key_of(run.calls[k]) for k in run.own for key_of in (place_of, _line_of)) for run in self.runs]

    @functools.cached_property
    def _paired_lines(self) -> list[set[tuple[str, ...]]]:
        return [{_line_of(run.calls[k]) for k in of_run} for run, of_run in zip(self.runs, self.partners, strict=True)]

    def described(self, gap: Gap) -> tuple[str, tuple[int, int]]:
        """What the runs call in one place, as a sentence, and how often each makes the calls that the other never does.

        "A calls aten::exp where B calls aten::sin in 0", "Only A calls aten::exp in 0", "aten::exp in 0: 2 calls in A,
        4 in B", or "A calls aten::exp in 0, in another place than B".
        """
        known = self.shown(gap)
        made = [[run.calls[k] for k in calls] for run, calls in zip(self.runs, known, strict=True)]
        phase = (made[0] or made[1])[0].phase  # calls of a backward follow from those of its forward
        made = [[call for call in calls if call.phase == phase] for calls in made]
        key_of = place_of
        alone = [[call for call in calls if not self.called[1 - i][key_of(call)]] for i, calls in enumerate(made)]
        if not any(alone) and not all(made):
            key_of = _line_of
            more = [call for call in made[0] or made[1] if len({one[place_of(call)] for one in self.called}) > 1]
            paired = self._paired_lines[0 if made[0] else 1]  # the other program may stand in another file
            found = [
                call
                for call in more
                if _line_of(call) not in paired and not all(called[_line_of(call)] for called in self.called)
            ]
            alone = [[call for call in calls if call in found and call.line == found[0].line] for calls in made]
        texts = [where_of(calls) for calls in alone if calls]
        if all(alone):
            ops, _, place = texts[0].partition(" in ")
            texts = [f"A calls {ops if texts[1].endswith(f' in {place}') else texts[0]} where B calls {texts[1]}"]
        elif any(alone):
            texts = [f"Only {'A' if alone[0] else 'B'} calls {texts[0]}"]
        named = {key_of(call) for calls in alone for call in calls}
        others = [call for calls in made for call in calls if key_of(call) not in named]
        of_line = len({call.line for call in others}) == 1 and all(
            called[_line_of(call)] for call in others for called in self.called
        )
        key_of, where = (_line_of if of_line else place_of), where_of(others, of_line) if others else ""
        counts = [sum(called[key] for key in set(map(key_of, others))) for called in self.called]
        if counts[0] != counts[1]:
            texts.append(f"{where}: {counts[0]:,} call{'s' * (counts[0] != 1)} in A, {counts[1]:,} in B")
        elif not any(alone):
            texts.append(self._of_both(known, where, key_of, counts[0]))
        lines = {(call.op, call.phase, call.line) for calls in alone for call in calls}
        one, other = (  # in all modules
            sum(n for key, n in called.items() if key[3:] and (*key[:2], key[3]) in lines and not theirs[key])
            for called, theirs in zip(self.called, self.called[::-1], strict=True)
        )
        return ". ".join(texts), (one, other)

    def _of_both(self, known: Sequence[Sequence[int]], where: str, key_of: Callable[[Call], Any], count: int) -> str:
        """What is said of calls that both runs make as often."""
        if all(known):
            pair = Pair(
                *(next(filter(run.computes, calls), calls[0]) for run, calls in zip(self.runs, known, strict=True))
            )
            counts = [len(run.calls[k].inputs) for run, k in zip(self.runs, pair, strict=True)]
            found = [argument_texts(self.differing_arguments(pair))]
            found += [f"the first reads {counts[0]} tensors in A and {counts[1]} in B"] * (counts[0] != counts[1])
            return f"{where}: {'; '.join(filter(None, found)) or 'other calls in A and in B'}"
        name, other = ("A", "B") if known[0] else ("B", "A")
        run, calls = (self.one, known[0]) if known[0] else (self.other, known[1])
        step, keys = run.steps[calls[0]], {key_of(run.calls[k]) for k in calls}
        counts = [sum(one.steps[k] <= step and key_of(one.calls[k]) in keys for k in one.own) for one in self.runs]
        text = f"{name} calls {where}, in another place than {other}"
        if counts[0] != counts[1]:
            text += f": of {count:,} calls in each, A makes {counts[0]:,} up to the end of step {step}, B {counts[1]:,}"
        return text


def place_of(call: Call) -> tuple[str, ...]:
    """What a call is, and where."""
    return call.op, call.phase, call.module


def _line_of(call: Call) -> tuple[str, ...]:
    return call.op, call.phase, call.module, call.line


def where_of(calls: Sequence[Call], with_line: bool = True) -> str:
    """What calls of one phase are, and where: "aten::mul in 0, 1 (recompute), train.py:12"; the line if it is one."""
    ops = some_of(dict.fromkeys(call.op for call in calls))
    modules = some_of(dict.fromkeys(module_name(call.module) for call in calls))
    lines = {call.line for call in calls if with_line}
    line = f", {short_line(lines.pop())}" if len(lines) == 1 and "" not in lines else ""
    return f"{ops} in {modules}{phase_of(calls[0])}{line}"


def phase_of(call: Call) -> str:
    """The phase of a call in a sentence: " (backward)"."""
    return "" if call.phase == "forward" else f" ({call.phase})"


def input_shapes(call: Call) -> tuple[tuple[int, ...], ...]:
    """The shapes of what a call reads."""
    return tuple(tuple(info.shape) for info in call.inputs)


def argument_text(value: Argument) -> str:
    """An argument in a sentence: lists in brackets, texts as they are."""
    return str(list(value)) if isinstance(value, tuple) else str(value)


def argument_texts(arguments: Mapping[str, tuple[Argument, Argument]]) -> str:
    """Arguments that differ, for a sentence: "eps 1e-05 in A, 0.1 in B"."""
    return ", ".join(f"{name} {argument_text(a)} in A, {argument_text(b)} in B" for name, (a, b) in arguments.items())
