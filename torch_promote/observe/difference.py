"""`Difference`: what `TraceReport.diff` finds, in words, tables and charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch_promote.observe.diff import ONLY_AFTER, ONLY_BEFORE, Change, changes_of
from torch_promote.observe.divergence import Event, Kind, Run, Walk, is_random, relative_error, rounding_of
from torch_promote.observe.events import Phase
from torch_promote.report.base import (
    Branch,
    Cell,
    Chart,
    Column,
    Content,
    Fact,
    Listing,
    Part,
    Report,
    Series,
    Table,
    Tree,
    heat_shares,
    module_name,
    spell_number,
)
from torch_promote.report.codec import encode

if TYPE_CHECKING:
    from torch_promote.observe.divergence import Gap
    from torch_promote.observe.events import Recording
    from torch_promote.observe.values import Values

__all__ = ["CallSide", "Difference", "FirstCall", "ModuleGrowth", "OnlyCall", "StepDifference", "compare_traces"]


@dataclass(frozen=True, slots=True)
class CallSide:
    """A call as one of two runs made it.

    Attributes:
        dtypes: The dtypes of inputs, of cast inputs if they differ, and of outputs, as `Call.dtypes`.
        policy: The name of its policy; "" without one.
        said_by: Who set it.
        line: "path:number" of the program's line.
    """

    dtypes: str
    policy: str
    said_by: str
    line: str


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first call that differs between two runs.

    Attributes:
        op: The op: "aten::linear"; "torch.compile" for a compiled function.
        overload: Its overload.
        module: The path of the module that called it.
        phase: "forward", "recompute", "backward" or "optimizer".
        call: Its index, from 0, among the calls of this overload in this module and phase.
        step: The number of optimizer steps before it.
        line: The line in the first run, or in the second if only that has the call.
        relative_l2: The estimated relative L2 error: of the parameter or input that differs, otherwise of the results.
            None if it is unknown.
        parameter: The parameter or buffer that it reads, and that differs: "3.up.weight"; None for another cause.
        a: The call in the first run; None if only the second made it.
        b: The call in the second run.
    """

    op: str
    overload: str
    module: str
    phase: Phase
    call: int
    step: int
    line: str
    relative_l2: float | None = None
    parameter: str | None = None
    a: CallSide | None = None
    b: CallSide | None = None


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
        rng: The random number generators whose states differed at its begin: "cpu", "cuda:0", "python", "numpy".
    """

    step: int
    outputs: float | None = None
    losses: float | None = None
    gradients: float | None = None
    worst_gradient: str = ""
    parameters: float | None = None
    worst_parameter: str = ""
    rng: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True)
class OnlyCall:
    """A call that one run alone made.

    Attributes:
        run: "A" or "B".
        op: Its op, with the overload.
        module: The path of its module.
        phase: Its phase.
        step: The step.
        line: Its line.
    """

    run: str
    op: str
    module: str
    phase: Phase
    step: int
    line: str


@dataclass(frozen=True, repr=False)
class Difference(Report):
    """The difference between two traces, A and B. It is true if there is any.

    With values in both traces (`trace(values=True)`), contents are compared, and the first call that differs is named
    with the cause. Otherwise, dtypes, policies and casts are.

    Attributes:
        changes: The attributes of calls that differ, in the order of the calls of the first trace, then calls that only
            the second has.
        compared: The number of calls in both traces.
        dropped: The number of calls that the traces did not keep (see `max_calls`), which are not compared.
        with_values: Whether contents were compared.
        kind: What explains the difference. "policy": another policy or dtype. "input": another batch, or other random
            numbers. "weight": another parameter or buffer. "op": a call with other results on equal inputs. "rounding":
            rounding alone, of other kernels. "structure": calls of one run alone. None: there is no difference.
        first: The first call that differs, a `FirstCall`; None if there is no difference, or no call is to blame.
        evidence: What shows that, in sentences.
        steps: How each step differs: a list of `StepDifference`.
        only_in_a: The number of the program's calls in the first trace alone, without views and casts.
        only_in_b: The number in the second trace alone.
        only: These calls, a list of `OnlyCall`.
        growth: The errors by step, phase and module, in the order of the run: a list of `ModuleGrowth`.
        errors: For each compared call, its number and the relative error of its results.
        environment: What differs in versions, devices and settings: by name, the values of both.

    Example:
        >>> import torch, torch_promote as tp
        >>> def run(factor):
        ...     with tp.trace(values=True) as report:
        ...         _ = (torch.ones(2, 2) * factor).exp()
        ...     return report
        >>> run(1.0).diff(run(1.0)).equal
        True
    """

    NOUN: ClassVar[str] = "difference"

    changes: list[Change]
    compared: int
    dropped: int = 0
    with_values: bool = False
    kind: Kind | None = None
    first: FirstCall | None = None
    evidence: list[str] = field(default_factory=list)
    steps: list[StepDifference] = field(default_factory=list)
    only_in_a: int = 0
    only_in_b: int = 0
    only: list[OnlyCall] = field(default_factory=list)
    growth: list[ModuleGrowth] = field(default_factory=list)
    errors: list[tuple[int, float]] = field(default_factory=list)
    environment: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether there are no differences: with values, whether all results have equal bits."""
        return self.kind is None if self.with_values else not self.changes

    @property
    def same(self) -> bool:
        """The same as `equal`."""
        return self.equal

    def __bool__(self) -> bool:
        return not self.equal

    @property
    def largest(self) -> float:
        """The largest relative L2 error of any result, loss, gradient or parameter; 0.0 if all have equal bits."""
        ends = (error for step in self.steps for error in (step.losses, step.gradients, step.parameters))
        found = [error for error in (*ends, *(error for _, error in self.errors)) if error is not None]
        return max(found, default=0.0)

    def is_within(self, tolerance: float) -> bool:
        """Whether no relative L2 error is larger. Calls that one run alone made do not count."""
        return self.largest <= tolerance

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences as JSON-compatible values."""
        names = [name for name in self.__dataclass_fields__ if name not in ("changes", "only")]
        data = {name: encode(getattr(self, name)) for name in names}
        return {
            "equal": self.equal,
            "same": self.same,
            **data,
            "only": encode(self.only),
            "changes": encode(self.changes),
        }

    def content(self) -> Content:
        """Returns the verdict, both sides of the first call, the evidence, and where errors grow."""
        if not self.with_values:
            return self._content_of_changes()
        title = f"difference of two runs: {self.compared:,} calls compared"
        return Content(title, self._verdict(), list(self._facts()), list(self._parts()), good=self.equal)

    # --- with values

    def _verdict(self) -> str:
        if self.equal:
            return "Equal: all results have equal bits."
        first = self.first
        if self.kind == "rounding":
            return "No call is to blame: the results differ by rounding alone, on different kernels."
        if first is None:
            return "Different, and no recorded call explains it."
        call = f"{first.op} in {module_name(first.module)}"
        call += "" if first.phase == "forward" else f" ({first.phase})"
        error = "" if first.relative_l2 is None else f" (relative L2 {spell_number(first.relative_l2)})"
        start = f"Different from step {first.step} on:"
        if self.kind == "structure":
            only = "A" if first.b is None else "B" if first.a is None else "both, with equal results"
            where = f"only {only} makes it" if len(only) == 1 else "other calls take its place, with equal results"
            return f"Another structure in step {first.step}: {call}, {where}."
        whats = {
            "weight": f"reads another weight, {first.parameter}{error}.",
            "input": f"has another input, or other random numbers{error}.",
            "policy": f"ran in another dtype or under another policy{error}.",
            "op": f"has other results on equal inputs{error}.",
        }
        return f"{start} {call} {whats[str(self.kind)]}"

    def _facts(self) -> Iterator[Fact]:
        if self.kind is not None:
            yield "kind", self.kind
        yield "compared", f"{self.compared:,}", "calls in both runs"
        yield "largest error", spell_number(self.largest), "relative L2, of any result, loss, gradient or parameter"
        if self.only_in_a or self.only_in_b:
            yield "only in A", f"{self.only_in_a:,}"
            yield "only in B", f"{self.only_in_b:,}"
        if self.dropped:
            yield "not compared", f"{self.dropped:,} (not stored; see max_calls)"

    def _parts(self) -> Iterator[Part]:
        if self.first is not None:
            yield self._sides(self.first)
        yield Listing("Evidence", self.evidence, most=20)
        columns: list[Column | str] = [
            "step",
            *(Column(name, "number") for name in ("outputs", "losses", "gradients")),
            Column("worst gradient", "name"),
            Column("parameters", "number"),
            Column("worst parameter", "name"),
            "RNG differs",
        ]
        rows = [
            (
                one.step,
                one.outputs,
                one.losses,
                one.gradients,
                one.worst_gradient or None,
                one.parameters,
                one.worst_parameter or None,
                ", ".join(one.rng) or None,
            )
            for one in self.steps
            if any((one.outputs, one.losses, one.gradients, one.parameters, set(one.rng) - _SELDOM_SEEDED))
        ]
        yield Table("Relative L2 errors by step", columns, rows, most=10)
        yield from self._growth_parts()
        environment = [(name, *values) for name, values in self.environment.items()]
        yield Table("Environment", ("setting", "A", "B"), environment, most=20)
        groups = Counter((one.run, one.op, module_name(one.module), one.phase, one.line or None) for one in self.only)
        named = [(*key, calls) for key, calls in groups.items()]
        columns_of_calls = (
            "run",
            Column("op", "name"),
            Column("module", "name"),
            "phase",
            Column("line", "line"),
            "calls",
        )
        yield Table("Calls of one run alone", columns_of_calls, named, most=30)

    def _sides(self, first: FirstCall) -> Table:
        sides = first.a, first.b
        rows: list[tuple[Cell, ...]] = [
            (name, *("-" if side is None else getattr(side, attribute) or "none" for side in sides))
            for name, attribute in (("dtypes", "dtypes"), ("policy", "policy"), ("set by", "said_by"), ("line", "line"))
        ]
        overload = f".{first.overload}" if first.overload else ""
        title = f"First: {first.op}{overload} in {module_name(first.module)}, {first.phase}, call {first.call}"
        return Table(title, ("", "A", "B"), rows)

    def _growth_parts(self) -> Iterator[Part]:
        differing = [one for one in self.growth if one.relative_l2]
        if not differing:
            return
        step = differing[0].step
        rows = [
            (module_name(one.module), one.phase, one.calls, one.relative_l2, one.dtypes_a, one.dtypes_b)
            for one in differing
            if one.step == step
        ]
        columns = (
            Column("module", "name"),
            "phase",
            "calls",
            Column("largest", "number"),
            Column("A", "dtypes"),
            Column("B", "dtypes"),
        )
        yield Table(f"Relative L2 errors by module, step {step}", columns, rows, most=15)
        points = [(place, error) for place, error in self.errors if error > 0]
        yield Chart(
            "Errors along the run",
            "scatter",
            [Series("relative L2", [error for _, error in points], [place for place, _ in points])],
            x_label="call",
            y_label="relative L2",
            y_scale="log",
            note="A point for each call whose results differ. Those before the first point have equal bits.",
        )
        worst: dict[str, float] = {}
        dtypes: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        for one in self.growth:
            if one.step == step and one.phase == "forward":
                worst[one.module] = max(worst.get(one.module, 0.0), one.relative_l2 or 0.0)
                dtypes[one.module] = one.dtypes_a, one.dtypes_b
        shares = heat_shares(list(worst.values()))
        branches = [
            Branch(module, (error or None, *dtypes[module]), ({"heat": share},))
            for (module, error), share in zip(worst.items(), shares, strict=True)
        ]
        kinds = Column("relative L2", "number"), Column("A", "dtypes"), Column("B", "dtypes")
        yield Tree("Modules", kinds, branches, ("error",), note=f"The forward of step {step}.")

    # --- without values

    def _content_of_changes(self) -> Content:
        """The numbers, and a row for each kind of difference: those of a changed policy first."""
        kinds = Counter(change.what for change in self.changes)
        calls = {(change.phase, change.module, change.op, change.number) for change in self.changes}
        differing = len(calls) - kinds[ONLY_BEFORE] - kinds[ONLY_AFTER]
        verdict = f"{differing:,} of {self.compared:,} calls differ." if self.changes else "No difference."
        facts = [
            ("compared", f"{self.compared:,}"),
            ("differing", f"{differing:,}"),
            *((what, f"{kinds[what]:,}") for what in (ONLY_BEFORE, ONLY_AFTER)),
        ]
        if self.dropped:
            facts.append(("not compared", f"{self.dropped:,} (not stored; see max_calls)"))
        groups: dict[tuple[str, ...], Counter[str]] = {}
        ran_as_called = {replace(change, what="ran_with") for change in self.changes if change.what == "inputs"}
        for change in self.changes:
            if change not in ran_as_called:  # one row is enough for a call without casts
                key = change.op, change.phase, change.what, change.before, change.after
                groups.setdefault(key, Counter())[module_name(change.module)] += 1
        decided = {change.op for change in self.changes if change.what in ("policy", "said_by")}
        rows: list[tuple[Cell, ...]] = [
            (*key, modules.total(), modules)
            for key, modules in sorted(groups.items(), key=lambda group: group[0][0] not in decided)
        ]
        columns = Column("op", "name"), "phase", "what", "before", "after", "calls", Column("modules", "code")
        return Content("difference of two traces", verdict, facts, [Table("", columns, rows, most=30)])


# --- comparison


def compare_traces(before: Recording, after: Recording) -> Difference:
    """Compares two traces: their contents if both have values, otherwise the attributes of their calls."""
    changes, compared = changes_of(before, after)
    dropped = before.dropped + after.dropped
    environment = _environments(before, after)
    if not (_has_values(before) and _has_values(after)):
        found = Difference(changes, compared, dropped, environment=environment)
        return replace(found, **_explain_changes(changes))
    one, other = Run(before), Run(after)
    walk = Walk(one, other, bool(environment.keys() - _OF_NO_EFFECT) or one.compiled != other.compiled)
    steps = _steps(before, after, walk)
    found = Difference(changes, len(walk.pairs), dropped, with_values=True, environment=environment, steps=steps)
    only = _only(walk, complete=not dropped)
    found = replace(
        found,
        only=only,
        only_in_a=sum(call.run == "A" for call in only),
        only_in_b=sum(call.run == "B" for call in only),
        growth=_growth(walk),
        errors=[(place, error) for place, error in enumerate(walk.errors) if error],
    )
    return replace(found, **_Verdict(before, after, walk, found).fields())


#: Generators of random numbers that differ in most pairs of runs, and have an effect in few.
_SELDOM_SEEDED = frozenset({"python", "numpy"})
#: Names in `Recording.environment` that do not select kernels.
_OF_NO_EFFECT = frozenset({"python", "rank"})


def _has_values(recording: Recording) -> bool:
    return any(values.digest for call in recording.calls for values in call.values)


def _environments(one: Recording, other: Recording) -> dict[str, tuple[str, str]]:
    first, second = ({"torch": report.torch_version, **report.environment} for report in (one, other))
    names = dict.fromkeys([*first, *second])
    return {
        name: (first.get(name, "unknown"), second.get(name, "unknown"))
        for name in names
        if first.get(name) != second.get(name)
    }


def _explain_changes(changes: Sequence[Change]) -> dict[str, Any]:
    if not changes:
        return {}
    first = next((one for one in changes if one.what not in (ONLY_BEFORE, ONLY_AFTER)), changes[0])
    is_structure = first.what in (ONLY_BEFORE, ONLY_AFTER)
    op, _, overload = first.op.partition(".")
    call = FirstCall(op, overload, first.module, first.phase, first.number, 0, first.line)  # type: ignore[arg-type]
    where = f"{first.op} in {module_name(first.module)}"
    text = f"{first.what} of {where}: {first.before or '-'} in A, {first.after or '-'} in B."
    return {
        "kind": "structure" if is_structure else "policy",
        "first": call,
        "evidence": [text, "Contents were not compared: record both runs with values."],
        "only_in_a": sum(one.what == ONLY_BEFORE for one in changes),
        "only_in_b": sum(one.what == ONLY_AFTER for one in changes),
    }


def _only(walk: Walk, *, complete: bool) -> list[OnlyCall]:
    found = []
    last = max((pair.one for pair in walk.pairs), default=-1), max((pair.other for pair in walk.pairs), default=-1)
    for gap in walk.gaps:
        for name, run, calls, end in (("A", walk.one, gap.one, last[0]), ("B", walk.other, gap.other, last[1])):
            for i in calls:
                call = run.calls[i]
                if complete or i < end:
                    found.append(OnlyCall(name, call.name, call.module, call.phase, run.steps[i], call.line))
    return found


def _growth(walk: Walk) -> list[ModuleGrowth]:
    groups: dict[tuple[int, Phase, str], list[int]] = {}
    for place, pair in enumerate(walk.pairs):
        call = walk.one.calls[pair.one]
        groups.setdefault((walk.one.steps[pair.one], call.phase, call.module), []).append(place)
    found = []
    for (step, phase, module), places in groups.items():
        errors = [error for place in places if (error := walk.errors[place]) is not None]
        dtypes = [
            tuple(
                dict.fromkeys(
                    str(encode(info.dtype)) for place in places for info in run.calls[walk.pairs[place][side]].outputs
                )
            )
            for side, run in enumerate((walk.one, walk.other))
        ]
        found.append(ModuleGrowth(step, phase, module, len(places), max(errors, default=None), *dtypes))
    return found


def _steps(before: Recording, after: Recording, walk: Walk) -> list[StepDifference]:
    outputs: dict[int, float] = {}
    for pair, error in zip(walk.pairs, walk.errors, strict=True):
        if error is not None:
            step = walk.one.steps[pair.one]
            outputs[step] = max(outputs.get(step, 0.0), error)
    found = []
    for number, (one, other) in enumerate(zip(before.ends, after.ends, strict=False)):
        losses = [relative_error(*pair) for pair in zip(one.losses, other.losses, strict=False)]
        gradients, worst_gradient = _worst(one.gradients, other.gradients)
        parameters, worst_parameter = _worst(one.parameters, other.parameters)
        rng = tuple(name for name, state in one.rng.items() if other.rng.get(name, state) != state)
        loss = max((error for error in losses if error is not None), default=None)
        found.append(
            StepDifference(
                number, outputs.get(number), loss, gradients, worst_gradient, parameters, worst_parameter, rng
            )
        )
    return found


def _worst(one: Mapping[str, Values], other: Mapping[str, Values]) -> tuple[float | None, str]:
    errors = {
        name: error for name in one if name in other and (error := relative_error(one[name], other[name])) is not None
    }
    worst = max(errors, key=errors.__getitem__, default="")
    return errors.get(worst), worst if errors.get(worst) else ""


class _Verdict:
    """Puts together what a walk has found."""

    def __init__(self, before: Recording, after: Recording, walk: Walk, found: Difference) -> None:
        self._before, self._after, self._walk, self._found = before, after, walk, found

    def fields(self) -> dict[str, Any]:
        """The fields of `Difference` that say what differs, and why."""
        walk, found = self._walk, self._found
        event = walk.event
        evidence: list[str] = []
        compiled = walk.one.compiled != walk.other.compiled
        if compiled:
            calls = found.only_in_b if walk.one.compiled else found.only_in_a
            name = "A" if walk.one.compiled else "B"
            evidence.append(f"Unseen in {name}, which ran compiled code: {calls:,} calls of the other run.")
        if event is None and walk.rounded:
            return {"kind": "rounding", "evidence": [*self._of_rounding(), *evidence]}
        if event is None:
            event = self._other_event(compiled)
        if event is None:
            if found.largest and (compiled or walk.rounded):
                return {"kind": "rounding", "evidence": evidence}
            if found.largest:
                return {
                    "kind": "op",
                    "evidence": ["Losses, gradients or parameters differ; no recorded call does.", *evidence],
                }
            return {"evidence": evidence}
        kind, more = event.kind, list(event.evidence)
        if event.sources:
            kind, more = self._of_sources(event)
        return {
            "kind": kind,
            "first": self._first(event, kind),
            "evidence": [*more, *self._of_environment(kind), *evidence],
        }

    def _other_event(self, compiled: bool) -> Event | None:
        """The event if results do not tell: calls of one run alone, views, or what compiled code computed."""
        walk, found = self._walk, self._found
        if compiled:
            for step in found.steps:
                errors = [error for error in (step.losses, step.gradients, step.parameters) if error]
                if max(errors, default=0.0) > _MOST_OF_COMPILED:
                    evidence = ("Losses, gradients or parameters differ by more than rounding.",)
                    return Event("op", None, None, max(errors), evidence=evidence, op="torch.compile", module="")
            return None
        if found.largest:
            return walk.reordered()
        for gap in walk.gaps:
            if self._counts(gap):
                side = "both" if gap.one and gap.other else "A" if gap.one else "B"
                text = "Other calls take their place, and their results have equal bits."
                text = text if side == "both" else f"Only {side} makes it, and what is read after it has equal bits."
                one, other = walk.first_of(gap)
                return Event("structure", one, other, 0.0, evidence=(text,))
        return None

    def _counts(self, gap: Gap) -> bool:
        """Whether calls of one run alone are the program's: what a backward calls depends on PyTorch's version."""
        calls = [self._walk.one.calls[i] for i in gap.one] + [self._walk.other.calls[i] for i in gap.other]
        if self._found.dropped and not (gap.one and gap.other):
            return False
        if "torch" in self._found.environment:
            return any(call.phase in ("forward", "recompute") for call in calls)
        return True

    def _first(self, event: Event, kind: Kind) -> FirstCall:
        walk = self._walk
        pair = event.one, event.other
        sides: list[CallSide | None] = []
        for run, i in zip((walk.one, walk.other), pair, strict=True):
            call = None if i is None else run.calls[i]
            sides.append(None if call is None else CallSide(call.dtypes, call.policy_name, call.said_by, call.line))
        run, i = (walk.one, pair[0]) if pair[0] is not None else (walk.other, pair[1])
        if i is None:
            return FirstCall(event.op, "", event.module or "", "forward", 0, 0, "", event.error)
        call = run.calls[i]
        same = (
            one for one in run.calls[:i] if (one.name, one.module, one.phase) == (call.name, call.module, call.phase)
        )
        return FirstCall(
            event.op or call.op,
            "" if event.op else call.overload,
            call.module if event.module is None else event.module,
            call.phase,
            sum(1 for _ in same),
            run.steps[i],
            call.line,
            event.error,
            event.parameter if kind == "weight" and event.parameter else None,
            *sides,
        )

    # --- evidence

    def _of_sources(self, event: Event) -> tuple[Kind, list[str]]:
        """The cause if parameters or inputs differ, and what shows it."""
        walk, kind = self._walk, event.kind
        if kind == "policy":
            a, b = event.sources[0]
            dtypes = walk.one.sources[-1 - a].info.dtype, walk.other.sources[-1 - b].info.dtype
            what = event.parameter or "Its input"
            return kind, [
                f"{what} is {encode(dtypes[0])} in A and {encode(dtypes[1])} in B, with equal numbers but for rounding."
            ]
        weights = [
            name
            for name, source in walk.one.named.items()
            if name in walk.other.named and source.values.digest != walk.other.named[name].values.digest
        ]
        batches = self._differing_inputs()
        rng = [step.step for step in self._found.steps if set(step.rng) - _SELDOM_SEEDED]
        seeded = bool(rng and rng[0] == 0) or self._draws_differ()
        if weights and batches and seeded:
            return "input", [
                f"Random numbers differ from the start, and with them inputs and {len(weights):,} parameters: a seed.",
                *self._of_rng(),
            ]
        if kind == "weight":
            evidence = []
            if event.parameter:
                one, other = walk.one.named[event.parameter].values, walk.other.named[event.parameter].values
                evidence.append(
                    f"{event.parameter} differs when it is first read: relative L2 {spell_number(event.error)}, "
                    f"largest magnitude {spell_number(one.amax)} in A and {spell_number(other.amax)} in B."
                )
            count = len(walk.one.named.keys() & walk.other.named.keys())
            evidence.append(f"Of {count:,} parameters and buffers that are read, {len(weights):,} differ.")
            if self._draws_differ():
                evidence.append("They were initialized with other random numbers.")
            return kind, [*evidence, *(["Inputs differ, too."] if batches else [])]
        return kind, [
            *self._of_batch(event),
            *self._of_rng(),
            *([f"So do {len(weights):,} parameters."] if weights else []),
        ]

    def _of_batch(self, event: Event) -> Iterator[str]:
        walk = self._walk
        a, b = next((a, b) for a, b in event.sources)
        one, other = walk.one.sources[-1 - a], walk.other.sources[-1 - b]
        yield f"Its input {one.info.name} has other contents, and comes from outside of the recorded calls."
        steps = (
            sorted(walk.other.batches.get(one.values.digest, ())),
            sorted(walk.one.batches.get(other.values.digest, ())),
        )
        for name, found, theirs in (("A", steps[0], "B"), ("B", steps[1], "A")):
            if found:
                yield f"What {name} reads here, {theirs} reads in step {found[0]}: batches come in another order."
                return
        x, y = one.values, other.values
        if x.amax is not None and x.amax == y.amax and x.l2 and y.l2 and math.isclose(x.l2, y.l2, rel_tol=1e-9):
            yield "Both have the same largest magnitude and L2 norm: probably the same rows in another order."

    def _of_rng(self) -> Iterator[str]:
        for step in self._found.steps:
            if step.rng:
                yield f"The states of random number generators differ from step {step.step} on: {', '.join(step.rng)}."
                return

    def _draws_differ(self) -> bool:
        """Whether parameters were initialized with other random numbers in the recordings."""
        draws = [
            [run.results(i) for i in sorted(run.initial) if is_random(run.calls[i].name)]
            for run in (self._walk.one, self._walk.other)
        ]
        return any(one and other and one != other for one, other in zip(*draws, strict=False))

    def _differing_inputs(self) -> bool:
        one, other = self._walk.one.read_forward, self._walk.other.read_forward
        return one != other

    def _of_environment(self, kind: Kind) -> Iterator[str]:
        if kind == "op":
            names = [name for name in self._found.environment if name not in _OF_NO_EFFECT]
            if names:
                yield f"These differ between the runs: {', '.join(names)}."
            else:
                yield "Versions, devices and settings are equal: the program calls another kernel or other arguments."
        if kind == "input":
            first = self._walk.event
            if first is not None and not first.sources:
                yield from self._of_rng()

    def _of_rounding(self) -> Iterator[str]:
        walk = self._walk
        pair, error = walk.rounded[0]
        call = walk.one.calls[pair.one]
        yield (
            f"It starts in {call.op} in {module_name(call.module)}, step {walk.one.steps[pair.one]}: on equal inputs, "
            f"its results differ by {spell_number(error)}, within the rounding of its dtype, "
            f"{spell_number(rounding_of(call))}."
        )
        yield f"Calls with equal inputs whose results differ: {len(walk.rounded):,}, all by rounding."
        names = [name for name in self._found.environment if name not in _OF_NO_EFFECT]
        yield f"What may select other kernels: {', '.join(names) or 'compiled code'}."
        yield f"The error grows to {spell_number(self._found.largest)}."


#: The error of losses, gradients and parameters that compiled code may cause by rounding.
_MOST_OF_COMPILED = 2e-2
