"""`trace`: records which op ran in which dtype, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec

import torch
from torch import nn

from torch_promote.errors import OptionError, check_flag
from torch_promote.observe.events import Call
from torch_promote.observe.observer import CallObserver, OpenCall, observe
from torch_promote.observe.ops import NamedTensors
from torch_promote.observe.places import RunningModules
from torch_promote.observe.surroundings import watch_steps
from torch_promote.observe.trace_report import TraceReport
from torch_promote.observe.value_flow import ValueFlow
from torch_promote.observe.values import Values, ValuesCollector

__all__ = ["trace"]

_P = ParamSpec("_P")


#: The number with which the collector delivers the value of a loss.
_LOSS = -1


class _ObserverWithArguments(CallObserver):
    """Tells the subscriber the arguments of a call, too."""

    _ending = threading.local()

    @property
    def args(self) -> list[Any]:
        """The arguments of the call that the subscriber gets, in the schema's order."""
        args: list[Any] = self._ending.args
        return args

    def _close(self, call: OpenCall, outputs: NamedTensors, error: bool) -> None:
        self._ending.args = call.args
        try:
            super()._close(call, outputs, error)
        finally:
            del self._ending.args


class _Block(contextlib._GeneratorContextManager[TraceReport, None, None]):
    """The block of a trace. Whoever takes it for the report is told how to get that."""

    def __repr__(self) -> str:
        return f"<a trace, which `{_WITH}` starts>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trace() returns a block, which has no {name!r}. Write `{_WITH}`, and use the report.")


_WITH = "with trace(...) as report:"


def _block(function: Callable[_P, Iterator[TraceReport]]) -> Callable[_P, _Block]:
    @functools.wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> _Block:
        return _Block(function, args, kwargs)  # type: ignore[arg-type]

    return make


@_block
def trace(
    model: nn.Module | None = None,
    *,
    values: bool = False,
    where: Literal["ops", "casts"] = "ops",
    max_calls: int = 50_000,
) -> Iterator[TraceReport]:
    """Records the calls of ops in a block, forward and backward.

    Args:
        model: The module that the paths of modules start from. None: the first module that is called outside of other
            modules.
        values: Whether to also record the ranges of outputs, in `Call.values` of the calls that are stored
            individually. They are computed on the device of the output, and transferred at the next optimizer step or
            at the end of the block, with one synchronization for all.
        where: "ops" records all calls, "casts" only those for which autocast has a policy.
        max_calls: The number of calls to store individually. The report's sums and tables include all calls.

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
    modules = RunningModules(model)
    del model  # it may be destroyed before the block ends
    report = TraceReport(max_calls)

    flow = ValueFlow(report)

    def deliver(number: int, found: tuple[Values, ...]) -> None:
        if number < 0:
            flow.deliver_loss(found[0])
        elif number < len(report.calls):  # false for calls of a parent process
            report.calls[number] = dataclasses.replace(report.calls[number], values=found)
            flow.deliver(number, found)

    collector = ValuesCollector(deliver)

    def add(call: Call, tensors: list[torch.Tensor]) -> None:
        number = report.add(call)
        if with_arguments is None:  # no values are wanted
            return
        if not with_arguments.open_calls:  # the program's own
            loss = flow.loss_of(call, with_arguments.args)
            if loss is not None:
                collector.add(_LOSS, [loss])
            flow.add(number, call, with_arguments.args, tensors)
        if number is not None:
            collector.add(number, tensors)

    def stepped() -> None:
        report.steps += 1
        flow.stepped(len(report.calls))
        collector.transfer()

    with_arguments = _ObserverWithArguments(modules, add, where == "casts") if values else None
    observer = with_arguments or CallObserver(modules, add, where == "casts")
    try:
        with watch_steps(stepped), observe(observer, report.not_seen):
            yield report
    finally:
        collector.transfer()
        for module, path in modules.named():  # those that did not run, too
            observer.sources.ask_module(module, path)
        report.asked = observer.sources.asked(report.groups())
        report.name_devices()
