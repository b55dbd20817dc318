"""What the reference expects of one call of an op, autocast's casts included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_promote.checking.expected_promotion import dtype_if_product, promoted_values
from torch_promote.checking.registered_fake import FakeResults, has_fake, results_of_fake
from torch_promote.errors import PromotionRuleError
from torch_promote.observe.ops import argument_names, find_overload, leaves, overload_name, tensor_arguments
from torch_promote.policy.op_table import LEFT_TO_STOCK, TABLE_VERSION
from torch_promote.reference import Operand, PromotionError
from torch_promote.reference.autocast import AutocastPlan, AutocastState, autocast_plan, replace_tensors
from torch_promote.reference.autocast import tensors_in as tensors_by_path
from torch_promote.reference.ops.call import described
from torch_promote.reference.ops.infer import NO_RULE, Inference, NoRule, infer
from torch_promote.reference.strides import temporary_strides

__all__ = ["Expectation", "Finding", "expect"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which a call differs from what was expected.

    Attributes:
        kind: "dtype", "shape", "strides", "casts", "bits", "error" or "row".
        expected: The expected value, in words.
        got: The actual value, in words.
    """

    kind: str
    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the reference expects of a call, computed before the call runs.

    Attributes:
        op: The overload that is called.
        plan: What autocast does with the call; None where autocast is off.
        inference: Dtypes, shape and strides of the results; NO_RULE if no rule covers the op.
        error: Why the call should raise; None if it should not.
        arguments: The dtype of each tensor that the op receives after autocast's casts, by argument path.
        if_product: The dtype that the tensors may have instead, all of them: that of the promotion rule in force, if
            the op is a matrix product for which the reference has no rule.
        row_is_missing: Whether PyTorch's autocast has a kernel for the op, while the op table has no row for it.
        fake: What the op's registered fake gives, for a custom op that has one.
    """

    op: torch._ops.OpOverload
    plan: AutocastPlan | None
    inference: Inference | NoRule | None
    error: str | None
    arguments: Mapping[str, torch.dtype]
    row_is_missing: bool = False
    if_product: torch.dtype | None = None
    fake: FakeResults | None = None

    @property
    def has_policy(self) -> bool:
        """Whether a cast policy applies to the call."""
        return self.plan is not None and self.plan.policy is not None

    def check(self, results: Sequence[Any]) -> Finding | None:
        """Compares the results with the expectation.

        Args:
            results: The call's results, in the schema's order.

        Returns:
            The first difference; None if there is none, or if no rule covers the op.
        """
        if self.row_is_missing:
            return Finding(
                "row", "a row with a policy in the op table", "a kernel of PyTorch's autocast, and no policy"
            )
        if self.error is not None:
            return Finding("error", f"an error: {self.error}", "a result")
        if not isinstance(self.inference, Inference):
            difference = None if self.fake is None else self.fake.difference(results)
            return None if difference is None else Finding(*difference)
        tensors = list(leaves(results))
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        if self.inference.dtypes != dtypes:
            return Finding("dtype", _names(self.inference.dtypes), _names(dtypes))
        first = tensors[0] if tensors else None
        if first is None:
            return None
        shape, strides = self.inference.shape, self.inference.strides
        if shape is not None and shape != tuple(first.shape):
            return Finding("shape", str(list(shape)), str(list(first.shape)))
        if strides is not None and strides != first.stride():
            return Finding("strides", str(strides), str(first.stride()))
        return None

    def check_casts(self, args: Sequence[Any]) -> Finding | None:
        """Compares the arguments that the op receives from autocast with the plan.

        Args:
            args: All arguments of the call that autocast makes, in the schema's order.

        Returns:
            The difference; None if there is none.
        """
        assert self.plan is not None
        runs = find_overload(self.plan.runs)
        got = {path: tensor.dtype for path, tensor in tensor_arguments(runs, args)}
        if got == self.arguments or (got and set(got.values()) == {self.if_product}):
            return None
        wrong = [path for path in self.arguments if got.get(path) is not self.arguments[path]]
        wrong += [path for path in got if path not in self.arguments]
        return Finding("casts", _dtypes_of(self.arguments, wrong), _dtypes_of(got, wrong))


def expect(op: torch._ops.OpOverload, args: Sequence[Any], state: AutocastState | None) -> Expectation:
    """Asks the reference what a call should do. Call it before the op runs: ops may change their arguments.

    Args:
        op: The overload.
        args: All its arguments, in the schema's order.
        state: The autocast state; None if autocast is off.

    Returns:
        The expectation.

    Example:
        >>> args = [torch.ones(2, 2), torch.ones(2, 2)]
        >>> expectation = expect(torch.ops.aten.mm.default, args, AutocastState.region("cpu"))
        >>> expectation.inference.dtypes, expectation.check([torch.ones(2, 2)])
        ((torch.bfloat16,), Finding(kind='dtype', expected='bfloat16', got='float32'))
    """
    planned = {path: tensor.dtype for path, tensor in tensor_arguments(op, args)}
    nested = any(tensor.is_nested for _, tensor in tensor_arguments(op, args))
    plan = None
    runs, values = op, dict(zip(argument_names(op), args, strict=False))
    if state is not None:
        plan = autocast_plan(op, args, {}, state)
        if plan.error is not None:
            return Expectation(op, plan, None, plan.error, planned)
        for cast in plan.all_casts():
            planned[cast.argument] = cast.to
        if not nested:
            values = _cast_values(plan, values)
        runs = find_overload((plan.then or plan).runs)
        values |= plan.dtype_arguments
    if plan is not None and plan.left_to_stock:
        return Expectation(op, plan, NO_RULE, None, planned, _should_have_a_row(overload_name(op)))
    if nested:
        return Expectation(op, plan, NO_RULE, None, planned)
    try:
        values = dict(promoted_values(runs, values))
        if_product = dtype_if_product(runs, planned.values())
        planned |= _dtypes_of_operands(values)
        inference = infer(runs, (), values)
        fake = results_of_fake(runs, values) if isinstance(inference, NoRule) and has_fake(runs) else None
        return Expectation(op, plan, inference, None, planned, if_product=if_product, fake=fake)
    except (PromotionError, PromotionRuleError) as error:
        return Expectation(op, plan, None, str(error), planned)


def _should_have_a_row(name: str) -> bool:
    """Whether the op table describes the running PyTorch, and the op is PyTorch's own."""
    same_release = torch.__version__.startswith(f"{TABLE_VERSION}.")
    return same_release and name.startswith("aten::") and name not in LEFT_TO_STOCK


def _cast_values(plan: AutocastPlan, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by name, each cast tensor replaced by an `Operand` that describes its cast."""
    by_path = {path: tensor for name, value in values.items() for path, tensor in tensors_by_path(name, value)}
    made: dict[str, Operand] = {}
    for cast in plan.all_casts():
        source = described(made.get(cast.argument, by_path[cast.argument]))
        strides = None if source.strides is None else temporary_strides(source.shape, source.strides)
        made[cast.argument] = Operand(cast.to, source.shape, strides, source.device)
    return {name: replace_tensors(name, value, made) for name, value in values.items()}


def _dtypes_of_operands(values: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Returns the dtypes of the casts that autocast and the promotion rule make, by argument path."""
    found = {}
    for name, value in values.items():
        if isinstance(value, Operand):  # a NamedTuple, which is a tuple too
            found[name] = value.dtype
        elif isinstance(value, list | tuple):
            found |= {f"{name}[{i}]": one.dtype for i, one in enumerate(value) if isinstance(one, Operand)}
    return found


def _names(dtypes: Sequence[torch.dtype | None]) -> str:
    return ", ".join("none" if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes) or "no tensors"


def _dtypes_of(dtypes: Mapping[str, torch.dtype], paths: Sequence[str]) -> str:
    return ", ".join(f"{path} in {_names([dtypes[path]])}" if path in dtypes else f"no {path}" for path in paths)
