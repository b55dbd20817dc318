"""The calls of a forward, with keys that match the calls of two runs.

NOTE [ Which calls are compared ]
The calls that the program makes in a forward. Of a composite op, only the op itself is compared, not the ops that it
calls, because an override of the op applies to all of them. Not compared: views and ops that move data, which compute
nothing; collectives, which depend on other ranks; and recomputations of checkpoints, which repeat calls of the forward.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import torch

from torch_promote.checking.overloads import overload_name
from torch_promote.numerics.nonfinite.call_again import BETWEEN_PROCESSES
from torch_promote.numerics.observing.running_modules import RunningModules
from torch_promote.numerics.observing.tracer import THROUGH, Tracer
from torch_promote.numerics.ranges.unnoticed import can_be_read
from torch_promote.numerics.records.calls import Call
from torch_promote.policy.legality import moves_data

__all__ = ["CallKey", "ForwardCalls", "floating"]


class CallKey(NamedTuple):
    """Identifies a call across runs of a program.

    Attributes:
        module: The path of the module that made it.
        name: The overload's full name.
        number: The number of earlier calls of the overload by the module.
    """

    module: str
    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} in {self.module or 'the model'}, call {self.number + 1}"


class ForwardCalls(Tracer):
    """An observer of the calls of a forward. Subclasses process the calls.

    Args:
        modules: Tracks which module runs.
    """

    #: Whether `seen` gets the program's own results, on which it can register hooks.
    wants_real_results = False

    def __init__(self, modules: RunningModules) -> None:
        super().__init__(modules, self._remember)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._ended: tuple[Call, list[torch.Tensor]] | None = None
        self.saw_backward = False
        self.communicates = False

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Called before a call. Its result is passed to `seen`."""

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """Called after a call.

        Args:
            key: Its key.
            call: The tracer's record of it.
            args: Its arguments.
            results: The tensors among its results.
            begun: The result of `about_to`.
        """

    def abandoned(self, begun: Any) -> None:
        """Called when a call raises."""

    def _remember(self, call: Call, tensors: list[torch.Tensor]) -> None:
        self._ended = call, tensors

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Called before a call."""
        self.communicates |= op.namespace in BETWEEN_PROCESSES
        stack = self._stack()
        if stack and getattr(stack[-1], "runs", None) is None:
            return None  # part of another call
        inner = bool(stack)
        token: Any = super().begin(op, args)
        if inner or token is None or token is THROUGH:
            return token
        if token.phase == "backward":
            # A backward that autograd records, such as that of a gradient penalty, is part of the loss.
            self.saw_backward |= not torch.is_grad_enabled()
        elif token.phase == "forward" and _computes(op):
            place = token.origin.module, overload_name(op)
            key = CallKey(*place, self._counts[place])
            self._counts[place] += 1
            try:
                token.kept = key, self.about_to(key, op, args)
                token.real_results = self.wants_real_results
            except BaseException:
                self.failed(token)
                raise
        return token

    def end(self, token: Any, results: list[Any]) -> None:
        """Called after a call."""
        super().end(token, results)
        kept = getattr(token, "kept", None)
        if kept is None or self._ended is None:
            return
        (call, tensors), self._ended = self._ended, None
        self.seen(kept[0], call, token.args, tensors, kept[1])

    def failed(self, token: Any) -> None:
        """Called when a call raises."""
        super().failed(token)
        self._ended = None
        kept = getattr(token, "kept", None)
        if kept is not None:
            self.abandoned(kept[1])


@functools.lru_cache(maxsize=4096)  # more than PyTorch has: a program may define ops at every step
def _computes(op: torch._ops.OpOverload) -> bool:
    if op.namespace in (*BETWEEN_PROCESSES, "fsdp"):  # FSDP's ops move data
        return False
    return not moves_data(overload_name(op)) and bool(op._schema.returns)


def floating(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a call's results that can be compared: readable tensors of floating point or complex numbers."""
    return [
        tensor
        for tensor in tensors
        if (tensor.is_floating_point() or tensor.is_complex())
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and can_be_read(tensor)
    ]
