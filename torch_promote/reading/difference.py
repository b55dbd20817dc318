"""`Difference`: what `torch_promote.diff` finds, in words, tables and charts."""

from __future__ import annotations

import bisect
import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch_promote.errors import OptionError, shown
from torch_promote.observe.call import Argument, Call, Phase
from torch_promote.reading.divergence import (
    Fact,
    Kind,
    Walk,
    differing_attributes,
    spell_error,
)
from torch_promote.reading.pairing import Pair, Pairing, argument_text
from torch_promote.reading.run import Run, before_the_window, is_unfinished, relative_error, renamed
from torch_promote.recording.program_state import UNKNOWN
from torch_promote.recording.recording import STEPS, Calls, Step
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import (
    Branch,
    Cell,
    Chart,
    Column,
    Content,
    Listing,
    Part,
    Report,
    Series,
    Table,
    Tree,
    ancestors,
    heat_shares,
    module_name,
    some_of,
    spell_number,
)
from torch_promote.report.base import Fact as ReportFact
from torch_promote.report.codec import encode

if TYPE_CHECKING:
    from torch_promote.recording.recording import Recording
    from torch_promote.recording.values import Values

_SIDES = Column("A", "dtypes"), Column("B", "dtypes")
#: Names in `Recording.environment` that do not select kernels.
_OF_NO_EFFECT = frozenset({"python", "rank", STEPS})
#: The error of losses, gradients and parameters that compiled code may cause by rounding.
_MOST_OF_COMPILED = 2e-2
#: The number of parameters that differ up to which a sentence names them, if more are equal.
_FEW = 3
#: The share of calls that two runs of one program have in common at least.
_LEAST_IN_COMMON = 0.2


@dataclass(frozen=True, slots=True)
class DifferingCall:
    """The call where a difference shows first.

    Attributes:
        a: The call in the first run; None if only the second made it.
        b: The call in the second run.
        call: Its index, from 0, among the calls of this overload in this module and phase.
        step: The number of optimizer steps before it.
        relative_l2: The estimated relative L2 error: of the parameter or input that differs, otherwise of the results.
            None if it is unknown.
        parameter: The parameter or buffer that it reads, and that differs: "3.up.weight"; None for another cause.
    """

    a: Call | None
    b: Call | None
    call: int
    step: int
    relative_l2: float | None = None
    parameter: str | None = None

    @property
    def known(self) -> Call:
        """The call in the first run, or in the second if only that has it."""
        found = self.a or self.b
        assert found is not None
        return found

    @property
    def op(self) -> str:
        """The op: "aten::linear"; "torch.compile" for a compiled function."""
        return self.known.op

    @property
    def overload(self) -> str:
        """Its overload."""
        return self.known.overload

    @property
    def module(self) -> str:
        """The path of the module that called it."""
        return self.known.module

    @property
    def phase(self) -> Phase:
        """Its phase."""
        return self.known.phase

    @property
    def line(self) -> str:
        """Its line."""
        return self.known.line

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        names = "op", "overload", "module", "phase", "call", "step", "line", "relative_l2", "parameter"
        sides = {
            name: None
            if one is None
            else {
                "dtypes": one.dtypes,
                "shapes": one.shapes,
                "arguments": encode(dict(one.arguments)),
                "policy": one.policy_name,
                "policy_source": one.policy_source,
                "line": one.line,
            }
            for name, one in (("a", self.a), ("b", self.b))
        }
        return {**{name: encode(getattr(self, name)) for name in names}, **sides}


@dataclass(frozen=True, slots=True)
class StepDifference:
    """How two runs differ in an optimizer step, as relative L2 errors. None: nothing was compared.

    Attributes:
        step: Its number, from 0.
        outputs: The largest error of a call's result.
        losses: The largest error of a loss.
        gradients: The largest error of a parameter's gradient.
        worst_gradient: That parameter.
        parameters: The largest error of a parameter after the step.
        worst_parameter: That parameter.
        apart: The parameters that differ then, if these are few of those that were compared.
        compared: The number of these.
        buffers: The buffers that differ then, such as running statistics, of those that calls of the program write.
    """

    step: int
    outputs: float | None = None
    losses: float | None = None
    gradients: float | None = None
    worst_gradient: str = ""
    parameters: float | None = None
    worst_parameter: str = ""
    apart: tuple[str, ...] = ()
    compared: int = 0
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleGrowth:
    """The errors of a module's calls in a phase of a step.

    Attributes:
        step: The step.
        phase: The phase.
        module: The path of the module.
        calls: The number of compared calls.
        relative_l2: The largest relative L2 error of their results; None if nothing was measured.
        dtypes_a: The dtypes of their results in the first run.
        dtypes_b: Those in the second run.
    """

    step: int
    phase: Phase
    module: str
    calls: int
    relative_l2: float | None
    dtypes_a: tuple[str, ...]
    dtypes_b: tuple[str, ...]

    def shown_dtypes(self) -> tuple[str, str]:
        """Both sides' dtypes, as one text each: a cell shows the first of several texts alone."""
        return ", ".join(self.dtypes_a), ", ".join(self.dtypes_b)


Change: TypeAlias = tuple[Call | None, Call | None, str, str, str]
"""The call in the first run, or None; that in the second; the attribute that differs; its value in each, as text.

An attribute is "inputs", "ran_with" or "outputs" (the dtypes), "policy", "policy_source", "casts", "arguments" or
"error". A call of one run alone has "only before" or "only after", and "" for the other run.
"""


@dataclass(frozen=True, repr=False)
class Difference(Report):
    """The difference between two recordings, A and B. It is true if there is any.

    With values in both (`trace(values=True)`), contents are compared. Otherwise dtypes, policies, casts and arguments
    that are no tensors are.

    Attributes:
        facts: What differs, in the order of the runs, each with its kind. "weight": a parameter or buffer has other
            contents when it is first read. "state": the state of an optimizer, GradScaler, schedule or generator
            differs at the start of a step. "input": a batch, or random numbers drawn by generators that differ.
            "arguments": a number, flag, size or text of a call. "shape": other shapes. "policy": another dtype or
            policy. "structure": calls of one run alone. "op": other results on equal inputs and arguments. "rounding":
            rounding alone, of other kernels.
        kind: That of the first fact; None if there is no difference.
        first: The call where the first fact shows first, a `DifferingCall`; None if no call shows it.
        arguments: Of the first fact, the arguments that differ, with both values.
        state: Of the first fact, the names of the states that differ.
        evidence: The facts as sentences, then what else is known.
        changes: The attributes of calls that differ, in the order of the calls of the first run: a list of `Change`.
        compared: The number of calls in both runs.
        dropped: The number of calls that the recordings did not keep (see `max_calls`), which are not compared.
        unknown: The number of compared calls of whose results one was not read, such as those of DTensors.
        with_values: Whether contents were compared.
        steps: How each step differs: a list of `StepDifference`.
        only_in_a: The calls that the first run alone made, without views and conversions.
        only_in_b: Those of the second run.
        unmatched: The number of contents that one run alone has: results that no compared call reads, losses,
            gradients and parameters. They have no error.
        growth: The errors by step, phase and module, in the order of the run: a list of `ModuleGrowth`.
        errors: Of the compared calls whose results differ, the numbers and the relative errors. Results of one run
            alone that stand in the same place, and that no compared call reads, are compared as well.
        environment: What differs in versions, devices and settings: by name, the values of both.
        unfinished: By run, "A" or "B", the number of steps in a recording without an end, because the run was killed or
            is still running. The other one is compared up to there.
        left_out: By run, the number of optimizer steps that the other one was not asked to record.
        outside: By run, the number of calls before the first step in common, if one run alone was recorded from a later
            step on. They are not compared.
        step_counts: The numbers of steps in both recordings, if neither was asked for fewer, and they differ; or None.
        unread_states: The states of optimizers that were read in neither run, and so were not compared.
        moved: The number of calls in both runs that the second made in another order.
        other_names: The modules of the second run whose calls are those of another module of the first, with its path:
            they have equal results. What is told of the second run has the names of the first.
        common_equal: Whether calls of one run alone differ, and the results of all calls in both have equal bits.
        aside: Then, the number of calls of one run alone, if no call in both reads what they have computed, or 0.
        received: By run, the number of calls that it alone made, and whose results the other one reads with equal bits
            from outside, such as batches that a worker process has made.
        beside: By run, the number of calls that stand among these, and whose results no other call reads.
        failures: By run, the error that ended it, if the other one did not end with it as well.

    Example:
        >>> import torch, torch_promote as tp
        >>> def run(factor):
        ...     with tp.trace(values=True) as report:
        ...         _ = (torch.ones(2, 2) * factor).exp()
        ...     return report
        >>> tp.diff(run(1.0), run(1.0)).equal
        True
    """

    NOUN: ClassVar[str] = "difference"
    FORMAT: ClassVar[str] = "torch_promote difference"
    NOT_LOADED: ClassVar[str] = "a difference cannot be read from {path}. Compare the recordings: tp.diff(a, b)."

    changes: list[Change]
    compared: int
    dropped: int = 0
    unknown: int = 0
    with_values: bool = False
    facts: list[Fact] = field(default_factory=list)
    first: DifferingCall | None = None
    evidence: list[str] = field(default_factory=list)
    steps: list[StepDifference] = field(default_factory=list)
    only_in_a: list[Call] = field(default_factory=list)
    only_in_b: list[Call] = field(default_factory=list)
    unmatched: int = 0
    growth: list[ModuleGrowth] = field(default_factory=list)
    errors: list[tuple[int, float]] = field(default_factory=list)
    environment: dict[str, tuple[str, str]] = field(default_factory=dict)
    unfinished: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)
    step_counts: tuple[int, int] | None = None
    unread_states: list[str] = field(default_factory=list)
    moved: int = 0
    other_names: dict[str, str] = field(default_factory=dict)
    common_equal: bool = False
    aside: int = 0
    received: dict[str, int] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> Kind | None:
        """The kind of the first fact."""
        return self.facts[0].kind if self.facts else None

    @property
    def arguments(self) -> Mapping[str, tuple[Argument, Argument]]:
        """The arguments that differ in the first fact."""
        return self.facts[0].arguments if self.facts else {}

    @property
    def state(self) -> tuple[str, ...]:
        """The states that differ in the first fact."""
        return self.facts[0].state if self.facts else ()

    @property
    def after(self) -> float | None:
        """The largest error of a result of calls after the last step, if both runs have as many steps."""
        errors = [one.relative_l2 or 0.0 for one in self.growth if one.step == len(self.steps)]
        return None if self.step_counts else max(errors, default=None)

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs: with values, all results have equal bits."""
        return not self.facts

    def __bool__(self) -> bool:
        return not self.equal

    @property
    def largest(self) -> float:
        """The largest relative L2 error of any result, loss, gradient or parameter; 0.0 if all have equal bits."""
        ends = (error for step in self.steps for error in (step.losses, step.gradients, step.parameters))
        found = [error for error in (*ends, *(error for _, error in self.errors)) if error is not None]
        return max(found, default=0.0)

    def is_within(self, tolerance: float) -> bool:
        """Whether no relative L2 error is larger, and all contents were compared.

        Calls of one run alone count by what they change in the calls that read their results. Results that no
        compared call reads, and losses, gradients and parameters, have to be in both runs.

        Args:
            tolerance: The largest relative L2 error that is allowed, 0 or more.

        Raises:
            OptionError: The tolerance is no such number, or a trace has no values. It is a ValueError.
        """
        if not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
            raise OptionError(f"`tolerance` is a finite number of 0 or more, got {shown(tolerance)}.")
        if not self.with_values:
            raise OptionError("a tolerance compares contents, and a trace has none. Trace with `values=True`.")
        return self.equal or (self.largest <= tolerance and not self.unmatched)

    def to_dict(self) -> dict[str, Any]:
        """Returns the difference as JSON-compatible values."""
        facts = [
            {"kind": one.kind, "text": one.text, "step": one.step, "calls": one.calls, "relative_l2": encode(one.error)}
            | {"parameter": one.parameter or None, "arguments": encode(one.arguments), "state": list(one.state)}
            for one in self.facts
        ]
        changes = [
            {"phase": call.phase, "module": call.module, "op": call.name, "line": call.line}
            | {"what": what, "before": before, "after": after}
            for one, other, what, before, after in self.changes
            if (call := other or one) is not None
        ]
        derived = {name: encode(getattr(self, name)) for name in ("equal", "kind", "arguments", "state", "after")}
        return {**Report.to_dict(replace(self, changes=[])), **derived, "facts": facts, "changes": changes}

    def content(self) -> Content:
        """Returns the verdict, the facts, both sides of the first call, and where errors grow."""
        parts = list(self._parts())
        return Content("difference of two runs", self._verdict(), list(self._numbers()), parts, good=self.equal)

    def _verdict(self) -> str:
        more = [
            f" Not compared: {steps:,} more step{'s' * (steps != 1)} of {name}, which {'B' if name == 'A' else 'A'} "
            "was not asked to record (--steps)."
            for name, steps in self.left_out.items()
        ]
        if self.outside:
            counts = " and ".join(f"{count:,} of {name}" for name, count in self.outside.items())
            more.append(f" Not compared: the calls before the first step that both recordings have ({counts}).")
        more += [
            f" What {calls:,} call{'s' * (calls != 1)} of {name} alone compute{'s' * (calls == 1)}, "
            f"{'B' if name == 'A' else 'A'} reads with equal bits from outside, as from a worker process"
            f"{self._beside(name)}."
            for name, calls in self.received.items()
        ]
        more += [f" In neither run could the {one} be read, so it was not compared." for one in self.unread_states]
        more += [
            f" The recording of {name} ends after {steps:,} step{'s' * (steps != 1)}: its run was killed, or is "
            "still running."
            for name, steps in self.unfinished.items()
        ]
        if self.other_names:
            names = (
                f"those of {module_name(mine)} in {module_name(theirs)}" for theirs, mine in self.other_names.items()
            )
            more.append(f" Calls stand in other modules in B: {some_of(names)}.")
        if self.step_counts:
            more.append(f" A has {self.step_counts[0]:,} steps, B {self.step_counts[1]:,}.")
        more += [f" {name} ended with an error: {text.rstrip('.')}." for name, text in self.failures.items()]
        return "".join([self._sentence(), *more])

    def _beside(self, name: str) -> str:
        calls = self.beside.get(name, 0)
        text = f"{calls:,} more call{'s' * (calls != 1)} of {name} stand{'s' * (calls == 1)} among these"
        return f"; {text}, and no other call reads what they compute" if calls else ""

    def _sentence(self) -> str:
        if not self.compared and self.equal:
            return "Nothing was compared: the recordings have no call in common."
        if self.equal:
            if not self.with_values:
                return "Equal: dtypes, policies, casts and other arguments. Contents were not compared."
            rest = f" {self.unknown:,} more have results that were not read." if self.unknown else ""
            rest += f" In B, {self.moved:,} of them ran in another order." if self.moved else ""
            return f"Equal: the results of {self.compared - self.unknown:,} calls have equal bits.{rest}"
        fact = self.facts[0]
        if fact.kind == "rounding":
            return fact.text
        if not self.with_values:
            return f"Different: {fact.text} Contents were not compared."
        after = self._after()
        text = f"Different from step {fact.step} on: {fact.text}"
        if self.common_equal and self.compared:
            text = f"The results of all {self.compared:,} calls in both runs have equal bits. {text}"
        if self.aside:
            alone = " and ".join(name for name, calls in (("A", self.only_in_a), ("B", self.only_in_b)) if calls)
            calls = f"the {self.aside:,} calls of {alone} alone compute" if self.aside > 1 else "that call computes"
            text += f" No call in both reads what {calls}."
        return f"{after} {text}" if self._are_ranks else f"{text} {after}".rstrip()

    @property
    def _are_ranks(self) -> bool:
        """Whether the runs are those of two ranks, whose batches differ by design."""
        return "rank" in self.environment

    def _after(self) -> str:
        """What parameters are after the steps."""
        errors = [one.parameters for one in self.steps if one.parameters is not None]
        if not errors:
            return ""
        differing = next((one for one in self.steps if one.parameters), None)
        whose = " of the two ranks" if self._are_ranks else ""
        if differing is not None:
            text, few = f"After step {differing.step}", differing.apart
            what = f" the parameters{whose} differ" if not few else f", of {differing.compared:,} parameters{whose}, "
            what += f"{', '.join(few)} {'differ' if len(few) > 1 else 'alone differs'}" if few else ""
            return f"{text}{what} ({spell_error(differing.parameters or 0.0)})."
        when = "every step" if len(errors) > 1 else "the step"
        if self._are_ranks or not self.largest:
            text = f"The parameters{whose} are equal after {when}."
            apart = next((one for one in self.steps if one.buffers), None) if self._are_ranks else None
            return f"{text} Buffers differ after step {apart.step}: {some_of(apart.buffers)}." if apart else text
        text = f"The parameters that the optimizer updates are equal after {when}; results"
        return f"{text}{' after the last step' * bool(self.after)} differ ({spell_error(self.after or self.largest)})."

    def _numbers(self) -> Iterator[ReportFact]:
        if self.kind is not None:
            yield "kind", self.kind
        yield "compared", f"{self.compared:,}", "calls in both runs"
        if self.with_values:
            yield "largest error", spell_number(self.largest), "relative L2, of any result, loss, gradient or parameter"
        else:
            yield "contents", "not compared", "record both runs with values"
        if self.unknown:
            yield "not read", f"{self.unknown:,}", "calls in both runs, of whose results one was not read"
        if self.only_in_a or self.only_in_b:
            yield "only in A", f"{len(self.only_in_a):,}"
            yield "only in B", f"{len(self.only_in_b):,}"
        if self.unmatched:
            yield "unmatched", f"{self.unmatched:,}", "results, losses, gradients or parameters of one run alone"
        if self.dropped:
            yield "not compared", f"{self.dropped:,} (not stored; see max_calls)"

    def _parts(self) -> Iterator[Part]:
        yield Listing("What differs", self.evidence, most=20)
        if self.first is not None:
            yield self._first_table(self.first)
        yield self._steps_table()
        yield from self._growth_parts()
        yield self._changes_table()
        environment = [(name, *values) for name, values in self.environment.items()]
        yield Table("Environment", ("setting", "A", "B"), environment, most=20)
        runs = ("A", self.only_in_a), ("B", self.only_in_b)
        groups = Counter(
            (run, one.name, module_name(one.module), one.phase, one.line or None)
            for run, calls in runs
            for one in calls
        )
        named = [(*key, calls) for key, calls in groups.items()]
        columns = "run", Column("op", "name"), Column("module", "name"), "phase", Column("line", "line"), "calls"
        yield Table("Calls of one run alone", columns, named, most=30)

    @staticmethod
    def _first_table(first: DifferingCall) -> Table:
        def shown(one: Call | None) -> dict[str, str]:
            if one is None:
                return {}
            known = {
                "dtypes": one.dtypes,
                "shapes": one.shapes,
                "policy": one.policy_name,
                "set by": one.policy_source,
            }
            arguments = {name: argument_text(value) for name, value in one.arguments}
            return {"op": one.name, **known, "line": one.line, **arguments}

        sides = shown(first.a), shown(first.b)
        always = ("dtypes", "policy", "set by", "line")
        rows: list[tuple[Cell, ...]] = [
            (name, *(one.get(name, "-") or "none" for one in sides))
            for name in dict.fromkeys([*sides[0], *sides[1]])
            if name in always or (all(sides) and sides[0].get(name) != sides[1].get(name))
        ]
        op = f"{first.op}.{first.overload}" if first.overload else first.op
        place = f"{first.phase}, step {first.step}, call {first.call}"
        return Table(f"First: {op} in {module_name(first.module)}, {place}", ("", "A", "B"), rows)

    def _steps_table(self) -> Table:
        numbers = {name: Column(name, "number") for name in ("outputs", "losses", "gradients", "parameters")}
        columns: dict[str, Column] = {"step": Column("step"), **numbers}
        columns |= {f"worst_{name}": Column(f"worst {name}", "name") for name in ("gradient", "parameter")}
        rows = [
            tuple(cell if (cell := getattr(one, name)) != "" else None for name in columns)
            for one in self.steps
            if any(getattr(one, name) for name in numbers)
        ]
        rows += [("after", self.after, *[None] * (len(columns) - 2))] if self.steps and self.after else []
        return Table("Relative L2 errors by step", [*columns.values()], rows, most=10)

    def _growth_parts(self) -> Iterator[Part]:
        points = [(place, error) for place, error in self.errors if error > 0]
        if not points:
            return
        yield Chart(
            "Errors along the run",
            "scatter",
            [Series("relative L2", [error for _, error in points], [place for place, _ in points])],
            x_label="call",
            y_label="relative L2",
            y_scale="log",
            note="A point for each call whose results differ. Those before the first point have equal bits.",
        )
        differing = [one for one in self.growth if one.relative_l2]
        step = differing[0].step if differing else 0
        forward = [one for one in self.growth if (one.step, one.phase) == (step, "forward")]
        # A module has the largest error and the dtypes of those in it, which it may fold.
        inside: dict[str, float] = {}
        sides = {one.module: (dict.fromkeys(one.dtypes_a), dict.fromkeys(one.dtypes_b)) for one in forward}
        for one in forward:
            for path in ancestors(one.module):
                inside[path] = max(inside.get(path, 0.0), one.relative_l2 or 0.0)
                for names, dtypes in zip(sides.setdefault(path, ({}, {})), (one.dtypes_a, one.dtypes_b), strict=True):
                    names.update(dict.fromkeys(dtypes))
        branches = [
            Branch(path, (error or None, *map(", ".join, sides[path])), ({"heat": share},))
            for (path, error), share in zip(inside.items(), heat_shares(list(inside.values())), strict=True)
        ]
        kinds = Column("relative L2", "number"), *_SIDES
        note = f"The forward of step {step}. A module has the largest error and the dtypes of those inside it."
        yield Tree("Modules", kinds, branches, ("error",), note=note)
        rows = [
            (module_name(one.module), one.phase, one.calls, one.relative_l2, *one.shown_dtypes())
            for one in differing
            if one.step == step
        ]
        columns = Column("module", "name"), "phase", "calls", Column("largest", "number"), *_SIDES
        yield Table(f"Relative L2 errors by module, step {step}", columns, rows, most=15)

    def _changes_table(self) -> Table:
        groups: dict[tuple[str, ...], Counter[str]] = {}
        as_called = {(id(one), *texts) for one, _, what, *texts in self.changes if what == "inputs"}
        decided = {one.name for one, _, what, *_ in self.changes if one and what in ("policy", "policy_source")}
        for one, call, what, *texts in self.changes:
            # Calls of one run alone are in another table, and one row is enough for a call without casts.
            if one is None or call is None or (what == "ran_with" and (id(one), *texts) in as_called):
                continue
            key = call.name, call.phase, what, *texts
            groups.setdefault(key, Counter())[module_name(call.module)] += 1
        rows: list[tuple[Cell, ...]] = [
            (*key, modules.total(), modules)
            for key, modules in sorted(groups.items(), key=lambda group: group[0][0] not in decided)
        ]
        columns = Column("op", "name"), "phase", "what", "A", "B", "calls", Column("modules", "code")
        return Table("Other dtypes, policies, casts and arguments", columns, rows, most=30)


def compare_recordings(before: Recording, after: Recording) -> Difference:
    """Compares two recordings: their contents if both have values, otherwise the attributes of their calls."""
    unread_states = [name for name in _unread_states(before) if name in _unread_states(after)]
    before, after, left_out = _common_steps(before, after)
    one, other = map(Run, (before, after), before_the_window(before, after))
    environment = _environments(before, after)
    with_values = bool(before.values and after.values)
    may_round = bool(environment.keys() - _OF_NO_EFFECT) or one.compiled != other.compiled
    complete = not (before.dropped or one.unfinished), not (after.dropped or other.unfinished)
    pairing = Pairing(one, other, complete)
    other_names = pairing.other_names
    if other_names:
        after = renamed(after, other_names)
        other = Run(after, other.outside)
        pairing = Pairing(one, other, complete)
    walk = Walk(pairing, may_round, with_values, "torch" in environment)
    only_in_a = [one.calls[i] for gap in walk.pairing.gaps for i in gap.one if not one.is_transparent(i)]
    only_in_b = [other.calls[j] for gap in walk.pairing.gaps for j in gap.other if not other.is_transparent(j)]
    errors = [(place, error) for place, error in enumerate(walk.errors) if error]
    starts = [pair.one for pair in walk.pairs]
    errors += [
        (bisect.bisect(starts, pair.one), error)
        for pair in walk.views
        if (error := walk.error_of(pair)) and not walk.is_overwritten(pair)
    ]
    dropped = before.dropped + after.dropped
    unread, unmatched = _compare_unread(walk) if with_values and not dropped else ([], 0)
    found = Difference(
        _changes(walk),
        len(walk.pairs),
        dropped,
        walk.unknown if with_values else 0,
        with_values,
        environment=environment,
        steps=_steps(before, after, walk),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        growth=_growth(walk),
        errors=sorted(errors + unread),
        unmatched=unmatched + (walk.read_at_last + _unmatched_ends(before, after) if with_values else 0),
        unfinished={name: len(run.ends) for name, run in (("A", before), ("B", after)) if is_unfinished(run)},
        left_out=left_out,
        step_counts=_step_counts(before, after),
        outside={name: len(run.outside) for name, run in (("A", one), ("B", other)) if run.outside},
        unread_states=unread_states,
        moved=walk.pairing.moved,
        other_names=other_names,
        received={name: len(calls) for name, calls in zip("AB", walk.pairing.received, strict=True) if calls},
        beside={name: len(calls) for name, calls in zip("AB", walk.pairing.beside, strict=True) if calls},
        failures=_failures(before, after),
    )
    return _concluded(found, walk)


def _failures(before: Recording, after: Recording) -> dict[str, str]:
    texts = {name: run.failure.text if run.failure else "" for name, run in (("A", before), ("B", after))}
    return {name: text for name, text in texts.items() if text and texts["A"] != texts["B"]}


def _step_counts(before: Recording, after: Recording) -> tuple[int, int] | None:
    counts = len(before.ends), len(after.ends)
    return None if counts[0] == counts[1] or is_unfinished(before) or is_unfinished(after) else counts


def _unread_states(recording: Recording) -> list[str]:
    """The states of optimizers that could not be read: "state of Adafactor"."""
    numbers = (item for state in recording.states for item in state.numbers.items())
    return list(dict.fromkeys(name for name, value in numbers if name.startswith("state of ") and value == UNKNOWN))


def _common_steps(before: Recording, after: Recording) -> tuple[Recording, Recording, dict[str, int]]:
    """The steps that both recordings have if one was asked for fewer, and the number of those that one has besides."""
    counts = len(before.ends), len(after.ends)
    number, shorter = min(counts), after if counts[0] > counts[1] else before
    first, _, end = shorter.environment.get(STEPS, "0:").partition(":")
    if counts[0] == counts[1] or not end or int(end) - int(first) != number:  # or its program ended before
        return before, after, {}
    cut = [_first_steps(one, number) for one in (before, after)]
    return cut[0], cut[1], {"A" if counts[0] > counts[1] else "B": abs(counts[0] - counts[1])}


def _first_steps(recording: Recording, number: int) -> Recording:
    """The first steps of a recording. The states at the end, which the other one has elsewhere, are left out."""
    found = copy.copy(recording)
    found.calls = Calls(recording.calls[: recording.ends[number - 1].calls] if number else ())
    found.ends = recording.ends[:number]
    found.states = [one for one in recording.states if one.step < number]
    return found


def _concluded(found: Difference, walk: Walk) -> Difference:
    """The difference with its facts, and what else is known."""
    facts = list(walk.facts)
    selecting = [name for name in found.environment if name not in _OF_NO_EFFECT]
    compiled = walk.one.compiled != walk.other.compiled
    largest = found.largest
    if not facts and (walk.rounded or (largest and compiled)):
        if compiled and largest > _MOST_OF_COMPILED and not walk.rounded:
            facts.append(Fact("op", "Losses, gradients or parameters differ by more than rounding.", error=largest))
        else:
            facts.append(_rounding(walk, selecting, largest))
    elif not facts and largest:
        what = "Losses, gradients or parameters differ; no recorded call does."
        facts.append(Fact("op", what, error=largest))
    tail = walk.pairing.tail
    if not facts and tail is not None and found.unfinished:
        described, _ = walk.pairing.described(tail)
        text = f"{described}: the other recording ends before. All results up to there have equal bits."
        first, second = (calls[0] if calls else None for calls in (tail.one, tail.other))
        step = walk.one.steps[first] if first is not None else walk.other.steps[second] if second is not None else 0
        facts.append(Fact("structure", text, first, second, step))
    evidence = [f"{one.text}{_more(one)}" for one in facts]
    totals = [len(run.own) for run in walk.runs]
    in_common = len(walk.pairs) + len(walk.views)
    if facts and not compiled and in_common < _LEAST_IN_COMMON * min(totals) and not _have_one_source(walk):
        text = f"These are different programs: {in_common:,} of {totals[0]:,} and {totals[1]:,} calls are in both."
        evidence.insert(0, text)
        facts.insert(0, Fact("structure", text, facts[0].one, facts[0].other))
    if facts:
        place = 1 if facts[0].kind == "input" else len(evidence)  # beside the batch that was drawn
        evidence[place:place] = _of_generators(walk)
        shapes = [
            (run_one, run_other)
            for pair in walk.pairs
            if (run_one := walk.one.calls[pair.one]).shapes != (run_other := walk.other.calls[pair.other]).shapes
        ]
        if shapes:
            call, theirs = shapes[0]
            evidence.append(
                f"Calls with other shapes: {len(shapes):,} of {len(walk.pairs):,}. The first is {call.op} in "
                f"{module_name(call.module)}: {call.shapes} in A, {theirs.shapes} in B."
            )
        if selecting:
            evidence.append(f"These differ between the runs: {', '.join(selecting)}.")
    if walk.of_versions:
        evidence.append(
            f"{walk.pairing.described(walk.of_versions[0])[0]}. Places where the versions of PyTorch make other calls: "
            f"{len(walk.of_versions):,}."
        )
    if compiled:
        unseen = len(found.only_in_b if walk.one.compiled else found.only_in_a)
        name = "A" if walk.one.compiled else "B"
        evidence.append(f"Unseen in {name}, which ran compiled code: {unseen:,} calls of the other run.")
    common_equal = bool(walk.facts and found.with_values) and all(one.kind == "structure" for one in facts)
    common_equal = common_equal and not (walk.differ or largest or found.unknown)
    aside = len(found.only_in_a + found.only_in_b) if common_equal and not walk.pairing.reads_alone else 0
    found = replace(found, common_equal=common_equal, aside=aside, facts=facts, evidence=evidence)
    return replace(found, first=_first(walk, facts[0]) if facts else None)


def _more(fact: Fact) -> str:
    """Of how many calls a fact is true, as a sentence; "" of one."""
    if any(fact.alone):
        counts = " and ".join(
            f"{name} alone makes {number:,}" for name, number in zip("AB", fact.alone, strict=True) if number
        )
        return f" In all, {counts} such calls." if max(fact.alone) > 1 else ""
    texts = [f" The same in {fact.calls - 1:,} more call{'s' * (fact.calls > 2)}."] * (fact.calls > 1)
    texts += [f" Other values in {fact.others:,} more call{'s' * (fact.others > 1)}."] * (fact.others > 0)
    return "".join(texts)


def _have_one_source(walk: Walk) -> bool:
    """Whether the runs call ops at the same lines, as one program does under two settings."""
    lines = [{run.calls[i].line for i in run.own} for run in walk.runs]
    return len(lines[0] & lines[1]) > max(map(len, lines)) / 2


def _rounding(walk: Walk, selecting: Sequence[str], largest: float) -> Fact:
    compiled = walk.one.compiled != walk.other.compiled
    names = [*selecting, *["compiled code"] * compiled]
    what = f" What may round differently: {', '.join(names)}." if names else ""
    if not walk.rounded:
        return Fact("rounding", f"The results differ by no more than rounding explains.{what}", error=largest)
    pair, error = walk.rounded[0]
    text = (
        f"The results differ by no more than rounding explains. It starts in {walk.place(*pair)}, step "
        f"{walk.one.steps[pair.one]}: {spell_error(error)}, and rounding in its dtype explains "
        f"{spell_number(walk.one.rounding(pair.one))}.{'' if compiled else walk.other_kernel(pair)}{what}"
    )
    return Fact("rounding", text, *pair, walk.one.steps[pair.one], error, calls=len(walk.rounded))


def _first(walk: Walk, fact: Fact) -> DifferingCall | None:
    sides = [None if i is None else run.calls[i] for run, i in zip(walk.runs, (fact.one, fact.other), strict=True)]
    if sides == [None, None]:
        return None
    run, i = (walk.one, fact.one) if fact.one is not None else (walk.other, fact.other)
    assert i is not None
    call = run.calls[i]
    place = call.name, call.module, call.phase
    number = sum((one.name, one.module, one.phase) == place for one in run.calls[:i])
    return DifferingCall(sides[0], sides[1], number, run.steps[i], fact.error, fact.parameter or None)


def _of_generators(walk: Walk) -> list[str]:
    """The generators of Python and NumPy, which no call shows, that differ at the start of a step that draws."""
    starts: list[list[Mapping[str, str]]] = []
    for run in walk.runs:
        ends = [one.rng for one in run.recording.ends]
        starts.append([run.recording.rng, *ends])
    for name in ("python", "numpy"):
        for step in range(min(map(len, starts)) - 1):
            before = [states[step].get(name) for states in starts]
            after = [states[step + 1].get(name) for states in starts]
            if None not in before and before[0] != before[1] and before != after:
                draw = " and ".join(run for run, a, b in zip("AB", before, after, strict=True) if a != b)
                text = f"The state of the generator {name} differs at the start of step {step}, which draws from it"
                return [f"{text} in {draw}."]
    return []


def _environments(one: Recording, other: Recording) -> dict[str, tuple[str, str]]:
    first, second = ({"torch": report.torch_version, **report.environment} for report in (one, other))
    if not (one.environment and other.environment):
        first, second = ({"torch": report.torch_version} for report in (one, other))
    found = {}
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        if None in (a, b) and name.startswith(("inductor.", "functorch.")):
            continue  # of a compiler that one run has not loaded
        missing = "not set" if name.isupper() else "unknown"
        if a != b:
            found[name] = missing if a is None else a, missing if b is None else b
    return found


def _changes(walk: Walk) -> list[Change]:
    """The attributes that differ, of the calls inside of others as well. Times, threads and shapes are ignored."""
    found: list[tuple[tuple[bool, int], Change]] = []
    for pair in sorted([*walk.pairs, *walk.views]):
        for inner in (*walk.pairing.inner_pairs(pair), pair):
            one, other = walk.one.calls[inner.one], walk.other.calls[inner.other]
            for what, texts in differing_attributes(one, other).items():
                found.append(((False, one.start), (one, other, what, *texts)))
    for gap in walk.pairing.gaps:
        for call in (walk.one.calls[i] for i in gap.one):
            found.append(((False, call.start), (call, None, "only before", call.dtypes, "")))
        for call in (walk.other.calls[j] for j in gap.other):
            found.append(((True, call.start), (None, call, "only after", "", call.dtypes)))
    return [change for _, change in sorted(found, key=lambda one: one[0])]


def _compare_unread(walk: Walk) -> tuple[list[tuple[int, float]], int]:
    """Compares what calls of one run alone compute and no call reads, such as the outputs of a model."""
    # All else has an effect on the calls that read it. What a backward computes is compared as gradients.
    # Returns what `Difference.errors` has, and the number of results without a counterpart in the other run.
    one, other = walk.one, walk.other
    if one.compiled != other.compiled:
        return [], 0
    starts = [pair.one for pair in walk.pairs]
    ends = _unread(one, other), _unread(other, one)
    errors: list[tuple[int, float]] = []
    unmatched = 0
    for gap in walk.pairing.gaps:
        ones, others = [i for i in gap.one if i in ends[0]], [j for j in gap.other if j in ends[1]]
        is_last_view = (
            not gap.is_first and all(map(one.is_transparent, gap.one)) and all(map(other.is_transparent, gap.other))
        )
        if is_last_view and (ones or others) and not walk.facts:
            walk.tell(gap, None)
        if len(ones) != len(others):
            unmatched += len(ones) + len(others)
            continue
        for pair in map(Pair, ones, others):
            error = walk.error_of(pair)
            if error is None:
                unmatched += 1
            else:
                errors.append((bisect.bisect(starts, pair.one), error))
    return errors, unmatched


def _unread(run: Run, other: Run) -> set[int]:
    """The calls of a forward whose results no call reads, are no loss, and are not in the other run."""
    read: set[int] = set()
    for i in reversed(run.own):
        # What is only converted, or only read by calls without results, such as Tensor.item, is compared nowhere else.
        if run.values(i) and (i in read or not run.is_transparent(i)):
            read.update(writer for one in run.reads(i) for writer in one.written_by)
    elements = {one.digest for i in run.own if not run.is_transparent(i) for one in run.reads(i)}
    known = other.contents | {loss.digest for end in run.recording.ends for loss in end.losses}
    return {
        i
        for i in run.own
        if i not in read
        and run.calls[i].phase in ("forward", "recompute")
        and not known.issuperset(run.results(i))
        and not (run.is_transparent(i) and elements.issuperset(run.results(i)))  # a call that computes reads the view
    }


def _unmatched_ends(before: Recording, after: Recording) -> int:
    """The number of losses, gradients and parameters at the ends of steps that one run alone has."""
    found = 0
    for one, other in zip_longest(before.ends, after.ends, fillvalue=Step(0)):
        found += abs(len(one.losses) - len(other.losses))
        found += len(one.gradients.keys() ^ other.gradients.keys())
        found += len(one.parameters.keys() ^ other.parameters.keys())
    return found


def _growth(walk: Walk) -> list[ModuleGrowth]:
    groups: dict[tuple[int, Phase, str], list[int]] = {}
    for place, pair in enumerate(walk.pairs):
        call = walk.one.calls[pair.one]
        groups.setdefault((walk.one.steps[pair.one], call.phase, call.module), []).append(place)
    found = []
    for (step, phase, module), places in groups.items():
        errors = [error for place in places if (error := walk.errors[place]) is not None]
        dtypes = []
        for side, run in enumerate(walk.runs):
            outputs = (info for place in places for info in run.calls[walk.pairs[place][side]].outputs)
            dtypes.append(tuple(dict.fromkeys(dtype_name(info.dtype) for info in outputs)))
        found.append(ModuleGrowth(step, phase, module, len(places), max(errors, default=None), *dtypes))
    return found


def _steps(before: Recording, after: Recording, walk: Walk) -> list[StepDifference]:
    outputs: dict[int, float] = {}
    for pair, error in zip(walk.pairs, walk.errors, strict=True):
        if error is not None:
            step = walk.one.steps[pair.one]
            outputs[step] = max(outputs.get(step, 0.0), error)
    found = []
    # What each run knows of its parameters: one may leave alone what the other one updates.
    known = [
        {name: source.values for name, source in run.named.items() if source.kind == "parameter"} for run in walk.runs
    ]
    buffers = [_buffers(run) for run in walk.runs]
    for number, (one, other) in enumerate(zip(before.ends, after.ends, strict=False)):
        known = [mine | dict(end.parameters) for mine, end in zip(known, (one, other), strict=True)]
        updated = one.parameters.keys() | other.parameters.keys()
        losses = [relative_error(*pair) for pair in zip(one.losses, other.losses, strict=False)]
        gradients, worst_gradient = _worst(_errors(one.gradients, other.gradients))
        common = [{name: values for name, values in mine.items() if name in updated} for mine in known]
        errors = _errors(*common)
        parameters, worst_parameter = _worst(errors)
        loss = max((error for error in losses if error is not None), default=None)
        apart = tuple(name for name, error in errors.items() if error)
        is_few = len(apart) <= min(_FEW, (len(errors) - 1) // 2) and len(errors) == len(common[0])
        worst = worst_gradient, parameters, worst_parameter, apart if is_few else (), len(errors)
        mine, others = (of.get(number, {}) for of in buffers)
        differ = tuple(name for name, digest in mine.items() if digest != others.get(name, digest))
        found.append(StepDifference(number, outputs.get(number), loss, gradients, *worst, differ))
    return found


def _buffers(run: Run) -> dict[int, dict[str, str]]:
    """Returns the digests of the buffers that calls of each step write, as they are after it."""
    written: dict[tuple[int, str], str] = {}  # the name of what a call has written, by its digest
    found: dict[int, dict[str, str]] = {}
    for i in run.own:
        names = {}
        for info, read in zip(run.calls[i].inputs, run.reads(i), strict=False):
            writer = read.written_by[-1] if read.written_by else 0
            source = run.sources[-1 - writer] if writer < 0 else None
            of_source = source.name if source is not None and source.kind == "buffer" else ""
            names[info.name] = of_source or written.get((writer, read.digest), "")
        for info, digest in zip(run.calls[i].outputs, run.results(i), strict=False):
            if name := names.get(info.name):
                written[i, digest] = name
                found.setdefault(run.steps[i], {})[name] = digest
    return found


def _errors(one: Mapping[str, Values], other: Mapping[str, Values]) -> dict[str, float]:
    return {
        name: error for name in one if name in other and (error := relative_error(one[name], other[name])) is not None
    }


def _worst(errors: Mapping[str, float]) -> tuple[float | None, str]:
    worst = max(errors, key=errors.__getitem__, default="")
    return errors.get(worst), worst if errors.get(worst) else ""
