"""The ops that a call of `why` dispatches, kept with those inside of each and with what the reference expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_promote.checking.expectation import Expectation, expect
from torch_promote.observe.autocast_state import state_in_force
from torch_promote.observe.ops import is_composite, tensors_in
from torch_promote.reference import Inference
from torch_promote.reference.autocast import AutocastState

__all__ = ["CallObserver", "SeenCall", "is_cast", "is_composite_call", "is_view", "worth_a_step"]

#: Ops by which autocast and composite ops change a dtype. The casts are steps of their own.
_CASTS = ("aten::to", "aten::_to_copy", "aten::_autocast_to_reduced_precision", "aten::_autocast_to_full_precision")
#: Ops that return the data of their first argument.
_LIKE_VIEWS = ("aten::_unsafe_view", "aten::reshape", "aten::contiguous", "aten::_reshape_alias", "aten::clone")


@dataclass(slots=True, eq=False)
class SeenCall:
    """A call of an op that was dispatched.

    Attributes:
        op: The overload.
        args: Its arguments, in the schema's order.
        expectation: What the reference expects; None if it failed.
        state: The autocast state; None if autocast is off.
        see_through: Whether the ops that it calls are observed.
        inner: The ops that it called.
        results: Its results; None if it raised.
    """

    op: torch._ops.OpOverload
    args: list[Any]
    expectation: Expectation | None
    state: AutocastState | None
    stock_too: bool = False
    see_through: bool = True
    inner: list[SeenCall] = field(default_factory=list)
    results: list[Any] | None = None


class CallObserver:
    """An observer that keeps the calls, with those inside of each."""

    def __init__(self) -> None:
        self.calls: list[SeenCall] = []
        self._open: list[SeenCall] = []

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> SeenCall:
        """Keeps a call."""
        state = state_in_force()
        call = SeenCall(op, args, expect(op, args, state), state)
        (self._open[-1].inner if self._open else self.calls).append(call)
        self._open.append(call)
        return call

    def end(self, token: SeenCall, results: list[Any]) -> None:
        """Keeps the results of a call."""
        token.results = results
        self._close(token)

    def failed(self, token: SeenCall) -> None:
        """Closes a call that raised."""
        self._close(token)

    def error(self) -> str | None:
        """Why the reference expects one of the calls to raise, or None."""
        found = [call.expectation.error for call in self._every(self.calls) if call.expectation is not None]
        return next((error for error in found if error is not None), None)

    def _every(self, calls: Sequence[SeenCall]) -> Iterator[SeenCall]:
        for call in calls:
            yield call
            yield from self._every(call.inner)

    def _close(self, token: SeenCall) -> None:
        while self._open and self._open.pop() is not token:
            pass  # pragma: no cover: an interrupt may have kept a call inside from being closed


def worth_a_step(calls: Sequence[SeenCall]) -> Iterator[SeenCall]:
    """The calls inside of a composite op: not views, and what composite ops in it call instead of these."""
    for call in calls:
        expectation = call.expectation
        if is_cast(call.op):
            changes = call.results is not None and call.args[0].dtype is not call.results[0].dtype
            yield from [call] if changes else []
        elif is_view(call.op) or call.op._schema.name in _LIKE_VIEWS or not _returns_tensors(call):
            continue
        elif (
            expectation is None
            or expectation.has_policy
            or expectation.error
            or not is_composite_call(call)
            or isinstance(expectation.inference, Inference)
            or expectation.fake is not None
            or not call.inner
        ):
            yield call
        else:
            yield from worth_a_step(call.inner)


def _returns_tensors(call: SeenCall) -> bool:
    return call.results is None or bool(tensors_in(call.results))


def is_view(op: torch._ops.OpOverload) -> bool:
    """Whether an op returns a view of its first argument, which has that argument's dtype."""
    returned = op._schema.returns
    name = op._schema.name
    if name == "aten::view" and op._overloadname == "dtype":
        return False
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def is_cast(op: torch._ops.OpOverload) -> bool:
    """Whether an op changes a tensor's dtype and nothing else.

    Example:
        >>> is_cast(torch.ops.aten._to_copy.default), is_cast(torch.ops.aten.add.Tensor)
        (True, False)
    """
    return op._schema.name in _CASTS


def is_composite_call(call: SeenCall) -> bool:
    """Whether an op is composite on the device of its tensors."""
    devices = [tensor.device.type for tensor in tensors_in(call.args)]
    return is_composite(call.op, next((device for device in devices if device != "cpu"), "cpu"))
