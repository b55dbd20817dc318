"""`crosscheck`: compares every op that runs in a block with the reference, and with stock autocast if asked.

`torch-promote run --crosscheck` checks a whole process: it sets the environment variable `VARIABLE` for the program.
The processes that the program starts inherit it, and leave a report each.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Never, NoReturn, cast, get_args

import torch

from torch_promote.checking.comparison import compare, copy_with_strides
from torch_promote.checking.expectation import CheckedCall, Finding, expect, rule_in_force
from torch_promote.checking.known_gaps import Gap, known_gaps
from torch_promote.checking.report import CrosscheckReport, Mismatch
from torch_promote.errors import (
    CrosscheckError,
    DecoratorError,
    DispatchObserverError,
    OptionError,
    check_flag,
    did_you_mean,
    explains_arguments,
)
from torch_promote.observe.observer import ListOfThread, observe_dispatch
from torch_promote.observe.ops import facts_of, has_our_kernel, is_fake, is_traced, tensors_in
from torch_promote.observe.places import calling_line, describe_arguments
from torch_promote.observe.policy_sources import my_autocast_is_in_force, state_in_force
from torch_promote.policy.named_policies import stock_policy
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy
from torch_promote.reference.autocast import TURNS, AutocastState
from torch_promote.reference.ops.infer import Inference

CrosscheckLevel = Literal["dtype", "bits"]
"""What calls are compared with: "dtype": the reference; "bits": also stock autocast, bit for bit."""

#: Set by the command alone: the level and the folder for the reports, such as "bits:/tmp/folder".
VARIABLE = "TORCH_PROMOTE_CROSSCHECK_REPORTS"


#: The open blocks, the outermost first, each with its report and its observer.
_blocks = ListOfThread()


class crosscheck:  # noqa: N801 (what people write after `with`)
    """Checks every op that is dispatched in the block, forward and backward.

    Crosscheck compares the dtypes of each result, and the shape and strides of elementwise results, with the reference.
    Under `my_autocast` or `torch.autocast`, it compares the casts of the arguments with the autocast plan. It lists the
    ops that no rule covers. Blocks can be nested: the innermost block checks, and passes its report on to the
    outer ones. `with` gives the report, which fills while the block runs.

    Args:
        level: "dtype": the comparisons above. "bits": also runs each call to which a policy applies a second time,
            under stock autocast, on the same inputs and from the same random state, and compares the results bit for
            bit.
        raise_on_mismatch: Raise at the first mismatch, from the line that called the op.

    Raises:
        OptionError: `level` is not a level.
        CrosscheckError: The first mismatch, under `raise_on_mismatch`.
        DispatchObserverError: Another library uses the dispatch key that crosscheck needs, or the block ends in another
            thread than it began in.
        DecoratorError: `crosscheck` is used as a decorator: the caller could not read the report.

    Example:
        >>> import torch, torch_promote as tp
        >>> with tp.crosscheck() as report, tp.my_autocast("cpu"):
        ...     _ = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)).sum()
        >>> report.ok, report.with_policy["aten.linear.default"], report.no_rule.total()
        (True, 1, 0)
    """

    __slots__ = ("level", "raise_on_mismatch")

    @explains_arguments
    def __init__(self, *, level: CrosscheckLevel = "dtype", raise_on_mismatch: bool = False) -> None:
        if level not in get_args(CrosscheckLevel):
            raise OptionError(
                f"{level!r} is not a level of crosscheck.{did_you_mean(str(level), get_args(CrosscheckLevel))} Legal: "
                f"{', '.join(map(repr, get_args(CrosscheckLevel)))}."
            )
        self.level: CrosscheckLevel = level
        self.raise_on_mismatch: bool = check_flag("raise_on_mismatch", raise_on_mismatch)

    def __enter__(self) -> CrosscheckReport:
        report = CrosscheckReport()
        observing = observe_dispatch(Checker(report, self.level, self.raise_on_mismatch))
        observing.__enter__()
        _blocks.items.append((self, report, observing))
        return report

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # asyncio tasks may end in any order: the block around this one may have ended already.
        position = max((i for i, (block, _, _) in enumerate(_blocks.items) if block is self), default=None)
        if position is None:
            raise DispatchObserverError(
                "this crosscheck was not entered in this thread, so it cannot end here. It is still open in the thread "
                "that entered it: end it there. Each thread needs a block of its own."
            )
        _, report, observing = _blocks.items.pop(position)
        observing.__exit__(None, None, None)
        if position > 0:
            _blocks.items[position - 1][1].add(report)

    def __call__(self, function: Never) -> NoReturn:
        """Raises; see the class."""
        raise DecoratorError(
            "crosscheck is not a decorator: the caller could not read its report. Write `with crosscheck() as report:` "
            "around the call, or inside the function."
        )


def use_environment() -> None:
    """Opens a crosscheck in this thread, which lasts until the process ends, as `VARIABLE` says."""
    level, _, folder = os.environ[VARIABLE].partition(":")
    block = crosscheck(level=cast(CrosscheckLevel, level))
    report = block.__enter__()

    def write() -> None:
        file = Path(folder, f"{os.getpid()}.report")
        with contextlib.suppress(OSError):  # the command has ended before this process
            file.with_suffix(".part").write_text(json.dumps(report.to_dict()), encoding="utf-8")
            file.with_suffix(".part").rename(file)

    def end() -> None:
        with contextlib.suppress(DispatchObserverError):  # another thread imported PyTorch first
            block.__exit__(None, None, None)
        write()

    atexit.register(end)
    # What the report has before a fork is the parent's to report.
    os.register_at_fork(after_in_child=lambda: vars(report).update(vars(CrosscheckReport())))
    # A process that multiprocessing has forked ends without atexit.
    finalize: Any = multiprocessing.util.Finalize
    multiprocessing.util.register_after_fork(report, lambda _: finalize(None, write, exitpriority=-100))


def read_reports(folder: Path) -> dict[int, CrosscheckReport]:
    """Returns the reports that processes have left in a folder, by process id."""
    return {int(file.stem): CrosscheckReport.load(file) for file in folder.glob("*.report")}


# --- the observer of one block

#: On the CPU, LAPACK's gelsy reads which columns are fixed from memory that PyTorch has not initialized.
NOT_REPEATABLE = frozenset({"aten::linalg_lstsq", "aten::linalg_lstsq.out"})
#: What stock does with an op that it casts nothing for.
_STOCK_CASTS_NOTHING = (None, CastPolicy.fallthrough)


@dataclass
class Checker:
    """The observer of one crosscheck block. Its methods run in the block's thread and in autograd's threads."""

    innermost_only: ClassVar[bool] = True
    report: CrosscheckReport
    level: CrosscheckLevel
    raises: bool
    gaps: tuple[Gap, ...] = field(default_factory=lambda: known_gaps().calls)
    calls: ListOfThread = field(default_factory=ListOfThread)  # the open ones
    stopped: bool = False

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> CheckedCall | None:
        """Computes the expectation of a call, and decides how much of the call to observe."""
        if facts_of(op).is_ignored or is_traced():
            return None
        calls = self.calls.items
        inside = calls[-1] if calls else None
        self.stopped = False
        state = state_in_force()
        if inside is not None and inside.is_checked and _is_repeated(inside, op, state):
            # Functorch calls the op again before autocast sees it: leave the check to the next call.
            self.report.with_policy -= Counter({str(op): 1})
            inside.is_checked, inside.stock = False, None
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors_in(args))):
            # Functorch next calls the op on the tensors inside.
            call = CheckedCall(op, args, is_checked=False)
            calls.append(call)
            return call
        if inside is not None and inside.is_checked:
            self._check_cast_arguments(inside, op, args)
        try:
            call = expect(op, args, state)
        except Exception as error:  # a bug of the reference must not reach the caller of the op
            self._add(Finding("reference", "an answer", f"{type(error).__name__}: {error}"), op, args)
            return None
        plan = call.plan
        calls_op_again = plan is not None and bool(plan.casts or plan.runs != facts_of(op).name)
        # Kernels call ops too, and some of these have policies if autocast is on.
        call.see_through = calls_op_again or call.is_composite or not (plan is None or call.has_policy)
        if call.has_policy:
            self.report.with_policy[str(op)] += 1
            for outer in calls:
                outer.casts_inside = True
        # A kernel of ours might cast where the plan has no policy, and the result's dtype might not show it. Under
        # overrides, it might do so inside the kernel of any op.
        may_cast = plan is not None and (has_our_kernel(op) or bool(state and state.overrides))
        if self.level == "bits" and (call.has_policy or may_cast):
            call.stock_too = self._comparable(call, state)
        calls.append(call)
        return call

    def _pop(self, call: CheckedCall) -> None:
        calls = self.calls.items
        if calls and calls[-1] is call:
            calls.pop()

    def _comparable(self, call: CheckedCall, state: AutocastState | None) -> bool:
        if not my_autocast_is_in_force():
            return False
        reason, name, tensors = None, call.name, tensors_in(call.args)
        if state is not None and any(state.override(name, tensor.device.type) is not None for tensor in tensors):
            reason = "the op's policy is overridden"
        elif name in NOT_REPEATABLE:
            reason = "PyTorch does not repeat its bits"
        elif state is not None and not call.has_policy and _may_differ_inside(call, state):
            reason = "the policy of an op that it calls may be overridden"
        elif any(map(is_fake, tensors)):
            reason = "fake tensors have no bits"
        elif (in_force := rule_in_force()) is not None:
            reason = f"the promotion rule {in_force[0].name!r} is not PyTorch's"
        elif torch._C._len_torch_dispatch_stack() or any(
            torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python) for tensor in tensors
        ):
            reason = "a dispatch mode or a tensor subclass would see the call twice"
        if reason is not None:
            self.report.not_compared[reason] += 1
        return reason is None

    def _check_cast_arguments(self, outer: CheckedCall, op: torch._ops.OpOverload, args: list[Any]) -> None:
        """If this is the call that autocast makes with the cast arguments, compares them with the plan."""
        plan, name = outer.plan, facts_of(op).name
        if outer.op_was_called or plan is None or plan.policy is None:
            return
        if plan.policy in FLOAT8_POLICIES:  # a product stands for the op
            outer.op_was_called = name == "aten::_scaled_mm" or (name == "aten::mm" and args[0].dtype is torch.float32)
            return
        if plan.runs != name:
            return
        outer.op_was_called = True
        finding = outer.check_casts(args)
        if finding is not None:
            self._found(outer, finding)

    def before_stock(self, call: CheckedCall) -> list[Any]:
        """Prepares the run under stock."""
        call.stock = _StockRun()
        found: list[Any] = call.stock.start(call.op, call.args)
        return found

    def after_stock(self, call: CheckedCall, results: list[Any], error: str | None) -> None:
        """Stores the outcome of the run under stock."""
        call.stock.stop()
        call.stock.results, call.stock.error = results, error

    def end(self, call: CheckedCall, results: list[Any]) -> None:
        """Compares the results of the call."""
        self._pop(call)
        if not call.is_checked:
            return
        op = str(call.op)
        finding = call.check(results)
        if finding is not None and call.casts_inside and not call.has_policy:
            finding = None
            self.report.no_rule[op] += 1
        elif call.fake is not None:
            self.report.by_fake[op] += 1
        elif isinstance(call.inference, Inference) or call.error is not None:
            self.report.checked[op] += 1
        elif call.is_composite:
            self.report.composite[op] += 1
        else:
            self.report.no_rule[op] += 1
        if finding is None and call.plan is not None and call.plan.casts and not call.op_was_called:
            planned = ", ".join(map(str, call.plan.casts))
            finding = Finding("casts", planned, "the op did not run on cast arguments")
        if finding is not None:
            self._found(call, finding, results)
        if call.stock is not None:
            self._compare_with_stock(call, call.stock, results)

    def _compare_with_stock(self, call: CheckedCall, stock: _StockRun, results: list[Any]) -> None:
        op = call.op
        if stock.error is not None:
            self.report.stock_raised[str(op)] += 1
            return
        self.report.with_stock[str(op)] += 1
        for difference in compare(_written_results(op, results), _written_results(op, stock.results or ())):
            text = f"{difference.where}: {difference.kind}"
            self._found(call, Finding("bits", f"{text} {difference.stock}, as stock has", difference.ours), results)

    def failed(self, call: CheckedCall) -> None:
        """Closes a call that raised. A mismatch if stock has a result."""
        self._pop(call)
        if call.stock is None:
            return
        call.stock.stop()
        # If both raise, the error is the caller's. If a check raised, the mismatch is already reported.
        if call.stock.results is None or call.stock.error is not None or self.stopped:
            return
        if call.stock.has_hooks:  # torch.utils.checkpoint stops a recomputation early by raising
            self.report.not_compared["the call raised, possibly in a saved-tensor hook"] += 1
            return
        self._found(call, Finding("error", "a result, as stock has", "an error"))

    def _found(self, call: CheckedCall, finding: Finding, results: Sequence[Any] = ()) -> None:
        tensors = [*tensors_in(call.args), *tensors_in(results)]
        gap = next((gap for gap in self.gaps if gap.explains(call.name, finding, tensors)), None)
        if gap is not None:
            self.report.known_gaps[gap.reason] += 1
            return
        self._add(finding, call.op, call.args)

    def _add(self, finding: Finding, op: torch._ops.OpOverload, args: Sequence[Any]) -> None:
        mismatch = Mismatch(
            finding.kind, str(op), describe_arguments(args), finding.expected, finding.got, calling_line()
        )
        self.report.mismatches.append(mismatch)
        if self.raises:
            self.stopped = True
            raise CrosscheckError(str(mismatch))


def _is_repeated(outer: CheckedCall, op: torch._ops.OpOverload, state: AutocastState | None) -> bool:
    """Whether an inner call of the same op repeats the outer one. A call that autocast makes has autocast off."""
    plan = outer.plan
    if plan is None or plan.device is None or outer.op is not op or state is None:
        return False
    return outer.has_policy and plan.device in state.devices


def _may_differ_inside(call: CheckedCall, state: AutocastState) -> bool:
    """Whether an override of an op that it calls, and that stock casts, may give an op other bits than stock."""
    if not state.overrides:
        return False
    if call.is_composite or torch.is_inference_mode_enabled():
        return True
    return any(stock_policy(name, device) not in _STOCK_CASTS_NOTHING for name in state.overrides for device in TURNS)


# --- the second run of a call, under stock autocast

_hooks: Any = torch._C._autograd


class _StockRun:
    """A run; between `start` and `stop`, stock's cast cache is off, and the caller's saved-tensor hooks see nothing."""

    # With its cache on, stock would keep using the old casts of weights that change inside a region. Hooks that count
    # saved tensors, such as those of torch.utils.checkpoint, must not count those of this run.

    def __init__(self) -> None:
        self.results: list[Any] | None = None  # None if the run has not ended
        self.error: str | None = None
        # Whether the caller has saved-tensor hooks. They may raise in the other run of the call.
        self.has_hooks: bool = False
        self._state = contextlib.ExitStack()

    def start(self, op: torch._ops.OpOverload, args: Sequence[Any]) -> list[Any]:
        """Prepares the run. Returns for each argument a copy if the op writes to it, otherwise None."""
        written = {one.place for one in facts_of(op).writes}
        copies = [_mapped(copy_with_strides, value) if i in written else None for i, value in enumerate(args)]
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        self._state.enter_context(torch.random.fork_rng(gpus))
        self._state.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        if _hooks._saved_tensors_hooks_is_enabled():
            self.has_hooks = _hooks._top_saved_tensors_default_hooks(True) is not None
            _hooks._push_saved_tensors_default_hooks(_save_nothing, _save_nothing)
            self._state.callback(_hooks._pop_saved_tensors_default_hooks)
        return copies

    def stop(self) -> None:
        """Restores the state. Does nothing if the run has been stopped already, or was never started."""
        self._state.close()


def _written_results(op: torch._ops.OpOverload, results: Sequence[Any]) -> list[Any]:
    """Returns results, detached if the op writes, with None in place of those whose memory it leaves uninitialized."""
    left_out = facts_of(op).unwritten
    if op._schema.is_mutable:
        results = _mapped(torch.Tensor.detach, list(results))
    return [None if position in left_out else result for position, result in enumerate(results)]


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    return [_mapped(function, element) for element in value] if isinstance(value, list) else value


def _save_nothing(saved: object) -> None:
    """Saves None: no backward goes through this run, and a saved result would keep itself and its graph alive."""
