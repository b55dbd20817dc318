"""`trace`: records which op ran in which dtype, and why; with values, also what was computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from torch_promote.errors import OptionError, check_flag
from torch_promote.observe.events import Call
from torch_promote.observe.observer import CallObserver, OpenCall, observe
from torch_promote.observe.places import RunningModules
from torch_promote.observe.recorder import Recorder
from torch_promote.observe.recording_file import RecordingFile
from torch_promote.observe.surroundings import watch_steps
from torch_promote.observe.trace_report import TraceReport
from torch_promote.report.block import block

__all__ = ["trace"]


@block
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
        values: Whether to also record what was computed, in `Call.values` of the calls that are stored individually:
            ranges, digests and sketches of outputs, of tensors from outside, of losses, gradients and parameters. They
            are computed on the device of the tensor, and transferred at the next optimizer step or at the end of the
            block, with one synchronization for all.
        where: "ops" records all calls, "casts" only those for which autocast has a policy.
        max_calls: The number of calls to store individually. The report's sums and tables include all calls.
        record: A file to record to while the block runs, "NAME.jsonl.gz", for `torch-promote diff`; with it, `values`
            is True. It has all calls, and less than 1 MB for a step of most models.

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
    if where not in ("ops", "casts"):
        raise OptionError(f'`where` is "ops" or "casts", got {where!r}.')
    if not isinstance(max_calls, int) or max_calls < 0:
        raise OptionError(f"`max_calls` (the number of calls to store) must be 0 or more, got {max_calls!r}.")
    check_flag("values", values)
    file = None if record is None else RecordingFile(record)
    modules = RunningModules(model)
    del model  # it may be destroyed before the block ends
    report = TraceReport(max_calls)
    recorder = Recorder(report, modules, file) if values or file is not None else None

    def add(of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        if call is not None:
            report.add(call)

    only_casting = where == "casts"
    if recorder is None:
        observer = CallObserver(modules, add, only_casting=only_casting)
    else:
        observer = CallObserver(modules, recorder.ended, recorder.begun, only_casting)
        observer.compiled = recorder.begin_compiled

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        report.steps += 1
        observer.stepped(optimizer)
        if recorder is not None:
            recorder.stepped(optimizer)

    try:
        with watch_steps(stepped), observe(observer, report.not_seen):
            yield report
    finally:
        if recorder is not None:
            recorder.close()
        for module, path in modules.named():  # those that did not run, too
            observer.sources.ask_module(module, path)
        report.asked = observer.sources.asked(report.groups())
        report.name_devices()
        if file is not None:
            file.close(report)
