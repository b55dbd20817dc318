"""Follows inf and NaN through a trace with values: the losses, and the call that made the first one.

NOTE [ Which call made it ]
Only the calls that the program made are followed, not the calls inside of them. A call reads the results of the earlier
calls that wrote to the memory of its arguments. It makes a NaN if none of these results has one, and an infinite value
if all of them are finite, unless the program passed an infinite number, as `masked_fill(mask, -inf)` does. A NaN that a
call makes of infinite values comes from the call that made those. Views and uninitialized memory make nothing.

A loss is a tensor on which `backward()` is called without a gradient: autograd then makes a gradient of ones like it.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_promote.observe.events import Call, Recording
from torch_promote.observe.findings import is_uninitialized, is_view
from torch_promote.observe.ops import can_be_read, tensors_in
from torch_promote.observe.places import is_ours
from torch_promote.observe.values import Values

__all__ = ["ValueFlow"]

#: The maximum number of calls that count as writers of one tensor, each of a part of it.
_MOST_WRITERS = 16
_GRADIENT_OF_LOSS = torch.autograd._make_grads.__code__


class ValueFlow:
    """Follows inf and NaN from results to arguments. It holds no tensors.

    Args:
        report: The report, whose `nonfinite` it keeps up to date.
    """

    def __init__(self, report: Recording) -> None:
        self._report = report
        self._writers: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {}  # by storage, whose address it reserves
        self._waiting: dict[int, tuple[set[int], bool]] = {}  # by call: what it reads, and whether it asked for inf
        self._losses: deque[tuple[tuple[int, ...], int]] = deque()  # those not delivered: the writers, and the step
        self._steps: list[int] = []  # the number of calls at the end of each step
        #: For calls with inf or NaN: whether there is a NaN, and the call that made it; None for a mask.
        self._faults: dict[int, tuple[bool, int | None]] = {}

    def add(self, number: int | None, call: Call, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """Adds a call that the program made, with its arguments and the tensors that it produced.

        Args:
            number: The call's index in `TraceReport.calls`; None if it is not stored.
            call: Its record.
            args: Its arguments.
            tensors: The tensors of its `outputs`.
        """
        if is_view(call.name):
            return
        if number is not None and not is_uninitialized(call.op):
            read = tensors_in(args)
            writers = (self._writers_of(tensor) for tensor in read)
            asked = not read or any(isinstance(arg, float) and math.isinf(arg) for arg in args)
            self._waiting[number] = {writer for one in writers for writer in one}, asked
        for tensor in tensors:
            if _is_followed(tensor):
                storage = tensor.untyped_storage()
                is_part = tensor.numel() * tensor.element_size() < storage.nbytes()
                before = self._writers_of(tensor)[-_MOST_WRITERS:] if is_part else ()
                reference = StorageWeakRef(storage)
                self._writers[reference.cdata] = reference, before if number is None else (*before, number)

    def loss_of(self, call: Call, args: Sequence[Any]) -> torch.Tensor | None:
        """Returns the loss if a call makes the gradient of one, and counts it."""
        if call.op != "aten::ones_like":
            return None
        frame: Any = sys._getframe(1)
        while frame is not None and is_ours(frame):
            frame = frame.f_back
        if frame is None or frame.f_code is not _GRADIENT_OF_LOSS or not isinstance(args[0], torch.Tensor):
            return None
        self._losses.append((self._writers_of(args[0]), len(self._steps)))
        return args[0]

    def _writers_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        known = self._writers.get(tensor.untyped_storage()._cdata) if _is_followed(tensor) else None
        return () if known is None else known[1]

    def stepped(self, calls: int) -> None:
        """Called after an optimizer step, with the number of calls so far."""
        self._steps.append(calls)
        self._writers = {key: one for key, one in self._writers.items() if not one[0].expired()}

    def deliver(self, number: int, values: Sequence[Values]) -> None:
        """Called with the values of a call's results, in the order of the calls."""
        waiting = self._waiting.pop(number, None)
        has_nan = any(one.nans for one in values)
        if waiting is None or not (has_nan or any(one.infs for one in values)):
            return
        reads, asked = waiting
        causes = [self._faults[read] for read in reads if read in self._faults]
        causes = [cause for cause in causes if cause[0]] if has_nan and any(nan for nan, _ in causes) else causes
        made = min((maker for _, maker in causes if maker is not None), default=None)
        if made is None and (has_nan or not (causes or asked)):
            made = number
        self._faults[number] = has_nan, made
        if made is not None:
            self._report.nonfinite.calls += 1
            self._report.nonfinite.nan_calls += has_nan
            if self._report.nonfinite.first_call is None:
                self._name(made)

    def deliver_loss(self, values: Values) -> None:
        """Called with the value of the next loss, after the values of the calls before it."""
        found, (writers, step) = self._report.nonfinite, self._losses.popleft()
        number = found.losses
        found.losses += 1
        if not (values.nans or values.infs):
            return
        found.nans += bool(values.nans)
        found.infs += bool(values.infs)
        if found.first_loss is None:
            found.first_loss, found.loss_step = number, step
            faults = {one: self._faults[one][1] for one in writers if one in self._faults}
            for writer, made in list(faults.items())[:1]:
                self._name(writer if made is None else made)

    def _name(self, number: int) -> None:
        self._report.nonfinite.first_call = number
        self._report.nonfinite.call_step = bisect.bisect_right(self._steps, number)


def _is_followed(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and can_be_read(tensor)
