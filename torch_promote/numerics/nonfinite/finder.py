"""The observer of `find_nonfinite`: checks the results of calls, and diagnoses the first that is not finite.

NOTE [ Which call is the origin ]
A call is checked when it ends. Its arguments are inspected only if a result is not finite. Arguments that the op writes
to are inspected before it runs, and copied if they are float16 or bfloat16, because the verdict needs their old values.

The ops inside of a composite op are checked first. Their verdict counts only if the result of the op that the program
called is not finite either, because a composite op may use infinite values internally.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import grad_scaler

from torch_promote.checking.call_site import is_ours
from torch_promote.checking.checker import UNINITIALIZED
from torch_promote.checking.overloads import overload_name, tensor_arguments, tensors_in
from torch_promote.numerics.nonfinite.judge import NonfiniteJudge, Verdict, Watched
from torch_promote.numerics.nonfinite.records import BenignNonfinite, NonfiniteOrigin
from torch_promote.numerics.nonfinite.spread import Spread
from torch_promote.numerics.observing.call_facts import is_of_a_transform
from torch_promote.numerics.observing.running_modules import RunningModules
from torch_promote.numerics.observing.tracer import THROUGH, Tracer
from torch_promote.numerics.ranges.tensor_ranges import TensorRange, extremes, is_finite
from torch_promote.numerics.ranges.unnoticed import can_be_read, unnoticed
from torch_promote.numerics.records.calls import Call

__all__ = ["NonfiniteFinder"]

_LOWER = (torch.float16, torch.bfloat16)

_MOST_PROVISIONAL = 20


class NonfiniteFinder(Tracer):
    """Looks for the first call with finite inputs and a non-finite output.

    Args:
        modules: Tracks which module runs.
        found: Called with the origin, in the thread of the call; later with None, if the origin proves benign. An error
            that it raises propagates to the call's caller.
        is_allowed: Whether a call may make non-finite values.
    """

    def __init__(
        self,
        modules: RunningModules,
        found: Callable[[NonfiniteOrigin | None], None],
        is_allowed: Callable[[Call], bool],
    ) -> None:
        super().__init__(modules, self._remember_call)
        self._found = found
        self._is_allowed = is_allowed
        self._watching = threading.local()
        self._lock = threading.Lock()
        self._judge = NonfiniteJudge()
        # Origins of infinite values, which are benign if the program only converts the values to integers.
        self._provisional: list[tuple[NonfiniteOrigin, Spread]] = []
        self.done = False
        self.checked = 0
        self.forward_ops: dict[tuple[str, str], dict[str, None]] = {}

    @property
    def benign(self) -> list[BenignNonfinite]:
        """The benign non-finite values, by place."""
        return self._judge.benign

    def _remember_call(self, call: Call, tensors: list[torch.Tensor]) -> None:
        self._watching.call = call, tensors

    def _watched(self) -> list[Watched]:
        watched: list[Watched] | None = getattr(self._watching, "calls", None)
        if watched is None:
            watched = self._watching.calls = []
        return watched

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> Any:
        """Called before a call."""
        if self.done:
            return None
        if is_of_a_transform(args):  # cannot be read; the calls on the tensors inside follow
            return THROUGH
        token = super().begin(op, args)
        if token is None:
            return None
        try:
            self._watch(Watched(token, op, args))
        except BaseException:  # no memory for a copy: the dispatcher does not make the call
            self.failed(token)
            raise
        return token

    def _watch(self, watched: Watched) -> None:
        token, op, args, calls = watched.token, watched.op, watched.args, self._watched()
        if _is_part(token) and calls and overload_name(op) == overload_name(calls[-1].op):
            calls[-1].cast_args = args
        calls.append(watched)
        if op._schema.is_mutable:
            self._look_before(watched)
        name = overload_name(op)
        if name == "aten::mul.Tensor" and len(calls) == 1 and _called_by_grad_scaler(sys._getframe()):
            watched.scales = True
            self._judge.set_scale(extremes([args[1]])[0][1])
        elif name == "aten::_amp_update_scale_":
            self._judge.set_scale(None)

    def _look_before(self, watched: Watched) -> None:
        arguments = watched.op._schema.arguments
        written = [
            value
            for argument, value in zip(arguments, watched.args, strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        ]
        tensors = tensors_in(written)
        watched.before = {id(tensor): found for tensor, found in zip(tensors, extremes(tensors), strict=True)}
        with unnoticed():
            # Copying a tensor without data fails or (for fake tensors) crashes, and no verdict needs it.
            copied = [tensor for tensor in tensors if tensor.dtype in _LOWER and can_be_read(tensor)]
            watched.copies = {id(tensor): tensor.clone() for tensor in copied}

    def end(self, token: Any, results: list[Any]) -> None:
        """Called after a call."""
        if token is THROUGH:
            return
        super().end(token, results)
        watched = self._pop_watched(token)
        if self.done or watched is None:
            return
        calls = self._watched()
        parent = calls[-1] if calls else None
        if parent is not None:
            parent.has_inner = True
        if _is_part(token):
            if parent is not None:
                parent.inner_nonfinite |= watched.inner_nonfinite
                if parent.verdict is None and watched.verdict is not None:
                    parent.verdict = _about_cast(watched, parent)
            return
        call, tensors = self._watching.call
        self._watching.call = None  # drops references to tensors
        if parent is None and call.phase != "backward":
            self.forward_ops.setdefault((call.module, call.line), {})[call.name] = None
        self._check(watched, call, tensors, results, parent)

    def failed(self, token: Any) -> None:
        """Called when a call raises."""
        super().failed(token)
        self._watching.call = None
        self._pop_watched(token)

    def _pop_watched(self, token: Any) -> Watched | None:
        calls = self._watched()
        if not any(watched.token is token for watched in calls):
            return None
        while True:
            watched = calls.pop()
            if watched.token is token:
                return watched

    def _check(
        self, watched: Watched, call: Call, tensors: list[torch.Tensor], results: list[Any], parent: Watched | None
    ) -> None:
        if call.composite and watched.has_inner and not watched.inner_nonfinite:
            return
        if not watched.has_inner and _only_views(watched.op):
            return
        written = UNINITIALIZED.get(call.name, ())
        self.checked += 1
        outputs = extremes([tensor for i, tensor in enumerate(tensors) if i not in written])
        if all(is_finite(one) for one in outputs):
            if self._provisional and call.op == "aten::_to_copy" and not tensors[0].is_floating_point():
                for _, spread in self._provisional:
                    spread.end(watched.args[0])
            return
        if parent is not None:
            parent.inner_nonfinite = True
        verdict = watched.verdict
        if verdict is None and watched.inner_nonfinite and call.composite:
            verdict = self._judge.earlier_cast(watched, call)  # the ops inside have been judged
        elif verdict is None:
            verdict = self._judge.judge(watched, call, tensors, outputs)
        if verdict is None:
            for _, spread in self._provisional if not call.composite else ():
                spread.pass_on([tensor for _, tensor in tensor_arguments(watched.op, watched.args)], tensors)
            return
        if self._is_allowed(call):
            self._judge.allow(call)
        elif parent is not None:
            parent.verdict = parent.verdict or verdict
        else:
            self._report(watched, call, tensors, verdict)

    def _report(self, watched: Watched, call: Call, tensors: list[torch.Tensor], verdict: Verdict) -> None:
        node = torch._C._current_autograd_node() if call.phase == "backward" else None  # type: ignore[attr-defined]
        origin = NonfiniteOrigin(
            op=call.op,
            inner=verdict.inner,
            module=call.module,
            phase=call.phase,
            line=call.line,
            kind=verdict.kind,
            inputs=tuple(
                TensorRange.of(name, watched.copies.get(id(tensor), tensor), watched.before.get(id(tensor)))
                for name, tensor in tensor_arguments(watched.op, watched.args)
            ),
            outputs=tuple(TensorRange.of(str(i), tensor) for i, tensor in enumerate(tensors)),
            argument=verdict.argument,
            node="" if node is None else node.name(),
            call=call,
        )
        with self._lock:
            if self.done:
                return
            self._drop_ended()
            first = not self._provisional
            if verdict.kind == "mathematics" and not any(one.nans for one in origin.outputs):
                self._provisional.append((origin, Spread(tensors)))
            else:
                self.done = True
            self.done |= len(self._provisional) > _MOST_PROVISIONAL
        if first:
            self._found(origin)

    def _drop_ended(self) -> None:
        """Drops the origins whose infinite values were only converted to integers."""
        before = list(self._provisional)
        self._provisional = [pair for pair in before if not pair[1].ended_well]
        for origin, spread in before:
            if spread.ended_well:
                self._judge.ended_in_integers(origin.call)
        if before and before[0] not in self._provisional:
            self._found(self._provisional[0][0] if self._provisional else None)

    def finish(self) -> None:
        """Called after the block."""
        with self._lock:
            if not self.done:
                self._drop_ended()


def _is_part(token: Any) -> bool:
    """Whether a call is part of the enclosing call: the op with cast arguments, or a conversion for it."""
    return hasattr(token, "outer")


def _about_cast(watched: Watched, parent: Watched) -> Verdict | None:
    """The verdict on a part of a call. For a cast, it names the argument."""
    verdict = watched.verdict
    if verdict is None or overload_name(watched.op) == overload_name(parent.op):
        return verdict
    named = tensor_arguments(parent.op, parent.args)
    argument = next((name for name, tensor in named if tensor is watched.args[0]), verdict.argument)
    return Verdict(verdict.kind, verdict.inner, argument)


def _called_by_grad_scaler(frame: Any) -> bool:
    while frame is not None and is_ours(frame):  # one observer may call another
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == grad_scaler.__file__


def _only_views(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
