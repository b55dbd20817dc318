"""The comparison of two traces: what differs between them, which call is first, and the evidence for the cause."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch_promote.observe.diff import ONLY_AFTER, ONLY_BEFORE, Change, changes_of
from torch_promote.observe.difference import CallSide, Difference, FirstCall, ModuleGrowth, OnlyCall, StepDifference
from torch_promote.observe.divergence import Event, Kind, Pair, Walk
from torch_promote.observe.events import Step
from torch_promote.observe.run import Run, is_random, is_unfinished, relative_error, rounding_of
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import module_name, spell_number

if TYPE_CHECKING:
    from torch_promote.observe.divergence import Gap
    from torch_promote.observe.events import Call, Phase, Recording
    from torch_promote.observe.values import Values

__all__ = ["compare_traces"]


#: Names in `Recording.environment` that do not select kernels.
_OF_NO_EFFECT = frozenset({"python", "rank"})
#: The error of losses, gradients and parameters that compiled code may cause by rounding.
_MOST_OF_COMPILED = 2e-2
#: The maximum number of parameters that a sentence names.
_MOST_NAMES = 3


def compare_traces(before: Recording, after: Recording) -> Difference:
    """Compares two traces: their contents if both have values, otherwise the attributes of their calls."""
    changes, compared = changes_of(before, after)
    dropped = before.dropped + after.dropped
    environment = _environments(before, after)
    if not (_has_values(before) and _has_values(after)):
        found = Difference(changes, compared, dropped, environment=environment)
        return replace(found, **_explain_changes(changes))
    one, other = Run(before), Run(after)
    may_round = bool(environment.keys() - _OF_NO_EFFECT) or one.compiled != other.compiled
    complete = not (before.dropped or one.unfinished), not (after.dropped or other.unfinished)
    walk = Walk(one, other, may_round, complete)
    only = _only(walk)
    errors = [(place, error) for place, error in enumerate(walk.errors) if error]
    unread, unmatched = _compare_unread(before, after, walk) if not dropped else ([], 0)
    found = Difference(
        changes,
        len(walk.pairs),
        dropped,
        with_values=True,
        environment=environment,
        steps=_steps(before, after, walk),
        only=only,
        only_in_a=sum(call.run == "A" for call in only),
        only_in_b=sum(call.run == "B" for call in only),
        growth=_growth(walk),
        errors=sorted(errors + unread),
        unmatched=unmatched + _unmatched_ends(before, after),
        unfinished={name: len(run.ends) for name, run in (("A", before), ("B", after)) if is_unfinished(run)},
    )
    return replace(found, **_Verdict(walk, found).fields())


def _has_values(recording: Recording) -> bool:
    return any(values.digest for call in recording.calls for values in call.values)


def _environments(one: Recording, other: Recording) -> dict[str, tuple[str, str]]:
    first, second = ({"torch": report.torch_version, **report.environment} for report in (one, other))
    differing = (name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name))
    # A recording has the environment variables that were set; one of another version of this package may lack others.
    missing = {name: "not set" if name.isupper() else "unknown" for name in differing}
    return {name: (first.get(name, text), second.get(name, text)) for name, text in missing.items()}


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


def _only(walk: Walk) -> list[OnlyCall]:
    found = []
    for gap in walk.gaps:
        for name, run, calls in (("A", walk.one, gap.one), ("B", walk.other, gap.other)):
            for call, step in ((run.calls[i], run.steps[i]) for i in calls):
                found.append(OnlyCall(name, call.name, call.module, call.phase, step, call.line))
    return found


def _compare_unread(before: Recording, after: Recording, walk: Walk) -> tuple[list[tuple[int, float]], int]:
    """Compares what calls of one run alone compute and no call reads, such as the outputs of a model.

    All else that such calls compute has an effect on the calls that read it. What a backward computes is compared as
    gradients, and what compiled code computes is unseen.

    Returns:
        As `Difference.errors`, and the number of results that have no counterpart in the other run.
    """
    one, other = walk.one, walk.other
    if one.compiled != other.compiled:
        return [], 0
    starts = [pair.one for pair in walk.pairs]
    ends = _unread(one, before, other), _unread(other, after, one)
    errors: list[tuple[int, float]] = []
    unmatched = 0
    for gap in walk.gaps:
        ones, others = [i for i in gap.one if i in ends[0]], [j for j in gap.other if j in ends[1]]
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


def _unread(run: Run, recording: Recording, other: Run) -> set[int]:
    """The calls of a forward whose results no call reads, are no loss, and are not in the other run."""
    read: set[int] = set()
    for i in reversed(run.own):
        # What is only converted, or only read by calls without results, such as Tensor.item, is compared nowhere else.
        if run.calls[i].values and (i in read or not run.is_transparent(i)):
            read.update(writer for writers in run.calls[i].reads for writer in writers)
    known = {digest for i in other.own for digest in other.results(i)}
    known |= {loss.digest for end in recording.ends for loss in end.losses}
    return {
        i
        for i in run.own
        if i not in read and run.calls[i].phase in ("forward", "recompute") and not known.issuperset(run.results(i))
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


def _shapes(call: Call) -> str:
    """The shapes of a call's inputs and outputs."""
    inputs, outputs = (", ".join(str(list(info.shape)) for info in infos) for infos in (call.inputs, call.outputs))
    return f"{inputs or 'none'} -> {outputs or 'none'}"


class _Verdict:
    """Puts together what a walk has found."""

    def __init__(self, walk: Walk, found: Difference) -> None:
        self._walk, self._found = walk, found
        #: The names of what may select other kernels and differs.
        self._selecting = ", ".join(name for name in found.environment if name not in _OF_NO_EFFECT)

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
            if walk.gaps:
                places = f"Places where the versions of PyTorch make other calls: {len(walk.gaps):,}."
                evidence.append(f"{walk.described(walk.gaps[0])}, and all results have equal bits. {places}")
            return {"evidence": evidence}
        kind, more = event.kind, list(event.evidence)
        if event.sources:
            kind, more = self._of_sources(event)
        return {
            "kind": kind,
            "first": self._first(event, kind),
            "evidence": [*more, *self._of_shapes(), *self._of_environment(event, kind), *evidence],
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
                text = f"{walk.described(gap)}, and what is read after it has equal bits."
                return Event("structure", *walk.first_of(gap), 0.0, evidence=(text,))
        if walk.tail is not None and found.unfinished:
            text = "All results up to there have equal bits."
            return Event("structure", *walk.first_of(walk.tail), evidence=(text,))
        return None

    def _counts(self, gap: Gap) -> bool:
        """Whether calls of one run alone are the program's. Others depend on PyTorch's version.

        These are calls in a backward, and those that a line makes instead of others, or besides them: another overload
        of aten::fill_ for `x[0] = 1`, a copy in nn.MultiheadAttention.
        """
        if "torch" not in self._found.environment:
            return True
        made = [
            {run.calls[i].line for i in calls if run.calls[i].phase in ("forward", "recompute")}
            for run, calls in zip(self._walk.runs, (gap.one, gap.other), strict=True)
        ]
        if gap.one and gap.other:
            return made[0] != made[1]
        run, calls, lines = (self._walk.one, gap.one, made[0]) if gap.one else (self._walk.other, gap.other, made[1])
        start, end = bisect.bisect_left(run.own, calls[0]), bisect.bisect_right(run.own, calls[-1])
        around = {run.calls[i].line for i in (*run.own[max(start - 1, 0) : start], *run.own[end : end + 1])}
        return not lines <= around

    def _first(self, event: Event, kind: Kind) -> FirstCall:
        walk = self._walk
        pair = event.one, event.other
        sides: list[CallSide | None] = []
        for run, i in zip(walk.runs, pair, strict=True):
            call = None if i is None else run.calls[i]
            if call is None:
                sides.append(None)
            else:
                sides.append(CallSide(call.dtypes, _shapes(call), call.policy_name, call.said_by, call.line))
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
                f"{what} is {dtype_name(dtypes[0])} in A and {dtype_name(dtypes[1])} in B, with equal numbers but for "
                "rounding."
            ]
        weights = [
            name
            for name, source in walk.one.named.items()
            if name in walk.other.named and source.values.digest != walk.other.named[name].values.digest
        ]
        reads = walk.one.read_forward, walk.other.read_forward
        batches = bool(reads[0] - reads[1] and reads[1] - reads[0])
        rng = [step.step for step in self._found.steps if set(step.rng) - {"python", "numpy"}]
        seeded = bool(rng and rng[0] == 0) or self._draws_differ()
        if weights and batches and seeded:
            return "input", [
                f"Random numbers differ from the start, and with them inputs and {len(weights):,} parameters: a seed.",
                *self._of_rng(),
            ]
        if kind == "weight":
            count = len(walk.one.named.keys() & walk.other.named.keys())
            names = ", ".join(weights[:_MOST_NAMES]) + (", ..." if len(weights) > _MOST_NAMES else "")
            evidence = [f"Parameters and buffers that differ: {len(weights):,} of {count:,} that are read: {names}."]
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
        a, b = event.sources[0]
        one, other = walk.one.sources[-1 - a], walk.other.sources[-1 - b]
        yield f"Its input {one.info.name} has other contents, and comes from outside of the recorded calls."
        for name, source, theirs, run in (("A", one, "B", walk.other), ("B", other, "A", walk.one)):
            if steps := run.batches.get(source.values.digest):
                yield f"What {name} reads here, {theirs} reads in step {min(steps)}: batches come in another order."
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
            [run.results(i) for i in sorted(run.initial) if is_random(run.calls[i].name)] for run in self._walk.runs
        ]
        return any(one and other and one != other for one, other in zip(*draws, strict=False))

    def _of_shapes(self) -> Iterator[str]:
        walk = self._walk
        pairs = [(walk.one.calls[pair.one], walk.other.calls[pair.other]) for pair in walk.pairs]
        others = [(one, other) for one, other in pairs if _shapes(one) != _shapes(other)]
        if others:
            one, other = others[0]
            yield (
                f"Calls with other shapes: {len(others):,} of {len(pairs):,}. The first is {one.op} in "
                f"{module_name(one.module)}: {_shapes(one)} in A, {_shapes(other)} in B."
            )

    def _of_environment(self, event: Event, kind: Kind) -> Iterator[str]:
        call = None if event.one is None else self._walk.one.calls[event.one]
        if kind == "op" and self._selecting:
            yield f"These differ between the runs: {self._selecting}."
        elif kind == "op" and call is not None and call.phase == "optimizer":
            yield (
                "Versions, devices and settings are equal: a number that the optimizer passes differs, such as its lr, "
                "weight_decay or betas. Recordings do not have such arguments."
            )
        elif kind == "op":
            yield "Versions, devices and settings are equal: the program calls another kernel or other arguments."
        if kind == "input" and not event.sources:
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
        yield f"What may select other kernels: {self._selecting or 'compiled code'}."
