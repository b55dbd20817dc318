"""Runs the samples of one entry under stock and under ours, and collects the differences."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_promote.checking.comparison import compare
from torch_promote.checking.crosscheck import crosscheck
from torch_promote.checking.known_gaps import SampleGap, nondeterministic, sample_gaps
from torch_promote.checking.report import CrosscheckReport
from torch_promote.checking.uninitialized_results import UNINITIALIZED_IN_TABLE
from torch_promote.observe.places import describe_arguments
from torch_promote.parity.devices import asks_for_a_gpu
from torch_promote.parity.model import Entry, EntryResult, Options, SampleMismatch, command_for
from torch_promote.parity.op_database import DENSE_ONLY, NO_FAKE
from torch_promote.parity.outcome import Outcome, error_type, run, without_bits
from torch_promote.parity.samples import NotGenerated, Sample
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.installation import stock_autocast

__all__ = ["EntryRun"]

_OURS, _REFERENCE_STOCK, _REFERENCE_OURS = (
    "ours against stock", "reference against stock", "reference against ours",
)  # fmt: skip
#: Stock's error for calls to which ours gives a result on purpose: docs/differences.md, row 7.
_FIXED_ERRORS = ("Unexpected floating ScalarType in at::autocast::prioritize",)
#: Stock's error for a banned op. Ours has a longer text.
_BANNED_ERROR = "are unsafe to autocast"


@dataclass
class EntryRun:
    """Accumulates the results of one entry's samples."""

    entry: Entry
    options: Options
    samples: int = 0
    refused: int = 0
    stock_raised: int = 0
    not_generated: dict[str, str] = field(default_factory=dict)
    mismatches: dict[tuple[str, ...], SampleMismatch] = field(default_factory=dict)
    gaps: Counter[str] = field(default_factory=Counter)
    explained: set[SampleGap] = field(default_factory=set)
    without_bits: Counter[str] = field(default_factory=Counter)
    differed: bool = False
    total: CrosscheckReport = field(default_factory=CrosscheckReport)

    def __post_init__(self) -> None:
        name, device = self.entry.name, self.options.device
        self._gaps = [gap for gap in sample_gaps() if gap.covers(name, device)]
        self._nondeterministic = [listed for listed in nondeterministic() if listed.covers(name, device)]

    def add(self, sample: Sample) -> None:
        """Runs a sample under stock and under ours."""
        self.samples += 1
        stock = self._checked(sample, _REFERENCE_STOCK)
        if self._nondeterministic:
            self.without_bits[self._nondeterministic[0].reason] += 1
            self.differed = self.differed or self._repeats(sample, stock) is not None
        if self.options.stock_only:
            # An error that the crosscheck raises is not PyTorch's: compare with a run without it.
            self._compare(sample, self._run(sample, ours=False), stock, _REFERENCE_STOCK)
            self.refused += stock.error is not None or stock.backward_error is not None
            return
        plain = self._run(sample, ours=True)
        ours = self._checked(sample, _REFERENCE_OURS)
        if self._is_refused(stock, plain):
            self.refused += 1
        elif _is_fixed(stock, plain) and _is_fixed(stock, ours):
            self.stock_raised += 1
            return
        for outcome in (plain, ours):
            self._compare(sample, outcome, stock, _OURS)

    def add_not_generated(self, sample: NotGenerated) -> None:
        """Records that PyTorch could not generate samples. A mismatch, unless that is expected on the device."""
        self.not_generated[sample.dtype] = sample.why
        missing = NO_FAKE if self.options.fake else DENSE_ONLY
        expected = missing in sample.why or not self.options.has_policies
        if not expected:
            label = f"{sample.dtype}/0/plain"
            command = command_for(self.entry, self.options, label)
            found = SampleMismatch(self.entry.name, label, "samples", "PyTorch", sample.why, command)
            self.mismatches[(label, "samples")] = found

    def _is_refused(self, stock: Outcome, ours: Outcome) -> bool:
        errors = (stock.error or stock.backward_error, ours.error or ours.backward_error)
        return all(errors) or (self.options.fake and any(map(asks_for_a_gpu, errors)))

    def _run(self, sample: Sample, *, ours: bool, **checks: Any) -> Outcome:
        region = my_autocast if ours else stock_autocast
        made: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.options.has_policies:
            made = region(self.options.device_type, self.options.lower)
        outcome = run(made, sample.bound, finish=sample.finish, **checks)
        if self.entry.source == "row" and self.entry.name in UNINITIALIZED_IN_TABLE:
            return without_bits(outcome, UNINITIALIZED_IN_TABLE[self.entry.name])
        return outcome

    def _checked(self, sample: Sample, what: str) -> Outcome:
        """Runs a sample in a crosscheck, which compares every call with the reference."""
        report = CrosscheckReport()
        checks = {"forward": _crosschecked(report), "backward": _crosschecked(report)}
        outcome = self._run(sample, ours=what == _REFERENCE_OURS, **checks)
        for found in report.mismatches:
            self._found(sample, found.kind, what, str(found).partition("\n    at ")[0])
        self.gaps.update(report.known_gaps)
        report.mismatches.clear()
        self.total.add(report)
        return outcome

    def _compare(self, sample: Sample, ours: Outcome, stock: Outcome, what: str) -> None:
        if self.options.fake and any(asks_for_a_gpu(outcome.error) for outcome in (ours, stock)):
            return
        for kind, text in self._differences(ours, stock):
            if kind == "bits" and not self._nondeterministic:
                again = self._repeats(sample, stock)
                text += "" if again is None else f"\n    stock against itself: {again}; list it as nondeterministic"
            arguments = describe_arguments([*sample.bound[1], *sample.bound[2].values()])
            self._found(sample, kind, what, f"{self.entry.name}({arguments}): {kind}\n    {text}")

    def _differences(self, ours: Outcome, stock: Outcome) -> Iterator[tuple[str, str]]:
        for name, where in (("error", ""), ("backward_error", " in the backward")):
            a, b = getattr(ours, name), getattr(stock, name)
            if error_type(a) != error_type(b) or (str(a) != str(b) and _BANNED_ERROR not in str(b)):
                yield "error", f"expected {_in_words(b)}{where}, as stock has\n    got      {_in_words(a)}"
                return
        if self._nondeterministic:
            ours, stock = without_bits(ours), without_bits(stock)
        for name in ("result", "gradients", "inputs"):
            a, b = getattr(ours, name), getattr(stock, name)
            for difference in compare(a, b, name):
                expected = f"{difference.where}: {difference.kind} {difference.stock}, as stock has"
                yield difference.kind, f"expected {expected}\n    got      {difference.ours}"

    def _repeats(self, sample: Sample, stock: Outcome) -> str | None:
        """Returns a difference between two runs of stock; None if stock repeats its results."""
        for byte in (0x5A, 0xA5):
            _fill_free_memory(byte, self.options.device_type)
            again = self._run(sample, ours=False)
            for a, b in ((again.result, stock.result), (again.gradients, stock.gradients)):
                for difference in compare(a, b):
                    return str(difference)
        return None

    def _found(self, sample: Sample, kind: str, what: str, text: str) -> None:
        gap = next((gap for gap in self._gaps if gap.explains(kind, what, sample.label, text)), None)
        if gap is not None:
            self.gaps[gap.reason] += 1
            self.explained.add(gap)
            return
        mismatch = SampleMismatch(
            self.entry.name, sample.label, kind, what, text, command_for(self.entry, self.options, sample.label)
        )
        self.mismatches.setdefault((sample.label, kind, what, text), mismatch)

    def _stale(self) -> Iterator[str]:
        if not self.options.full:
            return
        place = f"{self.entry.name} on {self.options.device}"
        for gap in self._gaps:
            if gap not in self.explained and not (self.options.stock_only and gap.what != _REFERENCE_STOCK):
                yield f"{place}: the known gap ({gap.kind}, {gap.what}: {gap.reason}) explains nothing"
        if not self.options.fake and self.samples and not self.differed:
            for listed in self._nondeterministic:
                if listed.always:
                    yield f"{place}: listed as nondeterministic ({listed.reason}), but its results repeat"

    def result(self, seconds: float) -> EntryResult:
        """Returns the result of the entry."""
        return EntryResult(
            self.entry,
            self.samples,
            self.refused,
            self.not_generated,
            tuple(self.mismatches.values()),
            dict(self.gaps),
            dict(self.without_bits),
            tuple(self._stale()),
            frozenset(map(_row_name, self.total.with_policy)),
            dict(self.total.checked),
            dict(self.total.no_rule),
            self.stock_raised,
            seconds,
        )


@contextlib.contextmanager
def _crosschecked(report: CrosscheckReport) -> Iterator[None]:
    with crosscheck() as part:
        try:
            yield
        finally:
            report.add(part)


def _is_fixed(stock: Outcome, ours: Outcome) -> bool:
    return ours.error is None and any(text in str(stock.error) for text in _FIXED_ERRORS)


def _in_words(error: Exception | None) -> str:
    first_line = str(error).partition("\n")[0]
    return error_type(error) if error is None else f"{error_type(error)}: {first_line}"


def _row_name(op: str) -> str:
    """`aten::softmax.int` for `aten.softmax.int`, `aten::mm` for `aten.mm.default`."""
    return op.replace(".", "::", 1).removesuffix(".default")


def _fill_free_memory(byte: int, device_type: str) -> None:
    """Fills memory with a byte and frees it, so that uninitialized results do not repeat by chance."""
    sizes = [64 << shift for shift in range(15)]
    filled = [torch.full((size,), byte, dtype=torch.uint8, device=device_type) for size in sizes for _ in range(4)]
    del filled
