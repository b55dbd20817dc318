"""The calls that a forward makes, with keys under which two runs of a program find each other's.

NOTE [ Which calls are compared ]
Those that the program makes in a forward: of a composite op the op alone, not what it is made of, since an override of
it decides for all of that. Views and ops that move data compute nothing, and collectives compute with what other ranks
have. A checkpoint's recomputation repeats calls of the forward.
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
    """Names a call in every run of a program.

    Attributes:
        module: The path of the module that made it.
        name: The overload's full name.
        number: How many calls of the overload the module had made before.
    """

    module: str
    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} in {self.module or 'the model'}, call {self.number + 1}"


class ForwardCalls(Tracer):
    """An observer of the calls of a forward. A subclass says what is done with them.

    Args:
        modules: Which module runs.
    """

    #: Whether `seen` gets the results that the program gets, on which hooks can be put.
    wants_real_results = False

    def __init__(self, modules: RunningModules) -> None:
        super().__init__(modules, self._remember)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._ended: tuple[Call, list[torch.Tensor]] | None = None
        self.saw_backward = False
        self.communicates = False

    def about_to(self, key: CallKey, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """A call begins. What is returned is passed to `seen`."""

    def seen(self, key: CallKey, call: Call, args: list[Any], results: list[torch.Tensor], begun: Any) -> None:
        """A call has ended.

        Args:
            key: Its key.
            call: What the tracer says of it.
            args: Its arguments.
            results: The tensors among its results.
            begun: What `about_to` returned.
        """

    def abandoned(self, begun: Any) -> None:
        """A call has raised."""

    def _remember(self, call: Call, tensors: list[torch.Tensor]) -> None:
        self._ended = call, tensors

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """A call begins."""
        self.communicates |= op.namespace in BETWEEN_PROCESSES
        stack = self._stack()
        if stack and getattr(stack[-1], "runs", None) is None:
            return None  # part of a call
        inner = bool(stack)
        token: Any = super().begin(op, args)
        if inner or token is None or token is THROUGH:
            return token
        if token.phase == "backward":
            # One that is recorded in turn, such as that of a gradient penalty, is part of the loss's computation.
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
        """A call has ended."""
        super().end(token, results)
        kept = getattr(token, "kept", None)
        if kept is None or self._ended is None:
            return
        (call, tensors), self._ended = self._ended, None
        self.seen(kept[0], call, token.args, tensors, kept[1])

    def failed(self, token: Any) -> None:
        """A call has raised."""
        super().failed(token)
        self._ended = None
        kept = getattr(token, "kept", None)
        if kept is not None:
            self.abandoned(kept[1])


@functools.cache
def _computes(op: torch._ops.OpOverload) -> bool:
    if op.namespace in (*BETWEEN_PROCESSES, "fsdp"):  # the latter's move data
        return False
    return not moves_data(overload_name(op)) and bool(op._schema.returns)


def floating(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns those of a call's results that are compared: floating point or complex numbers that can be read."""
    return [
        tensor
        for tensor in tensors
        if (tensor.is_floating_point() or tensor.is_complex())
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and can_be_read(tensor)
    ]
