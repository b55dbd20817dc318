"""The entries of a parity run, the run of one entry under stock and under ours, and of many in worker processes.

Each sample runs three times: under stock autocast in a crosscheck, under ours, and under ours in a crosscheck. Both
runs of ours are compared with stock. The crosscheck compares every call with the reference.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fnmatch
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_promote.checking.comparison import compare, copy_with_strides
from torch_promote.checking.crosscheck import crosscheck
from torch_promote.checking.known_gaps import DEVICES, SampleGap, known_gaps
from torch_promote.checking.report import CrosscheckReport
from torch_promote.errors import OptionError, TorchPromoteError, did_you_mean
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
    on_device,
    row_name,
)
from torch_promote.parity.samples import PAIRS, Bound, NotGenerated, Sample, op_database, sample_dtypes, samples
from torch_promote.policy.op_names import closest_ops
from torch_promote.policy.op_table import DEVICE_TYPES, op_table, schema_of
from torch_promote.reference.dtypes import LOWER_DTYPES
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.installation import stock_autocast

#: `RunEntry` runs one entry. `Prepare` runs before the first entry, so that its time is not counted. A worker imports
#: both by name.
RunEntry = Callable[[Entry, Options], EntryResult]
Prepare = Callable[[Options], object]

#: The number of last lines that a crash shows of a dead process's output, or of a traceback.
_LAST_LINES = 16


class WorkerError(TorchPromoteError):
    """A worker process died before its first entry."""


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


# --- entries


def entries(options: Options) -> list[Entry]:
    """Returns the entries that the options select, in order, or raises OptionError if one of these matches nothing."""
    _check_device(options.device, stock_only=options.stock_only)
    known_gaps()  # an invalid file is one error, and not one of each entry
    everything = _all_entries(options.device)
    names = [entry.name for entry in everything]
    for glob in options.ops:
        if not fnmatch.filter(names, glob):
            stems = {one: one.rpartition("::")[2].removeprefix("nn.functional.") for one in (glob, *names)}
            close = closest_ops(stems.pop(glob), stems.values(), "")
            hint = f" Closest: {', '.join(one for one in names if stems[one] in close)}." if close else ""
            raise OptionError(f"no op is called {glob!r}.{hint}")
    chosen = [e for e in everything if not options.ops or any(fnmatch.fnmatchcase(e.name, g) for g in options.ops)]
    _check_dtypes(chosen, options)
    if options.sample is not None and len(chosen) != 1:
        raise OptionError(f"--sample {options.sample!r} needs one entry, but {len(chosen)} are selected. Name one op.")
    if options.dtypes:
        chosen = [entry for entry in chosen if not set(options.dtypes).isdisjoint(sample_dtypes(entry, options))]
        for glob in options.ops:
            if not fnmatch.filter([entry.name for entry in chosen], glob):
                raise OptionError(f"no sample of {glob!r} has one of the dtypes {', '.join(options.dtypes)}.")
    return chosen


def _check_device(device: str, *, stock_only: bool) -> None:
    if device in DEVICE_TYPES and not torch.get_device_module(device).is_available():
        raise OptionError(f"device {device!r} needs a GPU, but PyTorch finds none. Without a GPU, use fake-{device}.")
    if device in DEVICES:
        return
    if not stock_only:
        raise OptionError(
            f"{device!r} is not a device. Legal: {', '.join(DEVICES)}, and with --stock-only every device type of "
            f"this PyTorch.{did_you_mean(device, DEVICES) if len(device) > 3 else ''}"
        )
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        raise OptionError(f"this PyTorch cannot make a tensor on device {device!r}: {first_line}") from error


def _check_dtypes(chosen: list[Entry], options: Options) -> None:
    if not options.lower.is_floating_point:
        raise OptionError(
            f"the autocast dtype {options.autocast_dtype!r} is not a floating dtype. Use bfloat16 or float16."
        )
    if options.device_type != "cuda" and options.lower not in LOWER_DTYPES:
        raise OptionError(
            f"autocast on {options.device_type} does not support {options.autocast_dtype!r}: regions would be "
            f"disabled. Legal: bfloat16, float16."
        )
    known = {dtype for entry in chosen for dtype in sample_dtypes(entry, options)} if options.dtypes else set()
    for name in options.dtypes:
        if name not in known:
            raise OptionError(
                f"no sample of the selected entries has dtype {name!r}. Legal: {', '.join(sorted(known))}."
            )


@functools.cache
def _all_entries(device: str) -> tuple[Entry, ...]:
    pairs = tuple(Entry(name, "promotion") for name in PAIRS)
    from_database = tuple(Entry(name, "op_db") for name in op_database())
    options = Options(device)
    if not options.has_policies:
        return (*pairs, *from_database)
    rows = [Entry(row.name, "row") for row in op_table() if schema_of(row) is not None]
    return (*rows, *pairs, *from_database)


def run_entry(entry: Entry, options: Options) -> EntryResult:
    """Runs the samples of one of `entries(options)`, and returns its result. OptionError: it has no such sample."""
    started = time.perf_counter()
    run = EntryRun(entry, options)
    with on_device(options):
        for sample in samples(entry, options):
            if isinstance(sample, NotGenerated):
                run.add_not_generated(sample)
            else:
                run.add(sample)
        if options.sample is not None and not run.found.samples and not run.found.not_generated:
            every = samples(entry, Options(options.device, autocast_dtype=options.autocast_dtype))
            known = [sample.label for sample in every if not isinstance(sample, NotGenerated)]
            raise OptionError(f"{entry.name} has no sample {options.sample!r}.{did_you_mean(options.sample, known)}")
    return run.result(time.perf_counter() - started)


# --- many entries, in worker processes


def run_entries(
    entries: Sequence[Entry], options: Options, jobs: int, run_entry: RunEntry, prepare: Prepare
) -> Generator[tuple[int, EntryResult], None, None]:
    """Runs entries, and yields the position and the result of each when it is done. Closing it stops the workers."""
    # If a worker dies, another one replaces it, and the entry gets a mismatch of kind "crash". 0 jobs: in this process,
    # for a debugger. `run_entry` and `prepare` (for the start of a worker) are defined at the top level of a module.
    if jobs == 0:
        for position, entry in enumerate(entries):
            with contextlib.redirect_stdout(sys.stderr):
                result = _run(run_entry, entry, options)
            yield position, result
        return
    todo = deque(enumerate(entries))
    with tempfile.TemporaryDirectory(prefix="torch_promote_parity_") as folder:
        workers: list[_Worker] = []
        try:
            workers += [_Worker(folder, prepare, options) for _ in range(min(jobs, len(entries)))]
            while workers:
                wait([worker.future for worker in workers], return_when=FIRST_COMPLETED)
                worker = next(worker for worker in workers if worker.future.done())
                error = worker.future.exception()
                died = isinstance(error, BrokenProcessPool)
                if error is not None and not died:
                    raise error
                if worker.position is not None:
                    yield worker.position, worker.crash(entries[worker.position]) if died else worker.future.result()
                elif died:
                    raise WorkerError(f"a worker process died while starting: {worker.last_words()}")
                if died or not todo:
                    worker.stop()
                    workers.remove(worker)
                if todo and died:
                    workers.append(_Worker(folder, prepare, options))
                elif todo:
                    worker.take(*todo.popleft(), run_entry)
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """A process that runs one entry at a time. A pool of its own: if the process dies, only its entry is lost."""

    def __init__(self, folder: str, prepare: Prepare, options: Options) -> None:
        self.position: int | None = None  # of its current entry; None while it starts
        self._options = options
        self._log = Path(tempfile.mkdtemp(dir=folder), "log")
        self._given_at = time.perf_counter()
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        # Ctrl-C signals the whole group, but the parent stops the workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.future: Future[Any] = self._pool.submit(_start, prepare, options, str(self._log))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        (self._process,) = self._pool._processes.values()

    def take(self, position: int, entry: Entry, run_entry: RunEntry) -> None:
        """Gives the worker an entry."""
        self.position, self._given_at = position, time.perf_counter()
        try:
            self.future = self._pool.submit(_run, run_entry, entry, self._options, str(self._log))
        except BrokenProcessPool as error:  # it died after its last entry
            self.future = Future()
            self.future.set_exception(error)

    def crash(self, entry: Entry) -> EntryResult:
        """Returns the result of an entry during which the process died."""
        died = f"the process that ran it died: {self.last_words()}"
        return _crash(entry, self._options, died, time.perf_counter() - self._given_at)

    def last_words(self) -> str:
        """Returns the signal or exit status of the dead process, and its last lines of output."""
        self._pool.shutdown()
        code = self._process.exitcode
        how = f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name
        written = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return "\n".join([how, *written.splitlines()[-_LAST_LINES:]])

    def stop(self) -> None:
        """Ends the process, even in the middle of an entry."""
        if self._process.is_alive():
            self._process.kill()
        self._pool.shutdown()


def _start(prepare: Prepare, options: Options, log: str) -> None:
    """Prepares a worker process."""
    # Ops print, and the parent may write JSON to stdout.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    faulthandler.enable()
    torch.set_num_threads(1)
    prepare(options)


def _run(run_entry: RunEntry, entry: Entry, options: Options, log: str | None = None) -> EntryResult:
    """Runs an entry. An error becomes a mismatch of kind "crash", except for an OptionError."""
    if log is not None:
        os.truncate(log, 0)
    started = time.perf_counter()
    try:
        return run_entry(entry, options)
    except OptionError:
        raise
    except Exception:
        lines = traceback.format_exc().splitlines()
        text = "\n".join(["its run raised an error:", *lines[-_LAST_LINES:]])
        return _crash(entry, options, text, time.perf_counter() - started)


def _crash(entry: Entry, options: Options, text: str, seconds: float) -> EntryResult:
    mismatch = SampleMismatch(entry.name, "", "crash", "the entry's process", text, command_for(entry, options))
    return EntryResult(entry, mismatches=(mismatch,), seconds=seconds)
