"""The comparison of two recordings with values: the facts by which they differ, in the order of the run.

NOTE [ Where runs part ]
The calls of both runs are walked in the order of the first (see `pairing`). At each call that both made, three things
are compared: what it reads, by the digests of its inputs; its other arguments; its results. A difference is a fact of
its own if no earlier one explains it:

- Its inputs differ. If a call wrote them whose results differ, that call has the fact. Otherwise a parameter, a batch
  or another tensor from outside differs, calls of one run alone wrote it, or the call reads another part of a tensor.
- Its inputs are equal, and its arguments are not.
- Both are equal, and its results are not: it drew from generators that differ, ran in another dtype or under another
  policy, or it computes something else.

The states of optimizers are compared at the start of their first step. Calls that initialize parameters are not
compared: the parameters are, where they are first read. Calls of one run alone before the first aligned call set a
program up, and are not facts unless what they leave is read and differs.

NOTE [ What counts as rounding ]
If nothing differs that may select other kernels, every difference has a cause. Otherwise (another PyTorch, device, CPU
or setting, or compiled code) results may round differently. `Run.rounding` has the error that is attributed to that.
The walk then goes on behind such a call, without the facts that a rounding error sets off in the calls that read it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch_promote.observe.call import COMPILED_FUNCTION, TENSORS
from torch_promote.observe.ops import facts_of
from torch_promote.reading.pairing import (
    Gap,
    Pair,
    Pairing,
    argument_text,
    argument_texts,
    input_shapes,
    phase_of,
    place_of,
)
from torch_promote.reading.run import Run, relative_error
from torch_promote.recording.program_state import PARAMETERS
from torch_promote.recording.values import EMPTY
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import module_name, some_of, spell_number

if TYPE_CHECKING:
    from torch_promote.observe.call import Argument, Call
    from torch_promote.recording.recording import OptimizerState, Source

Kind: TypeAlias = Literal["weight", "state", "input", "arguments", "shape", "policy", "structure", "op", "rounding"]
"""What differs between two runs."""

#: Compiled functions round more often, and less, than the calls that they replace.
_COMPILED_ROUNDS = 16.0
#: The error up to which numbers of another dtype are the same numbers, rounded.
_MOST_OF_A_DTYPE = 1e-2
#: States that are numbers of at least 0: of these, the magnitude tells all.
_NEVER_NEGATIVE = ("scale of GradScaler", "step of ")
_OF_SCALER = " of GradScaler"


@dataclass(frozen=True)
class Fact:
    """One thing that differs between two runs.

    Attributes:
        kind: What differs.
        text: It, as a sentence.
        one: The number of the call in the first run where it shows first; None if that has no such call.
        other: That in the second run.
        step: The number of optimizer steps before.
        error: The relative L2 error of what differs; None if it is unknown.
        parameter: The parameter or buffer that differs, or whose gradient does.
        arguments: The arguments that differ, with both values.
        state: The names of the states that differ.
        calls: The number of calls that it is true of.
        others: The number of calls of the op and phase in which the same arguments differ, with other values.
        alone: The numbers of the calls that it says each run makes alone.
    """

    kind: Kind
    text: str
    one: int | None = None
    other: int | None = None
    step: int = 0
    error: float | None = None
    parameter: str = ""
    arguments: Mapping[str, tuple[Argument, Argument]] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    calls: int = 1
    others: int = 0
    alone: tuple[int, int] = (0, 0)


class Walk:
    """Walks through two runs."""

    def __init__(
        self,
        pairing: Pairing,
        may_round: bool,  # whether other kernels may have run, so that a small error is rounding
        with_values: bool,  # whether both have values. Otherwise the attributes of calls are compared
        other_torch: bool = False,  # whether the versions of PyTorch differ, which may make other calls
    ) -> None:
        self.pairing: Pairing = pairing
        self.one: Run = pairing.one
        self.other: Run = pairing.other
        self.runs: tuple[Run, Run] = pairing.runs
        self._may_round = may_round
        self._with_values = with_values
        self._other_torch = other_torch
        self.facts: list[Fact] = []  # what differs, in the order of the runs
        # The calls that both runs made, without views and conversions, in the order of the first run.
        self.pairs: list[Pair] = []
        self.views: list[Pair] = []  # those that are views or conversions
        # For each of `pairs`, the relative error of its results; None if it is unknown.
        self.errors: list[float | None] = []
        self.of_versions: list[Gap] = []  # those that versions of PyTorch explain
        self.rounded: list[tuple[Pair, float]] = []  # the calls whose results differ by rounding, on equal inputs
        self.unknown: int = 0  # the number of calls in both runs of whose results one was not read
        # The number of calls without results, such as item(), that read what differs by an unknown error.
        self.read_at_last: int = 0
        self.differ: bool = False  # whether the results of a call in both runs differ
        self._places: dict[Any, int] = {}  # of facts that are true of several calls
        self._tainted: tuple[set[int], set[int]] = set(), set()  # calls whose results differ
        self._told: set[int] = set()  # the ids of gaps that are facts
        self._told_rows: set[tuple[int, str]] = set()  # the ops of one run alone that facts tell
        self._from_workers: dict[int, Any] = {}  # the keys of gaps that made in one run what a fact is about
        self._step = -1
        #: Numbers of an optimizer that differ, until a call shows them: the step, the text and the names.
        self._numbers: tuple[int, str, tuple[str, ...]] | None = None
        self._unexplained: list[Pair] = []  # views and conversions whose results differ
        #: Whether one run alone initializes its model, so that what they call before their first step differs.
        self._start_apart: bool = bool(self.one.initial) != bool(self.other.initial)
        # By op, phase and differing arguments, the first view, which may be one of equal elements.
        self._first_views: dict[tuple[Any, ...], Pair] = {}
        self._reads_numbers = False  # whether the program has read a number out of a tensor that differs
        self._walk()

    def _walk(self) -> None:
        for i, j in self.pairing.order:
            if i is not None and j is not None:
                self._enter_step(self.one.steps[i])
                (self._see_view if self.one.is_transparent(i) else self._see)(Pair(i, j))
                continue
            side, k = (0, i) if i is not None else (1, j)
            assert k is not None
            gap = self.pairing.gap_of[side][k]
            gap.tainted = gap.tainted or self._is_tainted(side, k)
            if gap is not self.pairing.tail and k == (gap.one or gap.other)[-1]:
                self._see_gap(gap)
        for pair in self._unexplained:
            if not self.facts and not self.rounded and not self.is_overwritten(pair):  # no call has read it
                self._explain(pair, self.error_of(pair), self._differing(pair), {})
        if any(self._tainted):
            self._tell_numbers()
        self._compare_names()
        self._compare_gradients()
        # Those of a step's start come before those of its calls, and arguments, such as a flag for training, before
        # calls of one run alone.
        made: dict[int, int] = {}
        for place, fact in reversed([*enumerate(self.facts)]):
            made |= {fact.step: place} if fact.kind == "structure" else {}
        # A batch that a worker has made in one run, and the program in the other, comes before the calls that made it.
        drawn = {place: self._places[key] for place, key in self._from_workers.items() if key in self._places}

        def rank(place: int) -> tuple[float, ...]:
            fact = self.facts[place]
            starts = fact.kind in ("weight", "state") or (bool(fact.parameter) and fact.kind != "structure")
            first = made.get(fact.step, place) if fact.kind == "arguments" else drawn.get(place, len(self.facts))
            return fact.step, not starts, min(place, first - 0.5)

        ordered = [self.facts[place] for place in sorted(range(len(self.facts)), key=rank)]
        self.facts = [self._counted(fact) for fact in ordered if not self._is_misaligned(fact)] or ordered

    def _counted(self, fact: Fact) -> Fact:
        """The fact, with the numbers of all calls in which the arguments differ: an earlier fact may explain some."""
        if not fact.arguments or fact.one is None:
            return fact
        first = self.one.calls[fact.one]
        found = Counter[bool]()
        for pair in (*self.pairs, *self.views):
            call = self.one.calls[pair.one]
            if (call.name, call.phase) == (first.name, first.phase):
                arguments = self.pairing.differing_arguments(pair)
                found[arguments == fact.arguments] += arguments.keys() == fact.arguments.keys()
        return replace(fact, calls=found[True], others=found[False])

    def _is_misaligned(self, fact: Fact) -> bool:
        """Whether the calls of a step have the same arguments in both runs, of which one is aligned with another."""
        if fact.kind != "arguments" or fact.one is None or fact.other is None:
            return False
        places = place_of(self.one.calls[fact.one]), place_of(self.other.calls[fact.other])
        given = [
            [run.calls[k].arguments for k in run.own if run.steps[k] == fact.step and place_of(run.calls[k]) == place]
            for run, place in zip(self.runs, places, strict=True)
        ]
        return given[0] == given[1]

    def _call_of(self, fact: Fact) -> Call | None:
        """The call that a fact names."""
        if fact.one is not None:
            return self.one.calls[fact.one]
        return None if fact.other is None else self.other.calls[fact.other]

    def _compare_names(self) -> None:
        """Adds the parameters and buffers of one run alone."""
        names = self.one.named.keys(), self.other.named.keys()
        if not (all(names) and self.facts) or names[0] == names[1]:
            return
        alone = [[name for name in names[side] if name not in names[1 - side]] for side in (0, 1)]
        text = "; ".join(f"{'AB'[side]} alone reads {some_of(found)}" for side, found in enumerate(alone) if found)
        readers = [
            self._reader(run, run.named[found[0]]) if found else None
            for run, found in zip(self.runs, alone, strict=True)
        ]
        kind = "parameters and buffers"
        fact = Fact("structure", f"Of {kind}, {text}.", readers[0], readers[1], self._step_of(readers[0], readers[1]))
        place = next((i for i, one in enumerate(self.facts) if one.kind not in ("weight", "state", "policy")), None)
        self.facts.insert(len(self.facts) if place is None else place, fact)

    def _compare_gradients(self) -> None:
        """Adds the parameters that have a gradient in one run alone, at the end of the first such step."""
        common = self.one.named.keys() & self.other.named.keys()
        for step, ends in enumerate(zip(self.one.recording.ends, self.other.recording.ends, strict=False)):
            sides = [[name for name in end.gradients if name in common] for end in ends]
            alone = [[name for name in sides[i] if name not in ends[1 - i].gradients] for i in (0, 1)]
            if any(alone):
                self._insert_gradients(step, alone)
                return

    def _insert_gradients(self, step: int, alone: Sequence[Sequence[str]]) -> None:
        text = "; ".join(f"{'AB'[i]} alone has those of {some_of(found)}" for i, found in enumerate(alone) if found)
        name = (alone[0] or alone[1])[0]
        one, other = self._first_of_optimizer(step)
        fact = Fact("structure", f"Of gradients, {text}.", one, other, step, parameter=name)
        calls = [self._call_of(one) for one in self.facts]
        later = (i for i, call in enumerate(calls) if call is not None and call.phase in ("backward", "optimizer"))
        self.facts.insert(next(later, len(self.facts)), fact)

    # --- facts

    def _add(self, fact: Fact, key: Any = None) -> None:
        """Adds a fact, or counts it if it is true of another call already."""
        place = self._places.get(key) if key is not None else None
        if place is None:  # one sentence may be true of calls of several lines
            place = next(
                (k for k, one in enumerate(self.facts) if (one.kind, one.text) == (fact.kind, fact.text)), None
            )
        if place is not None:
            self.facts[place] = replace(self.facts[place], calls=self.facts[place].calls + 1)
            return
        if key is not None:
            self._places[key] = len(self.facts)
        self.facts.append(fact)

    def _step_of(self, i: int | None, j: int | None) -> int:
        return self.one.steps[i] if i is not None else self.other.steps[j] if j is not None else 0

    def place(self, i: int | None, j: int | None) -> str:
        """Where a call is, for a sentence: "aten::mul in (model), step 3, train.py:12"."""
        call = self.one.calls[i] if i is not None else self.other.calls[j] if j is not None else None
        if call is None:
            return "the program"
        return f"{call.op} in {module_name(call.module)}{phase_of(call)}"

    # --- optimizers

    def _enter_step(self, step: int) -> None:
        """Called when the walk reaches a step."""
        if step == self._step:
            return
        self._step = step
        states = [[one for one in run.recording.states if one.step == step] for run in self.runs]
        if step < min(len(run.recording.ends) for run in self.runs):  # a state at the end follows from what is before
            for one, other in zip(*states, strict=False):
                self._compare_states(one, other)

    def _tell_numbers(self) -> None:
        """Adds the numbers of an optimizer that differ."""
        if self._numbers:
            step, text, names = self._numbers
            self._numbers = None
            self._add(Fact("state", text, *self._first_of_optimizer(step), step=step, state=names))

    def _first_of_optimizer(self, step: int) -> tuple[int | None, int | None]:
        found: list[int | None] = []
        for run in self.runs:
            calls = [i for i in run.own if run.steps[i] == step and run.calls[i].phase == "optimizer"]
            calls = calls or [i for i in run.own if run.steps[i] > step]  # of a compiled step
            both = self.pairing.partners[len(found)]  # not those that load a state, which one run alone has
            pairs = [Pair(i, both[i]) if not found else Pair(both[i], i) for i in calls if i in both]
            differing = [pair[len(found)] for pair in pairs if self.pairing.differing_arguments(pair)]
            found.append(next(iter([*differing, *(pair[len(found)] for pair in pairs), *calls]), None))
        return found[0], found[1]

    def _compare_states(self, one: OptimizerState, other: OptimizerState) -> None:
        alone = [
            [name for name in state.tensors if name not in without.tensors]
            for state, without in ((one, other), (other, one))
        ]
        # The model may have another name in one run: the optimizer has its parameters in one order.
        whats = [
            [(name.partition(" of ")[0], state.tensors[name].count) for name in found]
            for state, found in zip((one, other), alone, strict=True)
        ]
        if whats[0] == whats[1]:
            names_of = dict(zip(alone[1], alone[0], strict=True))
            renamed = {names_of.get(name, name): values for name, values in other.tensors.items()}
            other = replace(other, tensors=renamed)
        names: list[str] = []
        texts: list[str] = []
        missing: dict[str, list[str]] = {"A": [], "B": []}
        for name in dict.fromkeys([*one.tensors, *other.tensors]):
            first, second = one.tensors.get(name), other.tensors.get(name)
            if first is None or second is None:
                missing["A" if first is None else "B"].append(name)
                names.append(name)
            elif first.digest != second.digest:
                names.append(name)
                sizes = [one.amax for one in (first, second) if one.count == 1 and name.startswith(_NEVER_NEGATIVE)]
                spelled = [f"{size:g}" for size in sizes if size is not None]
                both = "is {} in A and {} in B".format(*spelled) if len(spelled) > 1 else ""
                texts.append(f"{name} {both or f'differs{_l2(relative_error(first, second))}'}")
        steps = {text.partition(" is ")[2] for text in texts if text.startswith("step of ")}
        if len(steps) == 1:  # such as "179 in A and 199 in B", of two parts of one training
            texts = [f"the number of steps is {steps.pop()}", *(one for one in texts if not one.startswith("step of "))]
        numbers = _differing_numbers(one.numbers, other.numbers)
        step = one.step
        if not names:
            # Another kind of optimizer has other ones, and calls other ops.
            shown = {text: names for text, names in numbers.items() if "missing" not in text}
            known = (one.state for one in self.facts if one.kind == "state")
            if (
                shown
                and not self._numbers
                and not any({*itertools.chain(*shown.values())} <= {*told} for told in known)
            ):
                text = f"At the start of step {step}, {some_of(shown)}."
                self._numbers = step, text, tuple(itertools.chain(*shown.values()))
            return
        if step and self.facts:
            return  # what differs before explains it
        parts = [some_of(found) for found in (texts, numbers) if found]
        for run, absent in missing.items():
            if absent:
                parts.append(f"{some_of(absent)} {'are' if len(absent) > 1 else 'is'} missing in {run}")
        every = one.tensors.keys() | other.tensors.keys()
        texts = []
        for owner, is_scaler in (("the optimizer", False), ("GradScaler", True)):
            n, total = (sum(name.endswith(_OF_SCALER) == is_scaler for name in of) for of in (names, every))
            texts += [f"{n:,} of {total:,} tensors of {owner}'s state"] * bool(n)
        text = f"{' and '.join(texts)} differ at the start of step {step}: {'; '.join(parts)}."
        self._add(Fact("state", text, *self._first_of_optimizer(step), step=step, state=tuple(names)))

    @property
    def _state_differs(self) -> bool:
        return any(fact.kind == "state" for fact in self.facts)

    # --- calls of both runs

    def _see_attributes(self, pair: Pair) -> None:
        """Compares calls of which no contents are known."""
        for one in (pair, *self.pairing.inner_pairs(pair)):
            call, other = self.one.calls[one.one], self.other.calls[one.other]
            found = differing_attributes(call, other)
            if call.shapes != other.shapes:
                found.pop("arguments", None)  # sizes follow from shapes
            if set(found) == {"arguments"}:
                arguments = self.pairing.differing_arguments(one)
                if arguments:
                    self._add_arguments(one, arguments, None, ())
            elif found:
                what, (before, after) = next(iter(found.items()))
                if call.dtypes != other.dtypes:
                    what, before, after = "dtypes", call.dtypes, other.dtypes
                text = f"{self.place(*one)}: {what} {before} in A, {after} in B{_policies(call, other)}."
                self._add(Fact("policy", text, *one, self._step_of(*one)), ("policy", call.name, what, before, after))

    def _writers(self, side: int, k: int) -> list[int]:
        """What is in the memory that a call reads, without arguments whose content it ignores."""
        run = self.runs[side]
        ignored = facts_of(run.calls[k].name).ignored
        infos = zip(run.calls[k].inputs, run.reads(k), strict=False)
        return [w for info, read in infos if info.name.partition("[")[0] not in ignored for w in read.written_by]

    def _see_view(self, pair: Pair) -> None:
        self.views.append(pair)
        if not self._with_values:
            self._see_attributes(pair)
            return
        one, other = (run.results(k) for run, k in zip(self.runs, pair, strict=True))
        call, theirs = self.one.calls[pair.one], self.other.calls[pair.other]
        undefined = any(
            w in run.undefined for side, run in enumerate(self.runs) for w in self._writers(side, pair[side])
        )
        arguments = self.pairing.differing_arguments(pair)
        if arguments:
            self._first_views.setdefault((call.name, call.phase, tuple(arguments)), pair)
        if (one == other and _dtypes(call) == _dtypes(theirs)) or undefined:
            return
        if _dtypes(call) != _dtypes(theirs) or arguments:
            self._explain(pair, self.error_of(pair), self._differing(pair), arguments)
            self._taint(pair)
        else:  # a call that reads it is a better place to name
            self._unexplained.append(pair)
            if any(w in self._tainted[side] for side in (0, 1) for w in self._writers(side, pair[side])):
                self._taint(pair)  # such as a reshape that copies

    def _see(self, pair: Pair) -> None:
        if not self._with_values:
            self.pairs.append(pair)
            self.errors.append(None)
            self._see_attributes(pair)
            return
        one, other = (run.results(k) for run, k in zip(self.runs, pair, strict=True))
        items = self.one.items(pair.one) if one != other else []
        if items and items == self.other.items(pair.other) and not self.pairing.differing_arguments(pair):
            self.pairs.append(pair)  # a foreach op, whose lists have the same contents in another order
            self.errors.append(0.0)
            return
        dtypes = [_dtypes(run.calls[k]) for run, k in zip(self.runs, pair, strict=True)]
        known = bool(one and other)
        error = 0.0 if known and one == other else self.error_of(pair)
        self.pairs.append(pair)
        self.errors.append(error)
        if not known and self.one.calls[pair.one].outputs:
            self.unknown += 1
        same = one == other and dtypes[0] == dtypes[1]
        differing = self._differing(pair)
        arguments = self.pairing.differing_arguments(pair)
        if not same or not known or differing or arguments:
            self._explain(pair, error, differing, arguments, known)
        # Also of equal results, other memory that it has written may differ: that which its backward reads.
        if not same or differing or (not known and any(self._is_tainted(side, k) for side, k in enumerate(pair))):
            self._taint(pair)
        self.differ = self.differ or not same
        if not self.one.calls[pair.one].outputs and differing:
            self._reads_numbers = True  # such as item()
            self.read_at_last += any(self._input_error(pair, place) is None for place in differing)

    def _taint(self, pair: Pair) -> None:
        self._tainted[0].add(pair.one)
        self._tainted[1].add(pair.other)

    def error_of(self, pair: Pair) -> float | None:
        """The largest relative error of the results of a call."""
        values = zip(self.one.values(pair.one), self.other.values(pair.other), strict=False)
        errors = [error for one, other in values if (error := relative_error(one, other)) is not None]
        return max(errors, default=None)

    def _input_error(self, pair: Pair, place: int) -> float | None:
        """The relative error of an input of a call."""
        values = []
        for run, k in zip(self.runs, pair, strict=True):
            read = run.reads(k)[place]
            values.append(run.values_of(read.written_by[-1], read.digest) if read.written_by else EMPTY)
            if values[-1].digest != read.digest:
                return None
        return relative_error(values[0], values[1])

    def _differing(self, pair: Pair) -> list[int]:
        """The indices of the inputs whose contents differ."""
        reads = zip(self.one.reads(pair.one), self.other.reads(pair.other), strict=False)
        return [place for place, (a, b) in enumerate(reads) if a.digest and b.digest and a.digest != b.digest]

    def is_overwritten(self, pair: Pair) -> bool:
        """Whether a view is one of memory from outside into which a later call writes, and that is all."""
        found = [read.written_by for read in self.one.reads(pair.one)]
        later = self.one.own[bisect.bisect(self.one.own, pair.one) :]
        return any(
            one[0] < 0 and any(one == read.written_by and not read.digest for k in later for read in self.one.reads(k))
            for one in found
            if one
        )

    def _explain(
        self,
        pair: Pair,
        error: float | None,
        differing: Sequence[int],
        arguments: dict[str, tuple[Argument, Argument]],
        known: bool = True,
    ) -> None:
        """Adds what explains that what a call reads differs, its other arguments, or its results."""
        call, other = self.one.calls[pair.one], self.other.calls[pair.other]
        if call.phase == "optimizer" and input_shapes(call) != input_shapes(other):
            self._tell_numbers()  # the lists of groups with other parameters
        if self._state_differs and call.phase == "optimizer":
            return  # the optimizer reads that state
        for place in differing:
            self._explain_input(pair, place)
        same = self.one.results(pair.one) == self.other.results(pair.other) and _dtypes(call) == _dtypes(other)
        if arguments:
            if not self._follows(pair, differing, arguments):
                self._add_arguments(pair, arguments, error, differing)
        elif known and not (same or differing or self._are_rounded(pair)):
            self._explain_results(pair, call, other, error)

    def _follows(
        self, pair: Pair, differing: Sequence[int], arguments: Mapping[str, tuple[Argument, Argument]]
    ) -> bool:
        """Whether an earlier fact explains that the arguments of a call differ."""
        found = self.facts or self.rounded
        is_flag = any(isinstance(value, bool) for both in arguments.values() for value in both)
        if (self._reads_numbers and not is_flag) or (
            found and differing and self.one.calls[pair.one].phase == "backward"
        ):
            return True
        infos = [run.calls[k].inputs for run, k in zip(self.runs, pair, strict=True)]
        if self.facts and any(a.shape != b.shape for a, b in zip(*infos, strict=False)):
            return bool(differing)  # a dim or a size
        return bool(differing) and any(fact.kind in ("shape", "structure", "policy") for fact in self.facts)

    def _are_rounded(self, pair: Pair) -> bool:
        """Whether a call reads what differs by rounding."""
        return bool(self.rounded) and any(self._is_tainted(side, k) for side, k in enumerate(pair))

    def _add_arguments(
        self, pair: Pair, arguments: dict[str, tuple[Argument, Argument]], error: float | None, differing: Sequence[int]
    ) -> None:
        call, other = self.one.calls[pair.one], self.other.calls[pair.other]
        earlier = self._first_views.get((call.name, call.phase, tuple(arguments)), pair)
        if earlier != pair and self._step_of(*earlier) == self._step_of(*pair):
            pair, arguments = earlier, self.pairing.differing_arguments(earlier)
            call, other = self.one.calls[pair.one], self.other.calls[pair.other]
        shapes = call.shapes, other.shapes
        kind: Kind = "arguments"
        text = f"{self.place(*pair)}: {argument_texts(arguments)}."
        if _dtypes(call) != _dtypes(other) and set(arguments) <= {"dtype", "self"}:
            kind = "policy"
        elif shapes[0] != shapes[1] and not differing:
            same = [info.shape for info in call.inputs] == [info.shape for info in other.inputs]
            if not (same and call.inputs) or self.one.is_transparent(pair.one):  # otherwise such as topk's k
                kind = "shape"
            text = f"{text[:-1]}, so its shapes are {shapes[0]} in A and {shapes[1]} in B."
        if self._numbers and self._numbers[0] < self._step_of(*pair):
            self._tell_numbers()  # such as a scheduler's, which show in a later step
        if self._numbers and any(name.startswith("last_epoch") for name in self._numbers[2]):
            self._tell_numbers()  # the schedule is at another place
        if call.phase == "optimizer" and self._state_differs:
            return
        if call.phase == "optimizer" and self._numbers:
            text, self._numbers = f"{text} {self._numbers[1]}", None
        key = kind, call.name, call.phase, tuple(arguments)
        self._add(Fact(kind, text, *pair, self._step_of(*pair), error, arguments=arguments), key)

    def _explain_results(self, pair: Pair, call: Call, other: Call, error: float | None) -> None:
        """Adds why a call with equal inputs and arguments has other results."""
        step, place = self._step_of(*pair), self.place(*pair)
        draws = [run.recording.draws.get(k, "") for run, k in zip(self.runs, pair, strict=True)]
        if draws[0] and draws[1] and draws[0] != draws[1]:
            name = draws[0].rpartition(" ")[0]
            generator = f"the generator {name}" if name != "its own" else "its own generator"
            text = f"{place} draws other random numbers: the states of {generator} differ before it."
            self._add(Fact("input", text, *pair, step, error, state=(generator,)), ("draw", name))
        elif any(w in run.undefined for side, run in enumerate(self.runs) for w in self._writers(side, pair[side])):
            text = f"{place} reads memory that no call has written."
            self._add(Fact("input", text, *pair, step, error), ("undefined", call.name))
        elif call.dtypes != other.dtypes:
            text = f"{place}, on equal inputs: {call.dtypes} in A, {other.dtypes} in B{_policies(call, other)}."
            self._add(Fact("policy", text, *pair, step, error), ("policy", call.name, call.dtypes, other.dtypes))
        elif call.policy != other.policy:
            text = f"{place}, on equal inputs{_policies(call, other)}."
            self._add(Fact("policy", text, *pair, step, error), ("policy", call.name))
        elif _attributes(call)["casts"] != _attributes(other)["casts"]:
            casts = [_attributes(one)["casts"] for one in (call, other)]
            text = f"{place}, on equal inputs: casts ({casts[0]}) in A, ({casts[1]}) in B."
            self._add(Fact("policy", text, *pair, step, error), ("casts", call.name))
        elif (
            error is not None and error <= self.one.rounding(pair.one) and (self._may_round or self.other_kernel(pair))
        ):
            self.rounded.append((pair, error))
        else:
            shown = _l2(error)
            arguments = "" if not (call.arguments or other.arguments) else " and arguments"
            reads = self.one.reads(pair.one), self.other.reads(pair.other)
            unread = sum(not (a.digest and b.digest) for a, b in zip(*reads, strict=False))
            unread += abs(len(call.inputs) - len(reads[0]))
            text = f"{place} has other results{shown} on equal inputs{arguments}."
            if unread:
                text = f"{place} has other results{shown}. {unread:,} of its {len(call.inputs):,} inputs were not read."
            text += self.other_kernel(pair)
            self._add(Fact("op", text, *pair, step, error), ("op", call.name, call.phase))

    def other_kernel(self, pair: Pair) -> str:
        """What tells that another kernel may have run in the other run, as a sentence; "" if nothing does."""
        inner = [
            dict.fromkeys(run.calls[k].name for k in run.inner(i) if not run.is_transparent(k))
            for run, i in zip(self.runs, pair, strict=True)
        ]
        if inner[0] != inner[1]:
            names = [", ".join(one) or "no other op" for one in inner]
            return f" It called {names[0]} in A, and {names[1]} in B."
        infos = zip(self.one.calls[pair.one].inputs, self.other.calls[pair.other].inputs, strict=False)
        strides = next(((a, b) for a, b in infos if a.strides != b.strides), None)
        if strides is None:
            return ""
        texts = ["contiguous" if one.strides is None else f"strides {list(one.strides)}" for one in strides]
        return f" Its {strides[0].name} has other strides: {texts[0]} in A, {texts[1]} in B."

    # --- what a call reads

    def _explain_input(self, pair: Pair, place: int) -> None:
        """Adds what explains that an input of a call differs."""
        one = self.one.calls[pair.one]
        reads = self.one.reads(pair.one)[place], self.other.reads(pair.other)[place]
        infos = one.inputs[place], self.other.calls[pair.other].inputs[place]
        chains = [
            run.chain(read.written_by[-1]) if read.written_by else []
            for run, read in zip(self.runs, reads, strict=True)
        ]
        if infos[0].dtype is not infos[1].dtype:
            chains = [chain[:1] for chain in chains]  # a conversion explains it
        for side, chain in enumerate(chains):  # or a call of one run alone
            alone = next((place for place, k in enumerate(chain) if k in self.pairing.gap_of[side]), None)
            if alone is not None:
                chains[side] = chain[: alone + 1]
        for side, chain in enumerate(chains):
            known = self.runs[side].sources[-1 - chain[-1]].written_by if chain and chain[-1] < 0 else ()
            if any(k in self._tainted[side] for k in (*chain, *known, *reads[side].written_by)):
                return
        writers = [chain[-1] if chain else None for chain in chains]
        sources = [
            run.sources[-1 - w] if w is not None and w < 0 else None for run, w in zip(self.runs, writers, strict=True)
        ]
        named = next((one for one in sources if one is not None and one.name), None)
        gaps = [self.pairing.gap_of[side].get(w) if w is not None else None for side, w in enumerate(writers)]
        gap = gaps[0] or gaps[1]
        values = [
            run.values_of(w, read.digest) if w is not None else EMPTY
            for run, w, read in zip(self.runs, writers, reads, strict=True)
        ]
        error = relative_error(values[0], values[1])
        # Of a part of a tensor, only the digest is known; the tensors may be equal.
        others = bool(values[0].digest) and values[0].digest == values[1].digest and infos[0].dtype is infos[1].dtype
        outside = any(w in run.outside for run, w in zip(self.runs, writers, strict=True))
        undefined = [w in run.undefined for run, w in zip(self.runs, writers, strict=True)]
        if any(undefined):
            where = "" if all(undefined) else f", in {'AB'[undefined[1]]}"
            text = f"{self.place(*pair)} reads other contents ({infos[0].name}){where} of memory that no recorded call "
            text += "has written."
            key = "undefined", one.name
            self._add(Fact("input", text, *pair, self._step_of(*pair)), key)
            if gap is not None:
                self._from_workers.setdefault(self._places[key], self._key_of(gap))
        elif infos[0].shape != infos[1].shape and any(fact.kind == "shape" for fact in self.facts):
            pass
        elif named is not None:
            if gap is not None and (one.phase == "optimizer" or gap.tainted or id(gap) in self._told):
                self._explain_gap(gap, pair, place, None)
            else:
                self._explain_named(pair, place, named, sources, writers)
        elif infos[0].dtype is not infos[1].dtype and self._explain_conversion(pair, place, error):
            pass
        elif others and (outside or (gap is not None and not gap.tainted)):
            text = (
                f"{self.place(*pair)} reads other elements ({infos[0].name}) of a tensor that is equal in the two runs."
            )
            self._add(Fact("input", text, *pair, self._step_of(*pair)), ("elements", one.name))
        elif outside:
            self._explain_before(pair, place, error)
        elif gap is not None:
            self._explain_gap(gap, pair, place, error)
        elif (
            sources[0] is not None
            and sources[1] is not None
            and (sources[0].values.digest != sources[1].values.digest or infos[0].shape != infos[1].shape)
        ):
            self._explain_sources(pair, place, (sources[0], sources[1]), error)
        else:
            self._explain_writers(pair, place, writers, error)

    def _explain_writers(self, pair: Pair, place: int, writers: Sequence[int | None], error: float | None) -> None:
        """Explains an input that both runs have computed, or of which one has."""
        step, what = self._step_of(*pair), [self._described(side, w) for side, w in enumerate(writers)]
        call, info = self.one.calls[pair.one], self.one.calls[pair.one].inputs[place]
        reads = self.one.reads(pair.one)[place], self.other.reads(pair.other)[place]
        shapes = list(info.shape), list(self.other.calls[pair.other].inputs[place].shape)
        kind: Kind = "input"
        key: tuple[str, ...] = "elements", call.name, what[0]
        first: tuple[int | None, int | None] = pair
        text = f"{self.place(*pair)} reads other elements of {what[0]} ({info.name}) in the two runs."
        changed = [
            w is not None and len(run.results(w)) == 1 and run.results(w)[0] != read.digest
            for run, w, read in zip(self.runs, writers, reads, strict=True)
        ]
        if sum(changed) == 1:  # the other run reads what the call has written
            text = f"{self.place(*pair)} reads other contents ({info.name}): in {'AB'[changed[1]]}, they are no longer "
            text += f"{what[changed[1]]}, and no recorded call has changed them."
        a, b = writers
        view = self._view_between(pair, (reads[0].written_by, reads[1].written_by))
        if a is None or b is None:
            text = f"{self.place(*pair)} reads other contents ({info.name}): A reads {what[0]}, B reads {what[1]}."
            key = "unknown", call.name
        elif shapes[0] != shapes[1]:
            kind, key, error = "shape", ("shape", call.name), None
            text = f"{self.place(*pair)} reads {shapes[0]} of {what[0]} in A, and {shapes[1]} of {what[1]} in B"
            text += f" ({info.name})."
        elif view is not None:
            side, k = view
            name = self.runs[side].calls[k]
            text = f"Only {'AB'[side]} calls {name.op} on what {self.place(*pair)} reads ({info.name})."
            kind, key, first = "structure", ("view", name.name), (k, None) if side == 0 else (None, k)
        elif what[0] != what[1]:
            kind, key = "input" if a < 0 or b < 0 else "structure", ("another", call.name)
            text = f"{self.place(*pair)} reads another tensor ({info.name}): {what[0]} in A, {what[1]} in B."
        elif a >= 0 and not (a in self.pairing.partners[0] and b in self.pairing.partners[1]):
            if self.facts or self.rounded:
                return  # of what compiled code reads, nothing is known
            kind, key = "op", ("compiled",)
            text = (
                f"{self.place(*pair)} reads what compiled code has computed ({info.name}), which differs{_l2(error)}."
            )
        elif a >= 0 and self.pairing.partners[0][a] != b:
            made = self.one.calls[a].inputs or self.other.calls[b].inputs
            kind = "structure" if made else "input"  # batches in another order
            text = f"{self.place(*pair)} reads {what[0]} ({info.name}) in both runs, but of another call in B."
        elif a >= 0 and self.one.results(a) != self.other.results(b):
            return  # it has several writers, of which one explains it
        elif a >= 0 and facts_of(self.one.calls[a].name).communicates:
            if self.facts or self.rounded:
                return  # perhaps of the other process
            text = f"{self.place(*pair)} reads what {self.one.calls[a].op} has received ({info.name}), which differs."
        elif len(reads[0].written_by) > 1:
            for one in reversed(self.views):  # through which it was written
                arguments = self.pairing.differing_arguments(one) if one.one < a and one.other < b else {}
                before = {k for read in self.one.reads(one.one) for k in read.written_by}
                if arguments and before & {*reads[0].written_by}:
                    self._add_arguments(one, arguments, None, ())
                    return
            text = f"{self.place(*pair)} reads other contents ({info.name}) where {what[0]} was written last."
        self._add(Fact(kind, text, *first, step, error), key)

    def _described(self, side: int, writer: int | None) -> str:
        run = self.runs[side]
        if writer is None:
            return "memory of which nothing is known"
        if writer < 0:
            source = run.sources[-1 - writer]
            return f"the {source.kind} {source.name}" if source.name else "a tensor that no recorded call has made"
        call = run.calls[writer]
        return f"the result of {call.op} in {module_name(call.module)}"

    def _view_between(self, pair: Pair, written: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, int] | None:
        """The last view of what a call reads that one run alone has made: the run's index, and the call."""
        for side, run in enumerate(self.runs):
            for k in sorted((k for k in self.pairing.gap_of[side] if k < pair[side]), reverse=True):
                infos = run.calls[k].inputs, run.calls[k].outputs
                is_other = [one.shape for one in infos[0][:1]] != [one.shape for one in infos[1]]  # numpy() calls `to`
                is_other |= run.results(k) != tuple(read.digest for read in run.reads(k)[:1])
                if (
                    is_other
                    and run.is_transparent(k)
                    and any(read.written_by == written[side] for read in run.reads(k))
                ):
                    return side, k
        return None

    def _explain_named(
        self, pair: Pair, place: int, named: Source, sources: Sequence[Source | None], writers: Sequence[int | None]
    ) -> None:
        """Explains that a parameter, a buffer, a gradient or a state differs."""
        step, name = self._step_of(*pair), named.name
        both = [one.values if one is not None else None for one in sources]
        error = None if both[0] is None or both[1] is None else relative_error(both[0], both[1])
        is_later = any(one is not None and one.step > 0 for one in sources)
        if is_later and None not in sources and self.facts:
            return  # no recorded call writes it in either run, and what it was before differs
        if named.kind == "state" and self._state_differs:
            return
        if named.kind == "state":
            text = f"{self.place(*pair)} reads another {name}."
            self._add(Fact("state", text, *pair, step, error, state=(name,)), ("state", name))
            return
        shapes = [list(self.runs[side].calls[k].inputs[place].shape) for side, k in enumerate(pair)]
        names = [one.name for one in sources if one is not None]
        others = any(w is None or (w >= 0 and not run.updates(w)) for run, w in zip(self.runs, writers, strict=True))
        if (others and named.kind != "gradient") or (
            len(names) > 1 and names[0] != names[1] and (all(names) or shapes[0] != shapes[1])
        ):
            what = [
                f"the {one.kind} {one.name}" if one is not None and one.name else self._described(side, writers[side])
                for side, one in enumerate(sources)
            ]
            text = f"{self.place(*pair)} reads {what[0]} in A and {what[1]} in B."
            self._add(Fact("structure", text, *pair, step), ("another", self.one.calls[pair.one].name))
            return
        if shapes[0] != shapes[1]:
            text = f"The {named.kind} {name} has the shape {shapes[0]} in A and {shapes[1]} in B."
            self._add(Fact("shape", text, *pair, step, None, name), ("shape of weights",))
            return
        dtypes = [self.runs[side].calls[k].inputs[place].dtype for side, k in enumerate(pair)]
        if dtypes[0] is not dtypes[1] and (error is None or error < _MOST_OF_A_DTYPE):
            text = (
                f"The {named.kind} {name} is {dtype_name(dtypes[0])} in A and {dtype_name(dtypes[1])} in B, with "
                "equal numbers but for rounding."
            )
            self._add(Fact("policy", text, *pair, step, error, name), ("dtype of weights", step))
            return
        if named.kind == "gradient":
            text = f"The gradient of {name} has other contents, which no recorded call has written."
            self._add(Fact("input", text, *pair, step, error, name), ("gradient", step))
            return
        where = f"when {self.place(*pair)} reads it in step {step}"
        text = f"The {named.kind} {name} has other contents{_l2(error)} {where}."
        key = "weight", step
        if key not in self._places:
            text += self._other_weights(name, step)
        self._add(Fact("weight", text, *pair, step, error, name), key)

    def _other_weights(self, name: str, step: int) -> str:
        if step:
            return ""
        common = [one for one in self.one.named if one in self.other.named]
        others = [
            one
            for one in common
            if self.one.named[one].values.digest != self.other.named[one].values.digest and one != name
        ]
        listed, differ = (f": {some_of(others)}", "differ") if others else ("", "differs")
        return f" Of {len(common):,} parameters and buffers that both runs read, {len(others) + 1:,} {differ}{listed}."

    def _explain_sources(self, pair: Pair, place: int, sources: tuple[Source, Source], error: float | None) -> None:
        """Explains that a tensor from outside of the recorded calls differs."""
        one, other = sources
        call, step = self.one.calls[pair.one], self._step_of(*pair)
        infos = call.inputs[place], self.other.calls[pair.other].inputs[place]
        where = f"{self.place(*pair)} ({infos[0].name})"
        if call.op.startswith("fsdp::") and self.facts:
            return  # what other processes have sent
        if call.phase not in ("forward", "recompute") and self.facts:
            return
        if infos[0].shape != infos[1].shape:
            text = f"{where} reads {list(infos[0].shape)} in A and {list(infos[1].shape)} in B from outside."
            self._add(Fact("shape", text, *pair, step), ("shape of input", call.name, place))
            return
        kind: Kind = "weight" if one.kind == other.kind == "parameter" else "input"
        what = "a parameter with other contents" if kind == "weight" else "another input"
        text = f"{where} reads {what}{_l2(error)}, which no recorded call has made."
        for run, theirs, source in (("A", self.other, one), ("B", self.one, other)):
            steps = [s.step for s in theirs.sources if s.kind == "input" and s.values.digest == source.values.digest]
            if steps:
                text += f" What {run} reads here, {'B' if run == 'A' else 'A'} reads first in step {steps[0]}."
                break
        self._add(Fact(kind, text, *pair, step, error), ("source", step, call.phase))

    def _explain_conversion(self, pair: Pair, place: int, error: float | None) -> bool:
        """Explains an input of another dtype; False if its numbers differ by more than rounding."""
        reads = self.one.reads(pair.one)[place], self.other.reads(pair.other)[place]
        if not (reads[0].written_by and reads[1].written_by):
            return False
        chains = [run.chain(read.written_by[-1]) for run, read in zip(self.runs, reads, strict=True)]
        roots = [chain[-1] for chain in chains]
        if any(root in self._tainted[side] for side, root in enumerate(roots)):
            return True
        values = [run.values_of(root) for run, root in zip(self.runs, roots, strict=True)]
        is_same = bool(values[0].digest) and values[0].digest == values[1].digest
        if not is_same and (error is None or error > _MOST_OF_A_DTYPE):
            return False
        infos = self.one.calls[pair.one].inputs[place], self.other.calls[pair.other].inputs[place]
        text = (
            f"{self.place(*pair)} reads {infos[0].name} as {dtype_name(infos[0].dtype)} in A and as "
            f"{dtype_name(infos[1].dtype)} in B, with equal numbers but for rounding."
        )
        shown: list[int | None] = list(pair)
        for side, chain in enumerate(chains):
            made = next((k for k in chain if k in self.pairing.gap_of[side]), None)
            if made is not None:
                text += f" Only {'AB'[side]} calls {self.runs[side].calls[made].op} before."
        step = self._step_of(*pair)
        self._add(Fact("policy", text, shown[0], shown[1], step, error), ("conversion", self.one.calls[pair.one].name))
        return True

    def _is_tainted(self, side: int, i: int) -> bool:
        """Whether a call reads what differs between the runs."""
        run, others = self.runs[side], self.runs[1 - side].contents
        for read in run.reads(i):
            if read.digest and read.digest in others:
                continue
            for writer in read.written_by:
                if writer < 0 or writer in self._tainted[side]:
                    return True
                gap = self.pairing.gap_of[side].get(writer)
                if gap is not None and gap.tainted:
                    return True
        return False

    # --- calls of one run alone

    def _see_gap(self, gap: Gap) -> None:
        """Adds calls of one run alone as a fact, if no earlier one explains them and they do not set a program up."""
        if id(gap) in self._told or self.one.compiled != self.other.compiled:
            if self.one.compiled != self.other.compiled:
                self._compare_compiled(gap)
            return
        computing = self.pairing.computing(gap)
        explained = gap.tainted and self.facts and not self.pairing.is_foreign(computing)
        if not any(computing) or (explained and not self._has_other_numbers(computing)):
            return
        phases = {run.calls[k].phase for run, calls in zip(self.runs, computing, strict=True) for k in calls}
        if gap.tainted and self.rounded and phases == {"backward"}:
            return  # of another kernel
        if gap.is_first and (self._start_apart or not all(computing)):
            return
        if all(run.makes_state(k) for run, calls in zip(self.runs, computing, strict=True) for k in calls):
            return
        if self._other_torch and self.pairing.depends_on_version(gap):
            self.of_versions.append(gap)
            return
        self.tell(gap, None)

    def _has_other_numbers(self, gap: Sequence[Sequence[int]]) -> bool:
        """Whether the runs call one op in one place with other tensors, and other numbers or flags."""
        if not (gap[0] and gap[1]):
            return False
        pair = Pair(gap[0][-1], gap[1][-1])
        calls = self.one.calls[pair.one], self.other.calls[pair.other]
        both = self.pairing.differing_arguments(pair).values() if calls[0].op == calls[1].op else ()
        return calls[0].phase == "forward" and any(not isinstance(value, tuple) for one in both for value in one)

    def tell(self, gap: Gap, error: float | None) -> None:
        """Adds calls of one run alone as a fact."""
        if id(gap) in self._told:
            return
        self._told.add(id(gap))
        computing = self.pairing.shown(gap)
        first = [calls[0] if calls else None for calls in computing]
        if any(run.calls[k].phase == "optimizer" for run, calls in self.pairing.sides(gap) for k in calls):
            self._tell_numbers()  # such as a weight_decay of 0, without which other ops are called
        writing = {run.parameter_of(k) for run, calls in self.pairing.sides(gap) for k in calls if run.computes(k)}
        parameter = writing.pop() if len(writing) == 1 and not all(computing) else ""
        kinds = [run.named[parameter].kind for run in self.runs if parameter in run.named]
        described, alone = self.pairing.described(gap)
        on = f"on the {kinds[0] if kinds else 'parameter'} {parameter}"
        on = (f", {on}" if any(alone) else f". {'A' if gap.one else 'B'} makes more {on}") if parameter else ""
        text = f"{described}{on}.{self.pairing.accumulated(gap)}{self.pairing.not_detached(gap)}"
        kind: Kind = "structure"
        if all(computing):
            ends = [run.calls[calls[-1]] for run, calls in zip(self.runs, computing, strict=True)]
            if ends[0].op == ends[1].op and _dtypes(ends[0]) != _dtypes(ends[1]):
                kind = "policy"
            found = self.error_of(Pair(computing[0][-1], computing[1][-1]))
            error = found if found is not None else error
        fact = Fact(kind, text, first[0], first[1], self._step_of(first[0], first[1]), error, parameter)
        made = [[run.calls[k] for k in calls] for run, calls in zip(self.runs, computing, strict=True)]
        rows = {(side, call.op) for side, calls in enumerate(made) for call in calls}
        if not rows <= self._told_rows:  # otherwise an earlier fact has counted these calls
            self._told_rows |= rows if any(alone) else {(side, op) for _, op in rows for side in (0, 1)}
            self._add(replace(fact, calls=max(1, *alone), alone=alone), self._key_of(gap))

    def _key_of(self, gap: Gap) -> tuple[Any, ...]:
        return "gap", tuple(tuple(run.calls[k].name for k in calls) for run, calls in self.pairing.sides(gap))

    def _explain_gap(self, gap: Gap, pair: Pair, place: int, error: float | None) -> None:
        """Explains that a call reads what calls of one run alone have written."""
        if self.one.compiled != self.other.compiled:
            self._explain_compiled(gap, pair, place, error)
        elif gap.tainted and (self.facts or self.rounded):
            pass
        elif gap.is_first and self._start_apart:
            self._explain_before(pair, place, error)
        else:
            self.tell(gap, error)

    def _explain_before(self, pair: Pair, place: int, error: float | None) -> None:
        """Explains that a call reads what was written before the part that the runs have in common."""
        call = self.one.calls[pair.one]
        text = (
            f"{self.place(*pair)} ({call.inputs[place].name}) reads other contents{_l2(error)}, which were written "
            "before the first call in common."
        )
        self._add(Fact("input", text, *pair, self._step_of(*pair), error), ("before", call.name))

    # --- compiled functions, of which one run has none

    def _explain_compiled(self, gap: Gap, pair: Pair, place: int, error: float | None) -> None:
        """Explains that a call reads what a compiled function computed in one of the runs."""
        # A small gradient, as of the bias of attention's keys, may be rounding: it may have the step's largest error.
        if error is None:
            return
        reads = self.one.reads(pair.one)[place]
        values = self.one.values_of(reads.written_by[-1], reads.digest) if reads.written_by else None
        step, call = self.one.steps[pair.one], self.one.calls[pair.one]
        largest = self._largest_gradient(step) if call.phase != "forward" else 0.0
        share = min((values.l2 or 0.0) / largest, 1.0) if values is not None and largest else 1.0
        # After a step, the weights differ as well.
        has_rounded = any(self.one.steps[earlier.one] < step for earlier, _ in self.rounded)
        if has_rounded or error * share <= _COMPILED_ROUNDS * self._rounding_in(gap):
            self.rounded.append((pair, error))
            return
        if not self._other_sources():
            self._tell_compiled(gap, self.place(*pair), error)

    def _rounding_in(self, gap: Gap) -> float:
        """The rounding of calls that a compiled function replaces: that of the least exact one."""
        run, calls = (self.one, gap.one) if self.other.compiled else (self.other, gap.other)
        return max((run.rounding(k) for k in calls), default=0.0)

    def _largest_gradient(self, step: int) -> float:
        ends = self.one.recording.ends
        return max((one.l2 or 0.0 for one in ends[step].gradients.values()), default=0.0) if step < len(ends) else 0.0

    def _tell_compiled(self, gap: Gap, reader: str, error: float) -> None:
        if self._places.get("compiled") is not None:
            return
        compiled, calls = (self.one, gap.one) if self.one.compiled else (self.other, gap.other)
        function = next((k for k in calls if compiled.calls[k].op == COMPILED_FUNCTION), None)
        side = 0 if self.one.compiled else 1
        found = function if function is not None else calls[0] if calls else None
        first = (found, None) if side == 0 else (None, found)
        text = (
            f"{reader} reads what compiled code computed in {'AB'[side]}, and it differs by more than rounding "
            f"({spell_error(error)})."
        )
        draw = "" if function is None else compiled.recording.draws.get(function, "")
        if draw:
            text += f" The compiled function draws random numbers (generator {draw.rpartition(' ')[0]})."
        self._add(Fact("op", text, first[0], first[1], self._step_of(first[0], first[1]), error), "compiled")

    def _compare_compiled(self, gap: Gap) -> None:
        """Compares what compiled functions return, which no later call reads, with what the other run computes."""
        values = [
            [
                (call.op, info, one)
                for k in calls
                for call in (run.calls[k],)
                for info, one in zip(call.outputs, run.values(k), strict=False)
            ]
            for run, calls in self.pairing.sides(gap)
        ]
        compiled, eager = (values[0], values[1]) if self.one.compiled else (values[1], values[0])
        if gap.tainted and self.rounded:
            return
        for op, info, one in compiled:
            if op != COMPILED_FUNCTION:
                continue
            fitting = [other for _, known, other in eager if (known.dtype, known.shape) == (info.dtype, info.shape)]
            errors = [error for other in fitting if (error := relative_error(one, other)) is not None]
            if not errors or min(errors) == 0.0:
                continue
            if min(errors) > _COMPILED_ROUNDS * self._rounding_in(gap):
                if not self._other_sources():
                    self._tell_compiled(gap, "The program", min(errors))
                return
            if gap.one and gap.other:
                self.rounded.append((Pair(gap.one[-1], gap.other[-1]), min(errors)))
        if not any(op == COMPILED_FUNCTION for op, _, _ in compiled):
            self._other_sources()  # PyTorch 2.11 does not tell what a compiled function returns

    def _other_sources(self) -> bool:
        """Adds the parameters, buffers and batches that differ, of which compiled code reads some."""
        if "sources" in self._places:
            return True
        for name, one in self.one.named.items():
            other = self.other.named.get(name)
            if other is None or one.values.digest == other.values.digest or one.step or other.step:
                continue
            readers = [
                None if run.compiled else self._reader(run, s) for run, s in ((self.one, one), (self.other, other))
            ]
            error = relative_error(one.values, other.values)
            text = f"The {one.kind} {name} has other contents.{self._other_weights(name, 0)}"
            self._add(Fact("weight", text, readers[0], readers[1], 0, error, name), "sources")
            return True
        steps = min(len(self.one.recording.ends), len(self.other.recording.ends)) + 1
        for step in range(steps):
            found = []
            for run, others in ((self.one, self.other), (self.other, self.one)):
                inputs = (s for s in run.sources if s.kind == "input" and s.step == step)
                found.append(next((s for s in inputs if s.values.digest not in others.contents), None))
            if found[0] is not None and found[1] is not None and self._reads_forward(self.one, found[0]):
                pairs = (self.one, found[0]), (self.other, found[1])
                readers = [None if run.compiled else self._reader(run, source) for run, source in pairs]
                error = relative_error(found[0].values, found[1].values)
                text = f"An input of step {step} differs ({found[0].info.name}), which no recorded call has made."
                self._add(Fact("input", text, readers[0], readers[1], step, error), "sources")
                return True
        return False

    def _reader(self, run: Run, source: Source) -> int | None:
        number = -1 - run.sources.index(source)
        return next((k for k in run.own if any(number in read.written_by for read in run.reads(k))), None)

    def _reads_forward(self, run: Run, source: Source) -> bool:
        reader = self._reader(run, source)
        return reader is not None and run.calls[reader].phase == "forward"


def spell_error(error: float) -> str:
    """An error in a sentence: those that are neither 0 nor infinite are estimates from sketches."""
    return f"relative L2 {'about ' * (0.0 < error < math.inf)}{spell_number(error)}"


def _l2(error: float | None) -> str:
    return "" if error is None else f" ({spell_error(error)})"


def _dtypes(call: Call) -> tuple[Any, ...]:
    return tuple(info.dtype for info in call.outputs)


def _differing_numbers(one: Mapping[str, Argument], other: Mapping[str, Argument]) -> dict[str, list[str]]:
    """Sentences about the numbers of an optimizer that differ, with their names."""
    members = [{name: numbers[name] for name in numbers if name.startswith(PARAMETERS)} for numbers in (one, other)]
    if all(members) and members[0] != members[1]:  # the groups have other parameters
        one, other = _by_parameter(one), _by_parameter(other)
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name, "missing"), other.get(name, "missing")
        if a != b and not name.startswith(PARAMETERS):
            found.setdefault((name.partition(" of ")[0], argument_text(a), argument_text(b)), []).append(name)
    more = {names[0]: f" (and {len(names) - 1:,} more)" * (len(names) > 1) for names in found.values()}
    return {f"{names[0]}{more[names[0]]} is {a} in A and {b} in B": names for (_, a, b), names in found.items()}


def _by_parameter(numbers: Mapping[str, Argument]) -> dict[str, Argument]:
    """The numbers of an optimizer, with those of a group as those of each of its parameters."""
    parts = [(name.partition(" of "), value) for name, value in numbers.items() if not name.startswith(PARAMETERS)]
    return {
        f"{key} of {one}": value for (key, _, of), value in parts for one in numbers.get(f"{PARAMETERS}{of}", (of,))
    }


def _policies(one: Call, other: Call) -> str:
    if (one.policy, one.policy_source) == (other.policy, other.policy_source):
        return ""
    texts = [
        f"{call.policy_name or 'no policy'}{f' ({call.policy_source})' if call.policy_source else ''}"
        for call in (one, other)
    ]
    return f"; {texts[0]} in A, {texts[1]} in B"


def _attributes(call: Call) -> dict[str, str]:
    """The attributes of a call that are compared, as text."""
    dtypes = {name: ", ".join(dtype_name(info.dtype) for info in getattr(call, name)) or "none" for name in TENSORS}
    casts = (
        f"{cast.argument}: {dtype_name(cast.from_dtype)} -> {dtype_name(cast.to_dtype)}{', reused' * cast.reused}"
        for cast in call.casts
    )
    return {
        **dtypes,
        "policy": call.policy_name or "none",
        "policy_source": call.policy_source or "none",
        "casts": "; ".join(casts) or "none",
        "arguments": ", ".join(f"{name} {argument_text(value)}" for name, value in call.arguments) or "none",
        "error": "it raised" if call.error else "it returned",
    }


def differing_attributes(one: Call, other: Call) -> dict[str, tuple[str, str]]:
    """Returns the attributes of a call that differ, with both values as text. Times, threads and shapes are ignored."""
    before, after = _attributes(one), _attributes(other)
    return {what: (text, after[what]) for what, text in before.items() if text != after[what]}
