"""`why`: explains the dtype of an expression, with the casts of autocast.

PyTorch chooses the overload of a function, and composite ops call others. So this module runs each operator and
function of the expression, observes which ops are dispatched, and writes what the reference says of each: what autocast
casts, how the operands promote, and the result's dtype.

NOTE [ Real tensors ]
What PyTorch does with real tensors is the answer, its errors too: fake tensors have other dtypes in places, and take
calls that the kernels refuse. Without a GPU, tensors of the CPU stand in for its own, under its policies. Fake tensors
stand in for large ones. In both cases the derivation says that it is inferred.
"""

from __future__ import annotations

import contextlib
import html
import logging
import operator
import os
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_promote.checking.expectation import CheckedCall, expect, has_fake, operands_of
from torch_promote.checking.expression import Node, find_function, parse
from torch_promote.errors import ExpressionError, OptionError, PromotionRuleError, explains_arguments, shown
from torch_promote.observe.observer import observe_dispatch
from torch_promote.observe.ops import facts_of, tensor_arguments, tensors_in
from torch_promote.observe.policy_sources import state_in_force
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.policy.named_policies import stock_policy
from torch_promote.policy.op_names import exact_key
from torch_promote.policy.op_table import DEVICE_TYPES, DeviceType
from torch_promote.policy.overrides import LEGAL_DEVICES
from torch_promote.policy.policy import Policy, PolicyLike
from torch_promote.reference import (
    Inference,
    Operand,
    PromotionError,
    PromotionRule,
    RuleName,
    ShapeError,
    promotion_rule,
)
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.explanation import explain_inference, explain_plan, explain_promotion, listed
from torch_promote.reference.ops.call import described
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.promotion import promotion

_Fill = Callable[..., torch.Tensor]

_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")
#: What fake tensors raise where the results depend on values.
_DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)
#: What follows an error that the reference expects of a call, and PyTorch does not raise.
_WRONG = "PyTorch does not raise here: the reference is wrong. Report it."
#: Calls on more elements are not run on real tensors.
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Derivation:
    """The explanation of an expression's dtype.

    Attributes:
        expression: The expression, as parsed.
        steps: The steps, each one or more sentences.
        dtype: The result's dtype; None if there is an error.
        shape: The result's shape; None if there is an error.
        error: Why the expression raises, or None.
        rule: The promotion rule's name.
        by_rule: Whether the error comes from the promotion rule and not from PyTorch.
        results: The dtype and shape of each result, for a call with several.
        autocast: The region that the expression is explained in, in words, or None.
        inferred: Why PyTorch was not asked on real tensors of the device, as a clause, or None if it was.

    Example:
        >>> derivation = why("int8[3] * int64[]")
        >>> derivation.dtype, derivation.shape, len(derivation.steps)
        (torch.int8, (3,), 4)
    """

    expression: str
    steps: tuple[str, ...]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    error: str | None = None
    rule: str = "torch"
    by_rule: bool = False
    results: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    autocast: str | None = None
    inferred: str | None = None

    def __str__(self) -> str:
        return self.text(100)

    def __repr__(self) -> str:
        result = "an error" if self.dtype is None else f"{dtype_name(self.dtype)}{list(self.shape or ())}"
        return f"<why {self.expression!r}: {result} in {len(self.steps)} steps. print() shows them.>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def text(self, width: int | None) -> str:
        """Returns the derivation as lines of text.

        Args:
            width: The width of a line, in characters. None: nothing is wrapped.

        Example:
            >>> print(why("int8[2] + int8[2]").text(width=40))
            int8[2] + int8[2]
            1. int8[2] is a tensor with dimensions:
               state dim, int8.
            2. int8[2] is a tensor with dimensions:
               state dim, int8.
            3. Both are int8 in state dim: nothing
               is promoted.
            4. + computes in int8 and returns int8.
            Result: int8 of shape [2]
        """
        title = self.expression
        title += f", {self.autocast}" if self.autocast is not None else ""
        title += f", by the rule {self.rule}" if self.rule != "torch" else ""
        lines = [(title, "  ")]
        lines += [(f"{number}. {step}", " " * len(f"{number}. ")) for number, step in enumerate(self.steps, start=1)]
        if self.inferred is not None:
            lines.append((f"Inferred: {self.inferred}.", "  "))
        if self.error is not None:
            lines.append((f"{'The rule' if self.by_rule else 'PyTorch'} raises: {self.error}", ""))
        elif self.dtype is not None and self.shape is not None:
            results = self.results or ((self.dtype, self.shape),)
            named = ((dtype_name(dtype), list(shape)) for dtype, shape in results)
            words = "; ".join(f"{dtype} of shape {shape}" if shape else f"{dtype}, 0-dim" for dtype, shape in named)
            lines.append((f"{'Results' if self.results else 'Result'}: {words}", "  "))
        wrap = textwrap.TextWrapper(width or sys.maxsize, break_long_words=False, break_on_hyphens=False)
        wrapped = []
        for line, wrap.subsequent_indent in lines:
            wrapped += wrap.wrap(line)
        return "\n".join(wrapped)


@explains_arguments
def why(
    expression: str,
    *,
    autocast: DeviceType | None = None,
    dtype: torch.dtype | str | None = None,
    policy: PolicyLike | None = None,
    default_dtype: torch.dtype | str | None = None,
    rule: RuleName | PromotionRule = "torch",
) -> Derivation:
    """Explains the dtype of an expression, step by step.

    Args:
        expression: Operands are tensors, written as dtype and sizes (`int32[2, 3]`, `f2[3]`, `int64[]`), Python
            numbers, and calls of functions of PyTorch or of methods (`cat([int8[2], half[2]])`,
            `F.softmax(bf16[2, 3], -1)`). They are joined by Python's operators.
        autocast: The device type of a region of `my_autocast` around the expression. It needs no GPU.
        dtype: The region's dtype, or its name. None: PyTorch's default.
        policy: The region's policy. None: the default policy.
        default_dtype: The dtype of Python floats. None: the current default dtype.
        rule: The promotion rule, or its name.

    Returns:
        The derivation. `str()` formats it. If PyTorch or the rule raises, it ends with the last step before that.

    Raises:
        ExpressionError: The expression is invalid, or contains no tensor. It is a ValueError.
        OptionError: `dtype` or `policy` is given without `autocast`, or `autocast` is another device type.
        DtypeError, PolicyError, RuleDefinitionError: The dtype, the policy or the rule does not exist.

    Example:
        >>> print(why("int32[3] + 5.5", default_dtype=torch.float32))
        int32[3] + 5.5
        1. int32[3] is a tensor with dimensions: state dim, int32.
        2. 5.5 is a Python float: state wrapped. It counts as the default dtype, float32.
        3. dim int32 with wrapped float32: float32 is floating, a higher kind than integral, so the two are
           promoted. The table has float32 for them (row i4, column f4).
        4. + computes in float32 and returns float32.
        Result: float32 of shape [3]
        >>> why("F.linear(f4[2, 3], f4[4, 3])", autocast="cpu").dtype
        torch.bfloat16
    """
    if not isinstance(expression, str):
        example, what = "int32[2, 3] + 5.5", type(expression).__name__
        if isinstance(expression, torch.Tensor):
            what = f"{what}. This one is written {dtype_name(expression.dtype)}{list(expression.shape)}"
        raise ExpressionError(f'why() explains an expression, a str such as "{example}", got a value of type {what}.')
    if autocast is None and (dtype is not None or policy is not None):
        raise OptionError('dtype and policy are those of a region: pass autocast="cpu" or another device type, too.')
    if autocast is not None and autocast not in DEVICE_TYPES:
        raise OptionError(f"autocast is a device type or None, got {shown(autocast)}.{LEGAL_DEVICES}")
    chosen = promotion_rule(rule, default_dtype)
    explainer = _Explainer(autocast, None if dtype is None else parse_dtype(dtype), policy, chosen)
    tree, region = parse(expression), explainer.region_in_words()
    try:
        value = explainer.value_of(tree)
    except (PromotionError, PromotionRuleError) as error:
        by_rule, steps = isinstance(error, PromotionRuleError), tuple(explainer.steps)
        inferred = explainer.inferred
        return Derivation(tree.text, steps, None, None, str(error), chosen.name, by_rule, (), region, inferred)
    operands = [leaf for leaf in tree_leaves(value, is_leaf=_is_operand) if _is_operand(leaf)]
    results = tuple((operand.dtype, operand.shape) for operand in operands)
    if not explainer.calls_pytorch or not results:
        raise ExpressionError(
            f"{expression!r} has no operator or function with a tensor operand, so nothing is promoted."
        )
    return Derivation(
        tree.text,
        tuple(explainer.steps),
        *results[0],
        rule=chosen.name,
        results=results if len(results) > 1 else (),
        autocast=region,
        inferred=explainer.inferred,
    )


@dataclass(slots=True)
class _Run:
    """A run of a function, and the observer that keeps the calls that it makes, with those inside of each."""

    stands_in: str | None  # the device type that the CPU stands in for
    operands: list[torch.Tensor] = field(default_factory=list)  # what the function received
    names: dict[int, str] = field(default_factory=dict)  # those that the expression spells, as it does, by `id`
    calls: list[CheckedCall] = field(default_factory=list)
    result: Any = None  # what the function returned, with an `Operand` for each tensor
    error: Exception | None = None  # what it raised
    _all: list[CheckedCall] = field(default_factory=list)
    _open: list[CheckedCall] = field(default_factory=list)

    @property
    def expected_error(self) -> str | None:
        """The first error that the reference expects."""
        return next((call.error for call in self._all if call.error is not None), None)

    @property
    def is_small(self) -> bool:
        """Whether the call takes little memory on real tensors."""
        results = (tensor for call in self._all for tensor in tensors_in(call.results or ()))
        return sum(tensor.numel() for tensor in self.operands) <= _SMALL and all(
            tensor.numel() <= _SMALL for tensor in results
        )

    def begin(self, op: torch._ops.OpOverload, args: list[Any]) -> CheckedCall:
        state = state_in_force()
        call = expect(op, args, state)
        device = call.plan and call.plan.device
        override = state.override(call.name, device) if state and device else None
        call.overridden = override is not None and not (
            self.stands_in is not None and override is stock_policy(call.name, self.stands_in)
        )
        (self._open[-1].inner if self._open else self.calls).append(call)
        self._all.append(call)
        self._open.append(call)
        return call

    def end(self, token: CheckedCall, results: list[Any]) -> None:
        token.results = results
        self._open.remove(token)

    def failed(self, token: CheckedCall) -> None:
        self._open.remove(token)


class _NoTensorError(ExpressionError):
    """No tensor of a dtype can be made."""


@dataclass(slots=True)
class _Explainer:
    """Evaluates an expression, and writes a step for each thing that happens. `autocast` is None without a region."""

    autocast: DeviceType | None
    dtype: torch.dtype | None
    policy: Policy | str | os.PathLike[str] | None
    rule: PromotionRule  # under the default dtype
    steps: list[str] = field(default_factory=list)
    calls_pytorch: bool = False  # whether a function or an operator on tensors has been run
    inferred: str | None = None  # see `Derivation`
    _spelled: list[tuple[Operand, str]] = field(default_factory=list)

    def region_in_words(self) -> str | None:
        if self.autocast is None:
            return None
        with self._region():
            enabled, dtype = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        if not enabled:
            refused = dtype_name(self.dtype or dtype)
            return f"under autocast on {self.autocast}, which does not support {refused}: the region is disabled"
        given = f" and the policy {self.policy}" if isinstance(self.policy, str | os.PathLike) else ""
        return f"under autocast on {self.autocast} with {dtype_name(dtype)}{given}"

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        """The regions that the expression runs in, without gradients."""
        before = torch.get_default_dtype(), _FAKE_TENSORS.level
        with contextlib.ExitStack() as stack:
            torch.set_default_dtype(self.rule.default_dtype)
            stack.callback(torch.set_default_dtype, before[0])
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            _FAKE_TENSORS.setLevel(logging.CRITICAL)  # they log a traceback for each error
            stack.callback(_FAKE_TENSORS.setLevel, before[1])
            stack.enter_context(torch.no_grad())
            if self.autocast is not None:
                stack.enter_context(self._autocast())
            if self.rule.name != "torch":
                stack.enter_context(promotion(self.rule))
            yield

    @property
    def _stands_in(self) -> DeviceType | None:
        """The device type that the CPU stands in for: NOTE [ Real tensors ]."""
        has_device = self.autocast is None or torch.get_device_module(self.autocast).is_available()
        return None if has_device else self.autocast

    @property
    def _device(self) -> str:
        return "cpu" if self.autocast is None or self._stands_in else self.autocast

    def _autocast(self) -> my_autocast:
        assert self.autocast is not None
        absent = self._stands_in
        if absent is None:
            return my_autocast(self.autocast, dtype=self.dtype, policy=self.policy)
        own = () if self.policy is None else Policy.of(self.policy).diff("stock")
        changes = {exact_key(one.overload): one.mine for one in own if one.device == absent and one.mine is not None}
        policy = Policy.named(absent).override(changes, "cpu")
        return my_autocast("cpu", dtype=self.dtype or torch.get_autocast_dtype(absent), policy=policy)

    def value_of(self, node: Node) -> Any:
        """Evaluates a node, and writes its steps. A tensor's value is an `Operand`."""
        # PromotionError: PyTorch refuses a call; PromotionRuleError: the rule does; ExpressionError: there is no such
        # function, or it does not take the arguments.
        value = node.value if node.function is None else self._called(node)
        if isinstance(value, Operand):
            self._spelled.append((value, f"({node.text})" if node.symbol else node.text))
        return value

    def _called(self, node: Node) -> Any:
        args = [self.value_of(arg) for arg in node.args]
        kwargs = {name: self.value_of(arg) for name, arg in node.kwargs}
        function = node.function
        if isinstance(function, str):
            found = find_function(function, args)
            return self._run(node, found, _with_list(function, found, args), kwargs)
        assert function is not None
        if not node.symbol:
            if function is operator.getitem and (
                _is_operand(args[0]) or not isinstance(args[0], tuple | list) or args[1] >= len(args[0])
            ):
                raise ExpressionError(f"{node.args[0].text} has no result number {args[1]}.")
            return function(*args)
        for value in args:
            if not isinstance(value, Operand | bool | int | float | complex):
                raise ExpressionError(
                    f"{node.symbol} takes a tensor or a number, and {value!r} in {node.text} is neither."
                )
        if any(isinstance(value, Operand) for value in args):
            return self._run(node, function, args, kwargs)
        if node.symbol == "**" and abs(args[1]) > 1_000:
            raise ExpressionError(f"{node.text} is too large a number to compute.")
        try:
            value = function(*args)
        except (ArithmeticError, TypeError) as error:
            raise ExpressionError(f"Python cannot compute {node.text}: {error}.") from None
        self.steps.append(f"{node.text} contains no tensor: Python computes {value} before PyTorch is called.")
        return value

    def _run(self, node: Node, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a function on tensors like the operands, and writes the steps of the ops that it calls."""
        self.calls_pytorch = True
        fake = self._tried(function, args, kwargs, fill=None, observed=True)
        if isinstance(node.function, str) and not fake.calls and isinstance(fake.error, TypeError):
            raise ExpressionError(f"PyTorch does not take these arguments: {_one_line(fake.error)}") from None
        real = self._on_real_tensors(function, args, kwargs) if fake.is_small else None
        run = real or fake
        if real is None:
            reason = "PyTorch cannot run it here on tensors of ones"
            if not fake.is_small:
                reason = "the tensors are too large to run on"
            if isinstance(run.error, _DEPENDS_ON_DATA):
                raise ExpressionError(f"the results of {node.text} depend on values, and {reason}.")
            self.inferred = f"{reason}, so it ran on fake tensors, which have no data"
        elif self._stands_in:
            self.inferred = self.inferred or (
                f"there is no GPU here, so the CPU ran it under the policies of {self._stands_in.upper()}"
            )
        refused: PromotionError | PromotionRuleError | None = None
        if isinstance(run.error, PromotionRuleError):
            refused = run.error
        elif run.error is not None:
            said = _one_line(run.error)
            refused = PromotionError(said.replace("autocast on cpu", f"autocast on {self.autocast}"))
        elif real is None and run.expected_error is not None:
            refused = PromotionError(run.expected_error)
        calls = [call for call in run.calls if not call.is_view] or run.calls
        symbol = node.symbol if self.autocast is None and len(calls) == 1 and len(node.args) == 2 else ""
        writer = _StepWriter(self.rule, self.steps, run.names, symbol, refused, real is not None)
        with self._region():
            for call in calls:
                writer.write(call)
        if refused is not None:
            raise refused
        return run.result if real is not None or not calls else _by_reference(calls[-1], run.result)

    def _on_real_tensors(self, function: Callable[..., Any], args: Any, kwargs: Any) -> _Run | None:
        """Runs a function on real tensors. None if that says nothing of the call."""
        # An error may depend on the values: ones have no inverse, and are no indices of a dimension of size 1. So
        # PyTorch refuses the call if it does with each fill.
        device = self._device if self._device in ("cuda", "xpu") else None
        devices = [] if device is None else [torch.get_device_module(device).current_device()]
        for fill in (torch.ones, _identities, torch.zeros):
            with torch.random.fork_rng(devices, device_type=device or "cuda"):
                try:
                    run = self._tried(function, args, kwargs, fill, observed=False)
                except _NoTensorError:
                    return None
            if run.error is None or isinstance(run.error, PromotionRuleError | NotImplementedError):
                break
        if _says_nothing(run.error, self._stands_in is not None):
            return None
        with torch.random.fork_rng(devices, device_type=device or "cuda"):
            # Observed calls are boxed, and a few kernels tell `x.op_()` from `op(x, out=x)` by the address of x.
            observed = self._tried(function, args, kwargs, fill, observed=True)
        observed.result, observed.error = run.result, run.error
        return observed

    def _tried(self, function: Callable[..., Any], args: Any, kwargs: Any, fill: _Fill | None, observed: bool) -> _Run:
        """Runs a function in the regions. Without a fill, its tensors are fake. Raises _NoTensorError."""
        spelled = {id(operand): text for operand, text in self._spelled}
        run = _Run(self._stands_in)
        mode: Any = contextlib.nullcontext()
        if fill is None:
            mode = FakeTensorMode()
            mode.cache_enabled = False  # the cache makes tensors by ops that the call does not run

        def tensor(operand: Operand) -> torch.Tensor:
            if fill is None:
                made = torch.empty(operand.shape, dtype=operand.dtype, device=self._device)
            else:  # more dtypes can be converted to than filled
                made = fill(operand.shape, dtype=torch.uint8, device=self._device).to(operand.dtype)
            if id(operand) in spelled:
                run.names[id(made)] = spelled[id(operand)]
            run.operands.append(made)
            return made

        with self._region():
            try:
                with mode:
                    tensors, tensor_kwargs = _replaced((args, kwargs), tensor)
            except RuntimeError as error:
                raise _NoTensorError(
                    f"no tensors for {function.__name__} can be made here: {_one_line(error)}"
                ) from None
            try:
                with observe_dispatch(run) if observed else contextlib.nullcontext(), mode:
                    result = function(*tensors, **tensor_kwargs)
            except Exception as error:  # what PyTorch raises for the call, or its fake tensors alone
                run.error = error
            else:
                run.result = tree_map_only(
                    torch.Tensor, lambda tensor: Operand(tensor.dtype, tuple(map(int, tensor.shape))), result
                )
        return run


def _says_nothing(error: Exception | None, stands_in: bool) -> bool:
    """Whether an error is one of values or of memory, or of the CPU that stands in for another device type."""
    if type(error).__name__ == "_LinAlgError":
        return True
    ours = "|not implemented for '" if stands_in else ""
    return re.search(rf"Could not run '|can't allocate memory|out of memory{ours}", str(error)) is not None


def _identities(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    if len(shape) < 2:
        return torch.ones(shape, **options)
    return torch.eye(*shape[-2:], **options).expand(shape).contiguous()


def _by_reference(call: CheckedCall, result: Any) -> Any:
    """The result of a call on fake tensors, with the dtypes of the reference: fake tensors have others in places."""
    operands = [leaf for leaf in tree_leaves(result, is_leaf=_is_operand) if _is_operand(leaf)]
    if call.expected is None or [operand.dtype for operand in operands] != call.returned:
        return result
    dtypes = iter(call.expected)
    return _replaced(result, lambda operand: operand._replace(dtype=next(dtypes)))


@dataclass(slots=True)
class _StepWriter:
    """Writes the steps of the ops that one operator or function calls."""

    rule: PromotionRule
    steps: list[str]  # those so far, to which it adds
    names: Mapping[int, str]  # the tensors as the expression spells them, by `id`
    symbol: str  # of Python, that calls the op; "" for a function, or for an operator that calls several ops
    error: Exception | None  # why PyTorch or the rule refuses the call
    is_real: bool  # whether the tensors were real

    def write(self, call: CheckedCall) -> None:
        """Writes the steps of a call."""
        plan = call.plan
        if facts_of(call.op).is_cast and call.results is not None:
            self.steps.append(f"{self._spell(call.args[0])} is cast to {_dtypes(call.results)}.")
            return
        if plan is not None and plan.policy is not None:
            arguments = tensor_arguments(call.op, call.args)
            spelled = {path: self.names[id(t)] for path, t in arguments if id(t) in self.names}
            self.steps.append(explain_plan(call.name, plan, call.overridden, spelled))
            again = next((inner for inner in call.inner if inner.name == plan.runs), None)
            if again is not None:
                self.write(again)
            elif call.results is not None:
                self._without_autocast(call)
            return
        if plan is not None and not call.is_view and (plan.left_to_stock or not call.is_composite):
            own = "PyTorch's own kernel for the op decides."
            what = own if plan.left_to_stock else "It runs in the dtypes of its operands."
            self.steps.append(f"Autocast has no policy for {call.name}. {what}")
        self._without_autocast(call)

    def _without_autocast(self, call: CheckedCall) -> None:
        """Writes how the op arrives at its result's dtype, without autocast's casts."""
        inference, inner = call.inference, list(call.inside())
        casts_inside = any(one.has_policy for one in inner)
        if call.error is not None:
            with contextlib.suppress(ShapeError):
                self._promotion(call, ())
            if self.is_real and call.results is not None:
                self.steps.append(f"{call.error} {_WRONG}")
            elif call.error != str(self.error):
                self.steps.append(call.error)
        elif isinstance(inference, Inference) and not casts_inside:
            self._by_rule(call, inference)
        elif inner and (call.is_composite or casts_inside):
            called = dict.fromkeys(one.name for one in inner)
            self.steps.append(f"{call.name} is a composite op: it calls {listed(list(called))}.")
            for one in inner:
                self.write(one)
        elif call.results is not None:
            who = "The registered fake of" if has_fake(call.op) else "The reference has no rule:"
            self.steps.append(f"{who} {call.name} returns {_dtypes(tensors_in(call.results))}.")

    def _by_rule(self, call: CheckedCall, inference: Inference) -> None:
        if not self._promotion(call, inference.dtypes):
            spelled = [self._spell(tensor) for tensor in tensors_in(call.args)]
            values = dict(zip(facts_of(call.op).arguments, call.args, strict=False))
            dtype_given = isinstance(values.get("dtype"), torch.dtype)
            self.steps.append(explain_inference(call.name, inference, spelled, self.rule.default_dtype, dtype_given))
        if self.is_real and call.results is not None and call.returned != call.expected:
            self.steps.append(
                f"PyTorch itself returns {_dtypes(call.returned)}: the reference is wrong here. Report it."
            )

    def _promotion(self, call: CheckedCall, results: Sequence[torch.dtype | None]) -> bool:
        """Writes the steps of an op that promotes its operands. Returns False for another op."""
        values = dict(zip(facts_of(call.op).arguments, call.args, strict=False))
        found = operands_of(call.op, values)
        if found is None or found.in_step or found.is_product:
            return False
        operands = [
            (self._spell(value), described(value) if isinstance(value, torch.Tensor) else value)
            for argument in found.names
            for value in tree_leaves(values[argument])
            if isinstance(value, torch.Tensor | bool | int | float | complex)
        ]
        if not operands:
            return False
        refused = self.error is not None
        rule = call.rule or promotion_rule("torch", self.rule.default_dtype)
        try:
            for step in explain_promotion(
                call.name, operands, results, rule, divides=found.divides, symbol=self.symbol, refused=refused
            ):
                self.steps.append(step)
        except (PromotionError, PromotionRuleError) as error:
            if call.results is not None and call.error is None:
                self.steps.append(f"{error} {_WRONG}")
        return True

    def _spell(self, operand: Any) -> str:
        if not isinstance(operand, torch.Tensor):
            return str(operand)
        return self.names.get(id(operand)) or f"{dtype_name(operand.dtype)}[{', '.join(map(str, operand.shape))}]"


def _dtypes(found: Sequence[Any]) -> str:
    return listed([dtype_name(getattr(one, "dtype", one)) for one in found if one is not None]) or "no tensor"


def _with_list(spelled: str, function: Callable[..., Any], args: list[Any]) -> list[Any]:
    """Makes `cat(x, y)` `cat([x, y])`. Functions in Python, such as `block_diag`, take tensors one by one."""
    name = spelled.rpartition(".")[2]
    tensors = [arg for arg in args if isinstance(arg, Operand)]
    packet = getattr(torch.ops.aten, name, None)
    if not tensors or args[: len(tensors)] != tensors or packet is None or isinstance(function, types.FunctionType):
        return args
    first = {str(getattr(packet, overload)._schema.arguments[0].real_type) for overload in packet.overloads()}
    return [tensors, *args[len(tensors) :]] if first == {"List[Tensor]"} else args


def _replaced(value: Any, make: Callable[[Operand], Any]) -> Any:
    """A value with another object for each `Operand` in it."""
    return tree_map_only(Operand, make, value, is_leaf=_is_operand)


def _is_operand(value: Any) -> bool:
    return isinstance(value, Operand)


def _one_line(error: Exception) -> str:
    """An error of PyTorch as a sentence."""
    text = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    text = text.partition(" - got")[0] if "invalid combination of arguments" in text else text
    return f"{text.rstrip('. ')}."
