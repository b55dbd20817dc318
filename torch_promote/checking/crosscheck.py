"""`crosscheck`: every op that runs in a block is held against the reference, and against stock autocast if asked.

with tp.crosscheck() as report:
train_step()
print(report)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch.utils._pytree import tree_map_only

from torch_promote.checking.active import active_state, ours_is_active
from torch_promote.checking.call_check import Expectation, Finding, expect, is_composite, overload_name, tensors_in
from torch_promote.checking.call_site import calling_line, describe_arguments
from torch_promote.checking.comparison import compare, is_fake
from torch_promote.checking.known_gaps import Gap, dispatch_gaps, explained
from torch_promote.checking.report import CrosscheckError, CrosscheckReport, Mismatch
from torch_promote.checking.tap import tapped
from torch_promote.errors import OptionError
from torch_promote.reference.autocast_plan import AutocastState
from torch_promote.reference.infer import Inference

__all__ = ["CrosscheckError", "CrosscheckReport", "Level", "Mismatch", "crosscheck"]

Level = Literal["dtype", "bits"]
"""How much is compared: with the reference alone, or bit for bit with stock autocast too."""

#: Namespaces whose ops are no computation of their own.
_IGNORED_NAMESPACES = frozenset({"prim", "profiler"})

_reports = threading.local()


@contextlib.contextmanager
def crosscheck(*, level: Level = "dtype", raise_on_mismatch: bool = False) -> Iterator[CrosscheckReport]:
    """Checks every op that is dispatched in the block, forward and backward.

    The dtypes of each result, and for elementwise ops shape and strides, are compared with what the reference says;
    the dtypes in which autocast hands arguments on, under `my_autocast` or `torch.autocast`, with the autocast plan.
    Ops that no rule covers are counted and listed. Blocks may be nested: the innermost checks, and the outer ones get
    what it found.

    Args:
        level: "dtype" for that. "bits" also runs each call that a policy applies to a second time, under stock
            autocast, on the same inputs and from the same random state, and compares the results bit for bit.
        raise_on_mismatch: Raise at the first mismatch, from the line that called the op.

    Yields:
        The report, which fills while the block runs.

    Raises:
        OptionError: There is no such level.
        CrosscheckError: The first mismatch, under `raise_on_mismatch`.
        TapError: Another library holds the dispatch key that this needs.

    Example:
        >>> import torch_promote as tp
        >>> with tp.crosscheck() as report, tp.my_autocast("cpu"):
        ...     _ = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)).sum()
        >>> report.ok, report.with_policy["aten.linear.default"], report.no_rule.total()
        (True, 1, 0)
    """
    if level not in get_args(Level):
        raise OptionError(f"crosscheck has no level {level!r}. Legal: {', '.join(map(repr, get_args(Level)))}.")
    report = CrosscheckReport()
    outer: CrosscheckReport | None = getattr(_reports, "current", None)
    _reports.current = report
    try:
        with tapped(_Checker(report, level, raise_on_mismatch)):
            yield report
    finally:
        _reports.current = outer
        if outer is not None:
            outer.add(report)


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has begun: the tap's token.

    Attributes:
        expectation: What the reference expects; None for a call of batched tensors, which is not checked itself.
        args: The arguments, in the schema's order.
        written: The arguments in words, for an op that changes them; "" for other ops.
        see_through: Whether the ops inside are to be checked too.
        stock_too: Whether the call is compared with stock.
        handed_on: Whether autocast has called on to the op that runs.
        stock: The results under stock.
        stock_error: What stock raised.
        random_state: The random state from which both runs start.
    """

    expectation: Expectation | None
    args: list[Any]
    see_through: bool
    written: str = ""
    stock_too: bool = False
    handed_on: bool = False
    stock: list[Any] | None = None
    stock_error: str | None = None
    random_state: tuple[torch.Tensor, torch.Tensor | None] | None = None


@dataclass
class _Checker:
    """What the tap calls. One serves all threads of a block: autograd's own threads run some backwards."""

    report: CrosscheckReport
    level: Level
    raises: bool
    gaps: tuple[Gap, ...] = field(default_factory=dispatch_gaps)
    local: threading.local = field(default_factory=threading.local)
    stopped: bool = False

    def _open(self) -> list[_Call]:
        """The calls of this thread that have not ended, the outermost first."""
        calls: list[_Call] | None = getattr(self.local, "calls", None)
        if calls is None:
            calls = self.local.calls = []
        return calls

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> _Call | None:
        if op.namespace in _IGNORED_NAMESPACES or _is_traced():
            return None
        calls = self._open()
        inside = calls[-1] if calls else None
        self.stopped = False
        if _has_wrapped(args):  # of functorch; what they are made of is called next
            return self._push(_Call(None, args, see_through=True))
        if inside is not None and inside.expectation is not None:
            self._check_handed_on(inside, op, args)
        state = active_state()
        expectation = expect(op, args, state)
        plan = expectation.plan
        hands_on = plan is not None and bool(plan.casts or plan.runs != overload_name(op))
        see_through = hands_on or is_composite(op, _device_type(args))
        call = _Call(expectation, args, see_through)
        if op._schema.is_mutable:
            call.written = describe_arguments(args)
        if expectation.has_policy:
            self.report.with_policy[str(op)] += 1
            call.stock_too = self.level == "bits" and self._comparable(op, args, state)
        return self._push(call)

    def _push(self, call: _Call) -> _Call:
        self._open().append(call)
        return call

    def _pop(self, call: _Call) -> None:
        calls = self._open()
        if calls and calls[-1] is call:
            calls.pop()

    def _comparable(self, op: torch._ops.OpOverload, args: Sequence[Any], state: AutocastState | None) -> bool:
        if not ours_is_active():
            return False
        reason = None
        if state is not None and overload_name(op) in state.overrides:
            reason = "the op's policy is overridden"
        elif any(is_fake(leaf) for leaf in tensors_in(args)):
            reason = "fake tensors have no bits"
        if reason is not None:
            self.report.not_compared[reason] += 1
        return reason is None

    def _check_handed_on(self, outer: _Call, op: torch._ops.OpOverload, args: list[Any]) -> None:
        """Compares the arguments of the op that autocast calls with the plan."""
        expectation = outer.expectation
        assert expectation is not None
        plan = expectation.plan
        if outer.handed_on or plan is None or plan.policy is None or plan.runs != overload_name(op):
            return
        outer.handed_on = True
        finding = expectation.check_casts(args)
        if finding is not None:
            self._found(outer, finding)

    def before_stock(self, call: _Call) -> list[Any]:
        assert call.expectation is not None
        call.random_state = _random_state()
        written = [a.alias_info is not None and a.alias_info.is_write for a in call.expectation.op._schema.arguments]
        return [_copy(value) if writes else None for value, writes in zip(call.args, written, strict=True)]

    def after_stock(self, call: _Call, results: list[Any], error: str | None) -> None:
        call.stock, call.stock_error = results, error
        if call.random_state is not None:
            _set_random_state(call.random_state)

    def end(self, call: _Call, results: list[Any]) -> None:
        self._pop(call)
        expectation = call.expectation
        if expectation is None:
            return
        op = str(expectation.op)
        if isinstance(expectation.inference, Inference) or expectation.error is not None:
            self.report.checked[op] += 1
        elif is_composite(expectation.op, _device_type(call.args)):
            self.report.composite[op] += 1
        else:
            self.report.no_rule[op] += 1
        finding = expectation.check(results)
        if finding is None and expectation.plan is not None and expectation.plan.casts and not call.handed_on:
            planned = ", ".join(map(str, expectation.plan.casts))
            finding = Finding("casts", planned, "the op did not run on cast arguments")
        if finding is not None:
            self._found(call, finding, results)
        if call.stock_too:
            self._compare_with_stock(call, op, results)

    def _compare_with_stock(self, call: _Call, op: str, results: list[Any]) -> None:
        if call.stock_error is not None:
            self.report.stock_raised[op] += 1
            return
        self.report.with_stock[op] += 1
        for difference in compare(results, call.stock):
            text = f"{difference.where}: {difference.kind}"
            self._found(call, Finding("bits", f"{text} {difference.stock}, as stock has", difference.ours), results)

    def failed(self, call: _Call) -> None:
        self._pop(call)
        # What both raise is the caller's affair, and what a check has raised is reported already.
        if call.stock is not None and call.stock_error is None and not self.stopped:
            self._found(call, Finding("error", "a result, as stock has", "an error"))

    def _found(self, call: _Call, finding: Finding, results: Sequence[Any] = ()) -> None:
        assert call.expectation is not None
        op = call.expectation.op
        gap = explained(self.gaps, op, finding, [*tensors_in(call.args), *tensors_in(results)])
        if gap is not None:
            self.report.known_gaps[gap.reason] += 1
            return
        arguments = call.written or describe_arguments(call.args)
        mismatch = Mismatch(finding.kind, str(op), arguments, finding.expected, finding.got, calling_line())
        self.report.mismatches.append(mismatch)
        if self.raises:
            self.stopped = True
            raise CrosscheckError(str(mismatch))


def _device_type(values: Sequence[Any]) -> str:
    """The device type whose kernel runs: that of the first tensor that is not on the CPU."""
    types = [tensor.device.type for tensor in tensors_in(values)]
    return next((device for device in types if device != "cpu"), "cpu")


def _has_wrapped(values: Sequence[Any]) -> bool:
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors_in(values))


def _is_traced() -> bool:
    """Whether torch.compile is at work here: the ops are of its own making, and those of the code that it traces."""
    return torch._guards.TracingContext.try_get() is not None


def _copy(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def _random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
