"""`TraceReport`, the report of `trace`."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args, overload

from torch_promote.errors import OptionError, check_path, explains_arguments, shown
from torch_promote.observe.call import AUTOCAST_OFF, COMPILED, Phase, TensorInfo
from torch_promote.observe.policy_sources import NO_REGION, UnusedOverride
from torch_promote.reading.difference import Difference, compare_recordings
from torch_promote.reading.dtype_errors import cure_of, describe_raised, of_calls_before, short_source
from torch_promote.reading.explanation import Explanation, describe_call, explain
from torch_promote.reading.findings import (
    OPTIMIZER,
    by_weight,
    casts_chart,
    conversions,
    dtypes_chart,
    exponents_chart,
    float8_table,
    module_tree,
    modules_and_optimizer,
    nonfinite_by_op,
    other_dtypes,
    promotions,
    result_dtypes,
    rounded_away,
    savings,
    time_in_casts,
    zero_gradients,
)
from torch_promote.reading.matching import Match, match_recordings
from torch_promote.recording.file import SUFFIX, read_recording, write_recording
from torch_promote.recording.recording import CallGroup, Recording
from torch_promote.report.base import (
    Column,
    Content,
    Fact,
    Listing,
    Part,
    Report,
    Table,
    module_name,
    percent,
    size,
)
from torch_promote.report.codec import WRONG_DATA, encode

_SAVED = f'Pass a file that trace(record="NAME{SUFFIX}") or report.save("NAME{SUFFIX}") wrote.'

#: The number of errors that the program has handled, and of reasons why autocast was off, in a report.
_SHOWN = 3


class TraceReport(Recording, Report):
    """The report of `trace`: its calls, their sums, and methods to query and save them.

    Attributes:
        calls: The first `max_calls` calls, in the order in which they ended: an op after the ops that it calls.
        dropped: The number of calls after those. Sums and tables include them.
        device_names: The names of the GPUs that were used.
        torch_version: PyTorch's version.
        not_seen: Computations of the block that are not in the report: sentences with a `kind` and a `count`.
        steps: The number of optimizer steps that ended in the block.
        raised: The calls that raised, with the call inside each that raised first; of equal ones the last.
        failure: The error that ended the block, if one of these calls raised it or its text names its cure; or None.
        nonfinite: The losses that are inf or NaN, and with `values=True` the call that made the first of these values.
            A loss is a tensor on which `backward()` is called; with `where="casts"` and no values, none is seen.
        first_nonfinite: That `Call`, or None.
        values: With `values=True`, the values of each call's results, by its number, which is its index in `calls`.
            `values_of` returns those of a `Call`.
        reads: With `values=True`, what each call of the program reads: a `Read` for each of its inputs, by its number.
        draws: With `values=True`, the generators from which calls draw random numbers, with digests of their states.
        sources: With `values=True`, the tensors that no recorded call made: a list of `Source`.
        states: With `values=True`, the states of optimizers: a list of `OptimizerState`.
        ends: With `values=True`, the losses, gradients and parameters at the end of each step: a list of `Step`.
        rng: With `values=True`, digests of the states of the random number generators at the first call.
        environment: With `values=True`, what results may depend on: versions, devices, threads, settings, by name.
        scaled_step: What is wrong with a step of an optimizer whose gradients GradScaler's scale was in; or "".
        undone: The number of casts of autocast that undo a conversion of the program, by its line and dtypes.
        total: The sums over all calls, a `CallGroup`.
    """

    NOUN: ClassVar[str] = "trace"
    FORMAT: ClassVar[str] = "torch_promote trace"
    VERSION: ClassVar[int] = 3

    @explains_arguments
    def explain(self, pattern: str) -> Explanation:
        """Explains the calls of a module, an op or a line: dtypes, casts, policies, and suggested changes.

        Args:
            pattern: A module's path ("blocks.3.attn"), including its submodules, or "(model)": the calls of the model
                itself and outside of modules; an op ("softmax", "aten::softmax", "aten::softmax.int"); or the end of a
                line ("train.py:41", "train.py"). If it is ambiguous, add a prefix: "module=softmax", "op=softmax".

        Raises:
            OptionError: The pattern matches nothing in the trace, or is ambiguous. It is a ValueError.
        """
        return explain(self, pattern)

    @overload
    def diff(self, other: TraceReport, *, match: Literal[False] = False) -> Difference: ...

    @overload
    def diff(self, other: TraceReport, *, match: Literal[True], tolerance: float | None = None) -> Match: ...

    def diff(self, other: TraceReport, *, match: bool = False, tolerance: float | None = None) -> Difference | Match:
        """Compares with another trace: see `torch_promote.diff`."""
        return diff(self, other, match=match, tolerance=tolerance)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_calls: int = sys.maxsize) -> Self:
        """Reads a recording, NAME.jsonl.gz, of `trace(record=...)` or `save`.

        Args:
            path: The file.
            max_calls: The number of calls to keep one by one.

        Raises:
            OptionError: The file cannot be read, is no recording, or was written by an incompatible version. It is a
                ValueError.
        """
        cannot = f"cannot read the recording {check_path('path', path)!r}:"
        if not os.fspath(path).endswith(SUFFIX):
            raise OptionError(f"{cannot} its name does not end in {SUFFIX}. {_SAVED}")
        report = cls(max_calls)
        try:
            read_recording(path, report)
        except OptionError:
            raise
        except OSError as error:
            raise OptionError(f"{cannot} {error.strerror or error}. {_SAVED}") from error
        except WRONG_DATA as error:
            raise OptionError(f"{cannot} {error}. {_SAVED}") from error
        return report

    def unused_overrides(self) -> list[UnusedOverride]:
        """Returns the overrides of regions and modules that no call in the block used, with their sources.

        An override that repeats the op's existing policy counts as unused.
        """
        names = ("op", "device", "policy", "policy_source")
        return [UnusedOverride(*(one[name] for name in names)) for one in self.asked if not one["used"]]

    def content(self) -> Content:
        """Returns the verdict, the numbers, the ops, casts and suggestions, and for the page modules and charts."""
        steps = f", optimizer steps: {self.steps:,}" if self.steps else ""
        title = f"trace: torch {self.torch_version}{steps}{''.join(f', {name}' for name in self.device_names)}"
        what, verdict = self._alarm()
        if not what:
            verdict = " ".join(filter(None, (self.scaled_step, *rounded_away(self), self._verdict())))
            good = False if self.scaled_step else None
            return Content(title, verdict, list(self._facts()), list(self._parts()), good)
        facts: list[Fact] = [*self._facts(), ("autocast", self._verdict())]
        told = (self.scaled_step, verdict) if self.failure is None else (verdict, self.scaled_step)
        verdict = " ".join(filter(None, told))
        return Content(f"{title}, {what}", verdict, facts, list(self._parts()), good=False)

    def _alarm(self) -> tuple[str, str]:
        """An error, losses or results that are NaN, or gradients of zeros, and where it began; ("", "") for none."""
        if self.failure is not None:
            return "an error", self._failed()
        zeros, made = zero_gradients(self)
        losses = self.nonfinite.about_losses(self.steps)
        if zeros and made is not None and not losses:
            where = f"The first call of its backward that made only zeros of other values: {describe_call(made, self)}."
            inf = "" if self.first_nonfinite is None else f"{self._first_nonfinite()} "
            return zeros, f"{zeros[0].upper()}{zeros[1:]}. {inf}{where} find-nan repeats it in float32."
        if not losses and (self.nonfinite.losses or not self.nonfinite.nan_calls):
            return "", ""
        what = losses or f"NaN in results of {self.nonfinite.nan_calls:,} calls"
        return what, f"{what[0].upper()}{what[1:]}. {self._first_nonfinite()}"

    def _failed(self) -> str:
        """What ended the program, and what cures it."""
        failure = self.failure
        assert failure is not None
        said = textwrap.shorten(failure.text, 200).rstrip(".")
        before = "" if self.dropped else of_calls_before(failure, self.calls)
        if not failure.in_call or not self.raised:
            return f"The program ended with {said}. {failure.told} {before}".rstrip()
        cure = cure_of(self.raised[-1], failure, self.calls).text
        call = f"{describe_raised(self.raised[-1])}{failure.called_at}"
        return f"The call that raised: {call}: {said}.{cure and f' What cures it: {cure}'}"

    def _first_nonfinite(self) -> str:
        first = self.first_nonfinite
        if first is None:
            return "To see which call made the first of these values, run `torch-promote find-nan` in place of `trace`."
        return f"The first inf or NaN: {describe_call(first, self)}."

    def _verdict(self) -> str:
        total = self._total_of_model()
        threads = sum(one.number for one in self.not_seen if one.kind == "threads")
        raised = f" Calls that raised: {total.errors:,}." if total.errors else ""
        raised += f" Threads that were not traced: {threads:,}." if threads else ""
        if not total.calls:
            return f"{'Only optimizers called ops.' if self.total.calls else 'No call was recorded.'}{raised}"
        having = total.policies.total()
        if not having and (total.rules[COMPILED] or any(one.kind == "compiled" for one in self.not_seen)):
            return (
                f"Autocast had no policy for the calls in this trace ({total.calls:,}). The casts of compiled "
                f"functions are part of their graphs.{raised}"
            )
        if not having:
            why = [one for one, _ in total.rules.most_common() if one.startswith((NO_REGION, AUTOCAST_OFF))]
            why_off = f": {'; '.join(map(short_source, why[:_SHOWN]))}." if why else "."
            device = why[0].removeprefix(NO_REGION).partition(":")[0] if why and why[0].startswith(NO_REGION) else ""
            why_off += f' The tensors are on {device}: torch.autocast("{device}").' if device else ""
            return (
                f"Autocast was off or had no policy for all calls ({total.calls:,}), which kept their "
                f"dtypes{why_off}{raised}"
            )
        casts = f"Casts made: {total.casts:,} ({size(total.bytes)}), {total.repeated:,} of them repeated."
        return f"Autocast had a policy for {having:,} of {total.calls:,} calls. {casts}{raised}"

    def _total_of_model(self) -> CallGroup:
        """The sums without the calls of optimizers, which run in the dtypes of the weights."""
        total = CallGroup("")
        for group in modules_and_optimizer(self):
            if group.key != OPTIMIZER:
                total.merge(group)
        total.calls -= total.phases.pop("optimizer", 0)  # of an op that the program calls at the same place, too
        return total

    def _facts(self) -> Iterable[Fact]:
        total, of_model, nonfinite = self.total, self._total_of_model(), self.nonfinite
        if nonfinite.kind:
            yield "losses", f"{nonfinite.nans + nonfinite.infs:,} of {nonfinite.losses:,} {nonfinite.kind}"
        elif nonfinite.losses:
            yield "losses", f"{nonfinite.losses:,}", "all finite"
        if nonfinite.calls:
            first = self.first_nonfinite
            where = "" if first is None else f"first: {describe_call(first, self)}"
            yield "calls with inf or NaN", f"{nonfinite.calls:,} of the program", where
        phases = (f"{of_model.phases[phase]:,} {phase}" for phase in get_args(Phase) if of_model.phases[phase])
        others = total.calls - of_model.calls
        more = [f"and {others:,} more of optimizers"] if others and of_model.calls else []
        yield "calls", f"{of_model.calls or others:,}", ", ".join([*phases, *more]) or "of optimizers"
        results = sorted(result_dtypes(of_model.dtypes).items(), key=lambda item: -item[1])
        counted = sum(calls for _, calls in results)
        shares = [f"{percent(calls, counted)} {name}" for name, calls in results]
        if shares:
            yield "results", shares[0], ", ".join(shares[1:])
        yield "casts", f"{total.casts:,}", f"{size(total.bytes)}; {total.reused:,} more reused from a cache"
        if total.repeated:
            yield "repeated casts", f"{total.repeated:,}", size(total.repeated_bytes)
        yield from other_dtypes(self.calls)
        share = time_in_casts(self)
        if share is not None:
            yield "time in casts", percent(share), "of the calls' time on the host"
        threads = len({call.thread for call in self.calls})
        if threads > 1:
            yield "threads", f"{threads:,}"
        if total.errors:
            yield "errors", f"{total.errors:,}", "calls that raised"

    def _parts(self) -> Iterable[Part]:
        yield module_tree(modules_and_optimizer(self))
        yield from self._ops()
        yield self._casts()
        dtypes, module, calls = Column("dtypes", "dtypes"), Column("module", "name"), Column("calls", "count")
        names = "at", dtypes, module, calls, Column("bytes", "bytes"), "autocast"
        yield Table("Conversions that the program makes", names, conversions(self, self.calls), most=5)
        columns = Column("change", "code"), Column("casts", "count"), Column("bytes", "bytes"), "effect"
        yield Table("Fewer casts", columns, savings(self.calls), most=5)
        operands = (
            Column("op", "name"),
            "at",
            "operands",
            Column("calls", "count"),
            Column("bytes", "bytes"),
            "override",
        )
        note = "The smaller operand makes the results float32. Under the override, they have the autocast dtype."
        yield Table("Promoted to float32", operands, promotions(self.calls), note=note, most=5)
        ended = self.failure is not None and self.failure.in_call
        others = self.raised[: len(self.raised) - ended]
        cures = [
            (describe_raised(one), cure_of(one, None, self.calls).text or None) for one in reversed(others[-_SHOWN:])
        ]
        yield Table("Calls that raised", ("call", "what cures it"), cures)
        unused = [
            (one.op, one.policy, one.device, one.policy_source, self._calls_without(one.op))
            for one in self.unused_overrides()
        ]
        headings = Column("op", "name"), "policy", "device", "set by", "its calls"
        yield Table("No call used these overrides", headings, unused)
        yield casts_chart(self.by_module())
        yield dtypes_chart(self)
        measured = [(call, self.values.get(number, ())) for number, call in enumerate(self.calls)]
        exponents = exponents_chart(measured)
        if exponents is not None:
            yield exponents
        yield float8_table(measured)
        dropped = f"Calls after the first {len(self.calls):,}, which only sums and tables include: {self.dropped:,}."
        yield Listing("Not in this report", [*self.not_seen, *([dropped] if self.dropped else [])])

    def _calls_without(self, op: str) -> str:
        """Says in which state of autocast the calls of an op ran, whose override no call used."""
        calls = [
            call for call in self.calls if op in (call.op.removeprefix("aten::"), call.name.removeprefix("aten::"))
        ]
        off = sum(not call.autocast for call in calls)
        if not calls:
            return "none"
        return (
            f"{len(calls):,}, all with autocast off"
            if off == len(calls)
            else f"{len(calls):,}, {off:,} with autocast off"
        )

    def _ops(self) -> Iterator[Part]:
        """The table of the ops, without those that compute nothing and those of optimizers, which the page has, too."""
        groups, apart = by_weight(self)
        bad = nonfinite_by_op(self)

        def row(group: CallGroup) -> tuple[Any, ...]:
            return (
                group.key,
                group.calls,
                group.dtypes,
                bad[group.key] or None,
                group.casts or None,
                group.reused or None,
                group.bytes or None,
                group.policies,
                group.errors or None,
                group.duration / 1e6,
            )

        columns = (
            Column("op", "name"),
            Column("calls", "count"),
            Column("dtypes", "dtypes"),
            Column("inf or NaN", "count"),
            Column("casts", "count"),
            Column("reused", "count", "page"),
            Column("bytes", "bytes"),
            Column("policy", "policy"),
            Column("errors", "count", "page"),
            Column("ms", "ms", "page"),
        )
        note = (
            "Dtypes of inputs, of inputs after casts, and of outputs. A composite op and the ops that it calls are "
            "separate calls."
        )
        yield Table("Ops", columns, [row(group) for group in groups], note=note)
        sums = [
            f"{len(folded)} op{'s' * (len(folded) > 1)} {name}, {sum(one.calls for one in folded):,} calls"
            for name, folded in apart.items()
            if folded
        ]
        if sums:
            yield Listing("", [f"And {'; '.join(sums)}. --html F.html, or by_op(), lists all."], where="terminal")
        for name, folded in apart.items():
            yield Table(f"Ops {name}", columns, [row(group) for group in folded], where="page")

    def _casts(self) -> Table:
        rows = [
            (
                f"{one.from_dtype} -> {one.to_dtype}",
                f"{one.argument} ({one.kind})",
                one.op,
                module_name(one.module),
                one.line or None,
                one.made,
                one.reused or None,
                one.bytes,
                one.repeated or None,
                one.repeated_bytes or None,
            )
            for one in sorted(self.casts(), key=lambda one: -one.repeated_bytes)
        ]
        columns = (
            Column("cast", "dtypes"),
            "argument",
            Column("op", "name", "page"),
            Column("module", "name"),
            Column("at", "line"),
            "made",
            Column("reused", "count"),
            Column("bytes", "bytes"),
            "repeated",
            Column("bytes again", "bytes"),
        )
        note = "Repeated: of a tensor that was cast to that dtype before, without a change in between."
        return Table("Where casts are made", columns, rows, most=5, note=note)

    def formats(self) -> dict[str, tuple[str, Callable[[], str]]]:
        """Returns the formats of `save` that are texts: "run.html", "run.json"."""
        return {SUFFIX: ("a recording, which `load` reads", str), **super().formats()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the report: ".jsonl.gz" (a recording, which `torch_promote.load` reads), ".html" (a page), ".json".

        Args:
            path: The file.

        Raises:
            OptionError: The extension is unknown, the file cannot be written (an existing file is then unchanged), or
                the report lacks calls, beyond `max_calls`, which a recording has to have. It is a ValueError.
            MissingPackageError: A page needs jinja2 and matplotlib, and one is not installed. It is an ImportError.
        """
        name = check_path("path", path)
        if not name.endswith(SUFFIX):
            super().save(path)
            return
        part = f"{name.removesuffix(SUFFIX)}.{os.getpid()}.part{SUFFIX}"
        try:
            write_recording(part, self)
            os.replace(part, name)
        except OSError as error:
            raise OptionError(f"cannot save the trace as {name!r}: {error.strerror or error}.") from error
        finally:
            if os.path.exists(part):
                os.unlink(part)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-compatible values.

        Returns:
            A dict with "format", "version", "torch_version", "steps", "dropped", "device_names", "not_seen" (with
            "kind", "count", "text"), "asked" (the overrides that were asked for), "failure", "nonfinite", "sources",
            "states", "ends", "rng", "environment", "scaled_step", "undone", "totals" (of all calls), "tensors", "calls"
            (as in `Call.to_dict`, but inputs, ran_with and outputs are indices into "tensors"), "values", "reads" and
            "draws" (by the number of the call), "groups" (the calls by op, module and line) and "casts" (by argument,
            op, module and line).
        """
        tensors: dict[TensorInfo, int] = {}
        calls = [call.to_dict(lambda info: tensors.setdefault(info, len(tensors))) for call in list(self.calls)]
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            **{name: encode(getattr(self, name)) for name in _IN_JSON},
            "totals": encode(self.total),
            "tensors": encode(list(tensors)),
            "calls": calls,
            "groups": [
                {"op": place[0], "module": place[1], "line": place[2]}
                | {name: value for name, value in encode(group).items() if name != "key"}  # which the place tells
                for place, group in self.groups().items()
            ],
            "casts": encode(self.casts()),
        }

    def __repr__(self) -> str:
        return f"<TraceReport: {self.total.calls:,} calls, {self.total.casts:,} casts>"


#: The attributes of a report that its JSON has as they are.
_IN_JSON = (
    *("torch_version", "steps", "dropped", "device_names", "not_seen", "asked", "failure", "nonfinite", "sources"),
    *("states", "ends", "rng", "environment", "values", "reads", "draws", "scaled_step", "undone"),
)


@explains_arguments
def load(path: str | os.PathLike[str]) -> TraceReport:
    """Reads a recording, NAME.jsonl.gz, of `trace(record=...)`, `torch-promote trace --record` or `TraceReport.save`.

    Args:
        path: The file.

    Raises:
        OptionError: The file cannot be read, is no recording, or was written by an incompatible version. It is a
            ValueError.
    """
    return TraceReport.load(path)


Recorded: TypeAlias = TraceReport | str | os.PathLike[str]


@overload
def diff(a: Recorded, b: Recorded, *, match: Literal[False] = False) -> Difference: ...


@overload
def diff(a: Recorded, b: Recorded, *, match: Literal[True], tolerance: float | None = None) -> Match: ...


@explains_arguments
def diff(a: Recorded, b: Recorded, *, match: bool = False, tolerance: float | None = None) -> Difference | Match:
    """Compares two runs: what differs first, on which facts that rests, and where errors grow.

    With values in both (`trace(values=True)` or `trace(record=...)`), contents are compared; otherwise dtypes,
    policies, casts and arguments that are no tensors.

    Args:
        a: The first run: a report of `trace`, or the file of a recording.
        b: The second run, which perhaps ran elsewhere, or under other policies.
        match: Whether the runs are two implementations of one model, such as a reference and a port, whose results are
            paired by value instead of by name. Both need values. Returns a `Match`.
        tolerance: With `match`, the relative L2 error up to which results are a pair; None: it follows from the dtypes
            that both compute in.

    Raises:
        OptionError: One is no report, or cannot be read; for `match`, it lacks values or calls. It is a ValueError.

    Example:
        >>> import torch, torch_promote as tp
        >>> def run(alpha):
        ...     with tp.trace(values=True) as report:
        ...         torch.ones(2).add(torch.ones(2), alpha=alpha)
        ...     return report
        >>> print(tp.diff(run(1), run(2)).evidence[0])
        aten::add in (model): alpha 1 in A, 2 in B.
    """
    found = []
    for one in (a, b):
        if not isinstance(one, TraceReport | str | os.PathLike):
            raise OptionError(f"diff() expects reports of trace(), or the files of recordings, got {shown(one)}.")
        found.append(one if isinstance(one, TraceReport) else TraceReport.load(one))
    if match:
        return match_recordings(found[0], found[1], tolerance)
    if tolerance is not None:
        raise OptionError(
            "diff() takes a tolerance only with match=True. For two runs, ask the difference: is_within()."
        )
    return compare_recordings(*found)
