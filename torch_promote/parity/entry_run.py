"""Runs the samples of one entry under stock and under ours, and collects the differences.

Each sample runs three times: under stock autocast in a crosscheck, under ours, and under ours in a crosscheck. Both
runs of ours are compared with stock. The crosscheck compares every call with the reference.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_promote.checking.comparison import compare, copy_with_strides
from torch_promote.checking.crosscheck import crosscheck
from torch_promote.checking.known_gaps import SampleGap, known_gaps
from torch_promote.checking.report import CrosscheckReport
from torch_promote.observe.ops import facts_of
from torch_promote.observe.places import describe_arguments
from torch_promote.parity.model import (
    DENSE_ONLY,
    Entry,
    EntryResult,
    Options,
    SampleMismatch,
    asks_for_a_gpu,
    command_for,
    row_name,
)
from torch_promote.parity.samples import Bound, NotGenerated, Sample
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.installation import stock_autocast

__all__ = ["Bound", "EntryRun", "Outcome", "copied", "run"]

# --- one call in one region


@dataclass
class Outcome:
    """The outcome of one run."""

    result: Any = None
    gradients: Any = None  # of the inputs that require grad, in order; None without a backward
    error: Exception | None = None  # of the call
    backward_error: Exception | None = None
    inputs: Any = None  # the arguments after the run


def run(
    region: contextlib.AbstractContextManager[Any],
    bound: Bound,
    *,
    forward: contextlib.AbstractContextManager[Any] | None = None,  # around the forward, inside the region
    backward: contextlib.AbstractContextManager[Any] | None = None,  # around the backward
    finish: Callable[[Any], Any] | None = None,  # maps the results to what is differentiated
) -> Outcome:
    """Runs a call in a region from a fixed seed, then its backward outside of the region. The arguments are copied."""
    outcome = Outcome()
    func, args, kwargs = bound
    args, kwargs = outcome.inputs = copied((args, kwargs))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from deprecated ops
        try:
            with region, forward or contextlib.nullcontext():
                outcome.result = func(*args, **kwargs)
        except Exception as error:
            outcome.error = error
        else:
            with backward or contextlib.nullcontext():
                _run_backward(outcome, (args, kwargs), finish)
    return outcome


def _run_backward(outcome: Outcome, inputs: Any, finish: Callable[[Any], Any] | None) -> None:
    leaves = [leaf for leaf in _tensors(inputs) if leaf.requires_grad]
    if not leaves or not any(out.requires_grad for out in _tensors(outcome.result)):
        return
    try:
        finished = outcome.result if finish is None else finish(outcome.result)
        outputs = [out for out in _tensors(finished) if out.requires_grad]
        # An eigenvector is defined up to its phase only, so differentiate the absolute value of a complex output.
        outputs = [out.abs() if out.is_complex() else out for out in outputs]
        torch.autograd.backward(outputs, [_ramp(out) for out in outputs])
    except Exception as error:
        outcome.backward_error = error
    else:
        outcome.gradients = [leaf.grad for leaf in leaves]


def _ramp(output: torch.Tensor) -> torch.Tensor:
    """Returns a gradient whose elements differ: for equal ones, the gradient of softmax is zero."""
    ramp = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64, device=output.device)
    return ramp.reshape(output.shape).to(output.dtype)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def copied(tree: Any) -> Any:
    """Copies the tensors of a tree as leaves with the same strides. A tensor that occurs twice is copied once."""

    @functools.cache  # by the tensor's identity
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return copy_with_strides(tensor).requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, copy, tree)


# --- the samples of an entry

_OURS, _REFERENCE_STOCK, _REFERENCE_OURS = (
    "ours against stock", "reference against stock", "reference against ours",
)  # fmt: skip
#: Stock's error for calls to which ours gives a result on purpose: docs/differences.md, row 7.
_FIXED_ERROR = "Unexpected floating ScalarType in at::autocast::prioritize"
#: Stock's error for a banned op. Ours has a longer text.
_BANNED_ERROR = "are unsafe to autocast"


class EntryRun:
    """Runs the samples of one entry. `found` is the result so far, which `result` completes."""

    def __init__(self, entry: Entry, options: Options) -> None:
        self.entry: Entry = entry
        self.options: Options = options
        self.found: EntryResult = EntryResult(entry)
        place = entry.name, options.device
        self._gaps = [gap for gap in known_gaps().samples if gap.covers(*place)]
        self._nondeterministic = [listed for listed in known_gaps().nondeterministic if listed.covers(*place)]
        self._mismatches: dict[tuple[str, ...], SampleMismatch] = {}
        self._explained: set[SampleGap] = set()
        self._differed = False  # whether stock has given two results for one sample
        self._crosscheck = CrosscheckReport()

    def add(self, sample: Sample) -> None:
        """Runs a sample under stock and under ours."""
        self.found.samples += 1
        stock = self._checked(sample, _REFERENCE_STOCK)
        if self._nondeterministic:
            self.found.nondeterministic[self._nondeterministic[0].reason] += 1
            self._differed = self._differed or self._repeats(sample, stock) is not None
        if self.options.stock_only:
            # An error that the crosscheck raises is not PyTorch's: compare with a run without it.
            self._compare(sample, self._run(sample, ours=False), stock, _REFERENCE_STOCK)
            self.found.refused += stock.error is not None or stock.backward_error is not None
            return
        plain = self._run(sample, ours=True)
        ours = self._checked(sample, _REFERENCE_OURS)
        errors = (stock.error or stock.backward_error, plain.error or plain.backward_error)
        if all(errors) or (self.options.fake and any(map(asks_for_a_gpu, errors))):
            self.found.refused += 1
        elif _FIXED_ERROR in str(stock.error) and plain.error is None and ours.error is None:
            self.found.stock_raised += 1
            return
        for outcome in (plain, ours):
            self._compare(sample, outcome, stock, _OURS)

    def add_not_generated(self, sample: NotGenerated) -> None:
        """Records that PyTorch could not generate samples. A mismatch, unless the device lacks the tensors' layout."""
        self.found.not_generated[sample.dtype] = sample.why
        if DENSE_ONLY not in sample.why and self.options.has_policies:
            self._found(f"{sample.dtype}/0/plain", "samples", "PyTorch", sample.why)

    def result(self, seconds: float) -> EntryResult:
        """Returns the result of the entry."""
        found, calls = self.found, self._crosscheck
        found.mismatches, found.stale = tuple(self._mismatches.values()), tuple(self._stale())
        found.rows = tuple(sorted(map(row_name, calls.with_policy)))
        found.checked, found.no_rule, found.seconds = calls.checked, calls.no_rule, seconds
        return found

    def _run(self, sample: Sample, *, ours: bool, **checks: Any) -> Outcome:
        region = my_autocast if ours else stock_autocast
        made: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.options.has_policies:
            made = region(self.options.device_type, self.options.lower)
        return run(made, sample.bound, finish=sample.finish, **checks)

    def _checked(self, sample: Sample, what: str) -> Outcome:
        """Runs a sample in a crosscheck, which compares every call with the reference."""
        report = CrosscheckReport()
        checks = {"forward": _crosschecked(report), "backward": _crosschecked(report)}
        outcome = self._run(sample, ours=what == _REFERENCE_OURS, **checks)
        for found in report.mismatches:
            self._found(sample.label, found.kind, what, str(found).partition("\n    at ")[0])
        self.found.gaps.update(report.known_gaps)
        report.mismatches.clear()
        self._crosscheck.add(report)
        return outcome

    def _compare(self, sample: Sample, ours: Outcome, stock: Outcome, what: str) -> None:
        if self.options.fake and any(asks_for_a_gpu(outcome.error) for outcome in (ours, stock)):
            return
        for kind, text in self._differences(ours, stock):
            if kind == "bits":
                again = self._repeats(sample, stock)
                text += "" if again is None else f"\n    stock against itself: {again}; list it as nondeterministic"
            arguments = describe_arguments([*sample.bound[1], *sample.bound[2].values()])
            self._found(sample.label, kind, what, f"{self.entry.name}({arguments}): {kind}\n    {text}")

    def _differences(self, ours: Outcome, stock: Outcome) -> Iterator[tuple[str, str]]:
        for name, where in (("error", ""), ("backward_error", " in the backward")):
            a, b = getattr(ours, name), getattr(stock, name)
            if type(a) is not type(b) or (str(a) != str(b) and _BANNED_ERROR not in str(b)):
                yield "error", f"expected {_error_text(b)}{where}, as stock has\n    got      {_error_text(a)}"
                return
        unwritten = {f"result[{position}]" for position in facts_of(self.entry.name).unwritten}
        for name in ("result", "gradients", "inputs"):
            for difference in compare(getattr(ours, name), getattr(stock, name), name):
                if difference.kind == "bits" and (self._nondeterministic or difference.where in unwritten):
                    continue
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

    def _found(self, label: str, kind: str, what: str, text: str) -> None:
        gap = next((gap for gap in self._gaps if gap.explains(kind, what, label, text)), None)
        if gap is not None:
            self.found.gaps[gap.reason] += 1
            self._explained.add(gap)
            return
        command = command_for(self.entry, self.options, label)
        mismatch = SampleMismatch(self.entry.name, label, kind, what, text, command)
        self._mismatches.setdefault((label, kind, what, text), mismatch)

    def _stale(self) -> Iterator[str]:
        if not self.options.full:
            return
        place = f"{self.entry.name} on {self.options.device}"
        for gap in self._gaps:
            if gap not in self._explained and not (self.options.stock_only and gap.what != _REFERENCE_STOCK):
                yield f"{place}: the known gap ({gap.kind}, {gap.what}: {gap.reason}) explains nothing"
        if not self.options.fake and self.found.samples and not self._differed:
            for listed in self._nondeterministic:
                if listed.always:
                    yield f"{place}: listed as nondeterministic ({listed.reason}), but its results repeat"


@contextlib.contextmanager
def _crosschecked(report: CrosscheckReport) -> Iterator[None]:
    with crosscheck() as part:
        try:
            yield
        finally:
            report.add(part)


def _error_text(error: Exception | None) -> str:
    return "a result" if error is None else f"{type(error).__qualname__}: {str(error).partition(chr(10))[0]}"


def _fill_free_memory(byte: int, device_type: str) -> None:
    """Fills memory with a byte and frees it, so that uninitialized results do not repeat by chance."""
    sizes = [64 << shift for shift in range(15)]
    filled = [torch.full((size,), byte, dtype=torch.uint8, device=device_type) for size in sizes for _ in range(4)]
    del filled
