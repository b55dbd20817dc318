"""`trace`: records which op ran in which dtype, and why; with values, also what was computed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from torch_promote.errors import OptionError, check_flag, did_you_mean, shown
from torch_promote.observe.call import Call
from torch_promote.observe.observer import CallObserver, OpenCall, observe
from torch_promote.observe.ops import can_be_read, unnoticed
from torch_promote.observe.places import RunningModules, check_model
from torch_promote.observe.surroundings import watch_steps
from torch_promote.reading.raised_errors import failure_of
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.file import CALLS_TO_WRITE, RecordingFile
from torch_promote.recording.program_state import Searched, TensorUses, loss_of
from torch_promote.recording.recorder import Recorder
from torch_promote.recording.recording import recording_lock
from torch_promote.recording.values import extremes
from torch_promote.report.block import block

#: The number of losses on a GPU that are read together, with one synchronization.
_LOSSES_TO_READ = 64


def _check(model: object, values: object, where: object, max_calls: object, record: Any) -> None:
    check_model(model, "trace")
    check_flag("values", values)
    if where not in (legal := ("ops", "casts")):
        raise OptionError(f'`where` is "ops" or "casts", got {shown(where)}.{did_you_mean(str(where), legal)}')
    if not isinstance(max_calls, int) or max_calls < 0:
        raise OptionError(f"`max_calls` (the number of calls to store) must be 0 or more, got {shown(max_calls)}.")
    if record is not None:
        RecordingFile(record)  # which writes nothing yet


@block(_check, "record")
def trace(
    model: nn.Module | None = None,
    *,
    values: bool = False,
    where: Literal["ops", "casts"] = "ops",
    max_calls: int = 50_000,
    record: str | os.PathLike[str] | None = None,
) -> Iterator[TraceReport]:
    """Records the calls of ops in a block, forward and backward.

    Args:
        model: The module that the paths of modules start from. None: the first module that is called outside of other
            modules.
        values: Whether to also record what was computed, in the report's `values`, `reads`, `sources`, `states` and
            `ends`: ranges, digests and sketches of outputs, of tensors from outside, of losses, gradients, parameters
            and the states of optimizers. Tensors of other devices are copied to the host, with one synchronization
            each.
        where: "ops" records all calls, "casts" only those for which autocast has a policy.
        max_calls: The number of calls to store individually. The report's sums and tables include all calls.
        record: A file to record to while the block runs, "NAME.jsonl.gz", for `torch-promote diff`; with it, `values`
            is True. It has all calls, about 70 bytes for each.

    Yields:
        The report, which fills while the block runs.

    Raises:
        OptionError: An argument is invalid. It is a ValueError.

    Example:
        >>> import torch, torch_promote as tp
        >>> model = torch.nn.Linear(3, 4)
        >>> with trace(model) as report, tp.my_autocast("cpu"):
        ...     _ = model(torch.ones(2, 3))
        >>> report.calls[-1].op, [str(cast) for cast in report.calls[-1].casts][:1]
        ('aten::linear', ['input: float32 -> bfloat16, 12 bytes'])
    """
    file = None if record is None else RecordingFile(record)
    tracer = Tracer(model, values or file is not None, where == "casts", max_calls, file)
    del model  # it may be destroyed before the block ends
    with tracer as report:
        yield report


class Tracer:
    """The block of `trace`. See there for the arguments."""

    def __init__(
        self,
        model: nn.Module | None,
        values: bool,
        only_casting: bool,
        max_calls: int,
        file: RecordingFile | None,
        steps: str = "",  # those that were asked for, "3:5"; "" for all
        searched: Searched | None = None,
        modules: RunningModules | None = None,  # of the model, if it may have run before
        skips_optimizers: bool = False,  # whether to leave out their calls, which are half of those of a step
    ) -> None:
        self.report: TraceReport = TraceReport(max_calls)
        self._file = file
        self._block = contextlib.ExitStack()
        modules = self._modules = RunningModules(model) if modules is None else modules
        self._recorder = Recorder(self.report, modules, file, steps, searched, skips_optimizers) if values else None
        self._losses: list[tuple[int, torch.Tensor]] = []  # those to read, with the number of steps before each
        self._uses = TensorUses(modules)
        begun = None if self._recorder is None else self._recorder.begun
        self._observer = CallObserver(modules, self._ended, begun, only_casting)
        if self._recorder is not None:
            self._observer.compiled = self._recorder.begin_compiled
        self._observer.skips_optimizers = skips_optimizers

    def _ended(self, of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        with recording_lock:  # autograd may have several threads
            self._uses.ended(of, call, results)
        if self._recorder is not None:
            self._recorder.ended(of, call, results)
            return
        if call is None:
            return
        with recording_lock:
            number = self.report.add(call)
            if self._file is not None:
                self._file.add(number, call)
                if number % CALLS_TO_WRITE == CALLS_TO_WRITE - 1:
                    self._file.flush(self.report)
            loss = loss_of(call, of.args) if call.op == "aten::ones_like" else None
            if loss is not None and can_be_read(loss):
                with unnoticed():
                    self._losses.append((self.report.steps, loss.detach()))
                if loss.device.type == "cpu" or len(self._losses) >= _LOSSES_TO_READ:
                    self._read_losses()

    def _read_losses(self) -> None:
        if not self._losses:
            return
        waiting, self._losses = self._losses, []
        for (step, _), ends in zip(waiting, extremes([loss for _, loss in waiting]), strict=True):
            self.report.nonfinite.add_loss(math.isnan(ends[0]), any(map(math.isinf, ends)), step)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.report.scaled_step:
            self.report.scaled_step = str(self._uses.scaled.stepped(optimizer) or "")
        if self._recorder is not None:
            self._recorder.before_step(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.report.steps += 1
        self._observer.stepped(optimizer)
        if self._recorder is not None:
            self._recorder.stepped(optimizer)
        elif self._file is not None:
            self._file.flush(self.report)

    def __enter__(self) -> TraceReport:
        try:
            self._block.enter_context(watch_steps(self._stepped, self._before_step))
            self._block.enter_context(observe(self._observer, self.report.not_seen))
        except BaseException:
            self._block.close()
            raise
        return self.report

    def __exit__(self, kind: object = None, error: BaseException | None = None, traceback: object = None) -> None:
        report = self.report
        if error is not None:
            with contextlib.suppress(Exception):  # such as of an error that has no text
                report.failure = failure_of(error, report.raised, self._uses)
        report.undone = self._uses.undone
        try:
            self._block.close()
        finally:
            self._read_losses()
            if self._recorder is not None:
                self._recorder.close()
            for module, path in self._modules.named():  # those that did not run, too
                self._observer.sources.ask_module(module, path)
            report.asked = self._observer.sources.asked(report.used_policies())
            report.name_devices()
            if self._file is not None:
                self._file.flush(report, last=True)

    def forget(self, path: str | None) -> None:
        """Begins again in a forked process, whose parent reports what there is. `path` is the file of this process."""
        vars(self.report).update(vars(TraceReport(self.report._max_calls)))
        if self._file is not None and path is not None:
            self._file.__init__(path)  # type: ignore[misc]  # what the parent has defined is not in this file
        if self._recorder is not None:
            self._recorder.forget()
