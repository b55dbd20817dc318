"""`Difference`: what `TraceReport.diff` finds, in words, tables and charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch_promote.errors import OptionError
from torch_promote.observe.diff import ONLY_AFTER, ONLY_BEFORE, Change
from torch_promote.observe.divergence import Kind
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

__all__ = ["CallSide", "Difference", "FirstCall", "ModuleGrowth", "OnlyCall", "StepDifference"]

_SIDES = Column("A", "dtypes"), Column("B", "dtypes")


@dataclass(frozen=True, slots=True)
class CallSide:
    """A call as one of two runs made it.

    Attributes:
        dtypes: The dtypes of inputs, of cast inputs if they differ, and of outputs, as `Call.dtypes`.
        shapes: The shapes of inputs and outputs: "[8, 16], [4, 16] -> [8, 4]".
        policy: The name of its policy; "" without one.
        said_by: Who set it.
        line: "path:number" of the program's line.
    """

    dtypes: str
    shapes: str
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
        rng: The random number generators whose states differed when it first drew random numbers, or at its end: "cpu",
            "cuda:0", "python", "numpy".
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

    def shown_dtypes(self) -> tuple[str, str]:
        """Both sides' dtypes, as one text each: a cell shows the first of several texts alone."""
        return ", ".join(self.dtypes_a), ", ".join(self.dtypes_b)


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
        unmatched: The number of contents that one trace alone has: results that no compared call reads, losses,
            gradients and parameters. They have no error.
        growth: The errors by step, phase and module, in the order of the run: a list of `ModuleGrowth`.
        errors: Of the compared calls whose results differ, the numbers and the relative errors. Results of one trace
            alone that stand in the same place, and that no compared call reads, are compared as well.
        environment: What differs in versions, devices and settings: by name, the values of both.
        unfinished: By run, "A" or "B", the number of steps in a recording without an end, because the run was killed or
            is still running. The other one is compared up to there.

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
    FORMAT: ClassVar[str] = "torch_promote difference"

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
    unmatched: int = 0
    growth: list[ModuleGrowth] = field(default_factory=list)
    errors: list[tuple[int, float]] = field(default_factory=list)
    environment: dict[str, tuple[str, str]] = field(default_factory=dict)
    unfinished: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether there are no differences: with values, whether all results have equal bits."""
        return self.kind is None if self.with_values else not self.changes

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

        Calls of one trace alone count by what they change in the calls that read their results. Results that no
        compared call reads, and losses, gradients and parameters, have to be in both traces.

        Args:
            tolerance: The largest relative L2 error that is allowed, 0 or more.

        Raises:
            OptionError: The tolerance is no such number, or a trace has no values. It is a ValueError.
        """
        if not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
            raise OptionError(f"`tolerance` is a finite number of 0 or more, got {tolerance!r}.")
        if not self.with_values:
            raise OptionError("a tolerance compares contents, and a trace has none. Trace with `values=True`.")
        return self.equal or (self.largest <= tolerance and not self.unmatched)

    def to_dict(self) -> dict[str, Any]:
        """Returns the difference as JSON-compatible values, with `equal`."""
        return {"equal": self.equal, **super().to_dict()}

    def content(self) -> Content:
        """Returns the verdict, both sides of the first call, the evidence, and where errors grow."""
        if not self.with_values:
            return self._content_of_changes()
        parts = list(self._parts())
        return Content("difference of two runs", self._verdict(), list(self._facts()), parts, good=self.equal)

    # --- with values

    def _verdict(self) -> str:
        ends = (
            f" The recording of {name} ends after {steps:,} step{'s' * (steps != 1)}: its run was killed, or is "
            "still running."
            for name, steps in self.unfinished.items()
        )
        return "".join([self._sentence(), *ends])

    def _sentence(self) -> str:
        if self.equal:
            return "Equal: all results have equal bits."
        if self.unfinished and self.kind == "structure" and not self.only:
            return "All results that both recordings have are equal."
        first = self.first
        if self.kind == "rounding":
            return "No call is to blame: the results differ by rounding alone, on different kernels."
        if first is None:
            return "Different, and no recorded call explains it."
        call = f"{first.op} in {module_name(first.module)}"
        call += "" if first.phase == "forward" else f" ({first.phase})"
        error = "" if first.relative_l2 is None else f" (relative L2 {spell_number(first.relative_l2)})"
        if self.kind == "structure":
            only = "A" if first.b is None else "B" if first.a is None else ""
            where = f"only {only} makes it" if only else "other calls take its place, with equal results"
            where += f", and later results differ{error}" if only and first.relative_l2 else ""
            return f"Another structure in step {first.step}: {call}, {where}."
        whats = {
            "weight": f"reads another weight, {first.parameter}{error}.",
            "input": f"has another input, or other random numbers{error}.",
            "policy": f"ran in another dtype or under another policy{error}.",
            "op": f"has other results on equal inputs{error}.",
        }
        return f"Different from step {first.step} on: {call} {whats[str(self.kind)]}"

    def _facts(self) -> Iterator[Fact]:
        if self.kind is not None:
            yield "kind", self.kind
        yield "compared", f"{self.compared:,}", "calls in both runs"
        yield "largest error", spell_number(self.largest), "relative L2, of any result, loss, gradient or parameter"
        if self.only_in_a or self.only_in_b:
            yield "only in A", f"{self.only_in_a:,}"
            yield "only in B", f"{self.only_in_b:,}"
        if self.unmatched:
            yield "unmatched", f"{self.unmatched:,}", "results, losses, gradients or parameters of one run alone"
        if self.dropped:
            yield "not compared", f"{self.dropped:,} (not stored; see max_calls)"

    def _parts(self) -> Iterator[Part]:
        first = self.first
        if first is not None:
            sides = first.a, first.b
            attributes = {
                "dtypes": "dtypes",
                "shapes": "shapes",
                "policy": "policy",
                "set by": "said_by",
                "line": "line",
            }
            if first.a is None or first.b is None or first.a.shapes == first.b.shapes:
                del attributes["shapes"]
            rows: list[tuple[Cell, ...]] = [
                (name, *("-" if side is None else getattr(side, attribute) or "none" for side in sides))
                for name, attribute in attributes.items()
            ]
            op = f"{first.op}.{first.overload}" if first.overload else first.op
            place = f"{first.phase}, step {first.step}, call {first.call}"
            yield Table(f"First: {op} in {module_name(first.module)}, {place}", ("", "A", "B"), rows)
        yield Listing("Evidence", self.evidence, most=20)
        yield self._steps_table()
        yield from self._growth_parts()
        whats = "inputs", "ran_with", "outputs", "policy", "casts"
        yield self._changes_table("Other dtypes, policies and casts", whats, ("A", "B"))
        environment = [(name, *values) for name, values in self.environment.items()]
        yield Table("Environment", ("setting", "A", "B"), environment, most=20)
        groups = Counter((one.run, one.op, module_name(one.module), one.phase, one.line or None) for one in self.only)
        named = [(*key, calls) for key, calls in groups.items()]
        columns = "run", Column("op", "name"), Column("module", "name"), "phase", Column("line", "line"), "calls"
        yield Table("Calls of one run alone", columns, named, most=30)

    def _steps_table(self) -> Table:
        numbers = {name: Column(name, "number") for name in ("outputs", "losses", "gradients", "parameters")}
        columns: dict[str, Column] = {"step": Column("step"), **numbers}
        columns |= {f"worst_{name}": Column(f"worst {name}", "name") for name in ("gradient", "parameter")}
        rows = [
            (*(cell if (cell := getattr(one, name)) != "" else None for name in columns), ", ".join(one.rng) or None)
            for one in self.steps
            # Programs seldom seed the other two.
            if set(one.rng) - {"python", "numpy"} or any(getattr(one, name) for name in numbers)
        ]
        return Table("Relative L2 errors by step", [*columns.values(), "RNG differs"], rows, most=10)

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
        shares = heat_shares([one.relative_l2 or 0.0 for one in forward])
        branches = [
            Branch(one.module, (one.relative_l2 or None, *one.shown_dtypes()), ({"heat": share},))
            for one, share in zip(forward, shares, strict=True)
        ]
        kinds = Column("relative L2", "number"), *_SIDES
        yield Tree("Modules", kinds, branches, ("error",), note=f"The forward of step {step}.")
        rows = [
            (module_name(one.module), one.phase, one.calls, one.relative_l2, *one.shown_dtypes())
            for one in differing
            if one.step == step
        ]
        columns = Column("module", "name"), "phase", "calls", Column("largest", "number"), *_SIDES
        yield Table(f"Relative L2 errors by module, step {step}", columns, rows, most=15)

    # --- without values

    def _content_of_changes(self) -> Content:
        """The numbers, and a row for each kind of difference: those of a changed policy first."""
        kinds = Counter(change.what for change in self.changes)
        calls = {(change.phase, change.module, change.op, change.number) for change in self.changes}
        differing = len(calls) - kinds[ONLY_BEFORE] - kinds[ONLY_AFTER]
        verdict = f"{differing:,} of {self.compared:,} calls differ." if self.changes else "No difference."
        facts: list[Fact] = [
            ("compared", f"{self.compared:,}"),
            ("differing", f"{differing:,}"),
            *((what, f"{kinds[what]:,}") for what in (ONLY_BEFORE, ONLY_AFTER)),
            ("contents", "not compared", "record both runs with values"),
        ]
        if self.dropped:
            facts.append(("not compared", f"{self.dropped:,} (not stored; see max_calls)"))
        parts = [self._changes_table("", kinds.keys(), ("before", "after"))]
        return Content("difference of two traces", verdict, facts, parts)

    def _changes_table(self, title: str, whats: Collection[str], sides: tuple[str, str]) -> Table:
        groups: dict[tuple[str, ...], Counter[str]] = {}
        ran_as_called = {replace(change, what="ran_with") for change in self.changes if change.what == "inputs"}
        for change in self.changes:
            if change.what in whats and change not in ran_as_called:  # one row is enough for a call without casts
                key = change.op, change.phase, change.what, change.before, change.after
                groups.setdefault(key, Counter())[module_name(change.module)] += 1
        decided = {change.op for change in self.changes if change.what in ("policy", "said_by")}
        rows: list[tuple[Cell, ...]] = [
            (*key, modules.total(), modules)
            for key, modules in sorted(groups.items(), key=lambda group: group[0][0] not in decided)
        ]
        columns = Column("op", "name"), "phase", "what", *sides, "calls", Column("modules", "code")
        return Table(title, columns, rows, most=30)
