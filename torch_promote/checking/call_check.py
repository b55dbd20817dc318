"""One call of an op against the reference: what its results have to be, with autocast's casts taken into account."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_promote.checking.promotion_check import promoted_values
from torch_promote.dispatch_keys import AUTOCAST_KEY
from torch_promote.errors import PromotionRuleError
from torch_promote.policy.op_table import LEFT_TO_STOCK, TABLE_VERSION
from torch_promote.reference import Operand, PromotionError
from torch_promote.reference.autocast.arguments import replace_tensors
from torch_promote.reference.autocast.arguments import tensors_in as tensors_by_path
from torch_promote.reference.autocast.plan import AutocastPlan, AutocastState, autocast_plan
from torch_promote.reference.elementwise.strides import temporary_strides
from torch_promote.reference.ops.call import described
from torch_promote.reference.ops.infer import NO_RULE, Inference, NoRule, infer

__all__ = [
    "Expectation",
    "Finding",
    "expect",
    "find_overload",
    "has_our_kernel",
    "is_composite",
    "overload_name",
    "tensor_arguments",
    "tensors_in",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a call has that it should not.

    Attributes:
        kind: "dtype", "shape", "strides", "casts", "bits", "error" or "row".
        expected: What it should be.
        got: What it is.
    """

    kind: str
    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the reference expects of a call, said before the call is made.

    Attributes:
        op: The overload that is called.
        plan: What autocast does with it; None where autocast is off.
        inference: What its results are like; NO_RULE where no rule covers it.
        error: Why the reference expects it to raise; None where it does not.
        arguments: The dtype in which the op that runs gets each tensor, by the argument's name.
        row_is_missing: Whether PyTorch's autocast has a kernel for the op and the op table should have a row, and has
            none.
    """

    op: torch._ops.OpOverload
    plan: AutocastPlan | None
    inference: Inference | NoRule | None
    error: str | None
    arguments: Mapping[str, torch.dtype]
    row_is_missing: bool = False

    @property
    def has_policy(self) -> bool:
        """Whether a cast policy applies to the call."""
        return self.plan is not None and self.plan.policy is not None

    def check(self, results: Sequence[Any]) -> Finding | None:
        """Compares the results with what is expected.

        Args:
            results: The call's results, in the schema's order.

        Returns:
            The first thing that differs; None if nothing does, or if there is no rule.
        """
        if self.row_is_missing:
            return Finding(
                "row", "a row with a policy in the op table", "a kernel of PyTorch's autocast, and no policy"
            )
        if self.error is not None:
            return Finding("error", f"an error: {self.error}", "a result")
        if not isinstance(self.inference, Inference):
            return None
        tensors = list(_leaves(results))
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
        """Compares the arguments with which autocast calls the op on with the plan.

        Args:
            args: All arguments of the call that autocast makes, in the schema's order.

        Returns:
            What differs; None if nothing does.
        """
        assert self.plan is not None
        runs = find_overload(self.plan.runs)
        got = {path: tensor.dtype for path, tensor in tensor_arguments(runs, args)}
        if got == self.arguments:
            return None
        wrong = [path for path in self.arguments if got.get(path) is not self.arguments[path]]
        wrong += [path for path in got if path not in self.arguments]
        return Finding("casts", _dtypes_of(self.arguments, wrong), _dtypes_of(got, wrong))


def expect(op: torch._ops.OpOverload, args: Sequence[Any], state: AutocastState | None) -> Expectation:
    """Asks the reference about a call, before it is made.

    Args:
        op: The overload.
        args: All its arguments, in the schema's order.
        state: Autocast's state; None for autocast that is off.

    Returns:
        What to expect.

    Example:
        >>> args = [torch.ones(2, 2), torch.ones(2, 2)]
        >>> expectation = expect(torch.ops.aten.mm.default, args, AutocastState.region("cpu"))
        >>> expectation.inference.dtypes, expectation.check([torch.ones(2, 2)])
        ((torch.bfloat16,), Finding(kind='dtype', expected='bfloat16', got='float32'))
    """
    planned = {path: tensor.dtype for path, tensor in tensor_arguments(op, args)}
    nested = any(tensor.is_nested for _, tensor in tensor_arguments(op, args))
    plan = None
    runs, values = op, dict(zip(_argument_names(op), args, strict=False))
    if state is not None:
        plan = autocast_plan(op, args, {}, state)
        if plan.error is not None:
            return Expectation(op, plan, None, plan.error, planned)
        for cast in plan.all_casts():
            planned[cast.argument] = cast.to
        if not nested:
            values = _cast_values(plan, values)
        last = plan
        while last.then is not None:
            last = last.then
        runs = find_overload(last.runs)
        values |= plan.dtype_arguments
    if plan is not None and plan.left_to_stock:
        return Expectation(op, plan, NO_RULE, None, planned, _should_have_a_row(overload_name(op)))
    if nested:
        return Expectation(op, plan, NO_RULE, None, planned)
    try:
        values = dict(promoted_values(runs, values))
        return Expectation(op, plan, infer(runs, (), values), None, planned)
    except (PromotionError, PromotionRuleError) as error:
        return Expectation(op, plan, None, str(error), planned)


def _should_have_a_row(name: str) -> bool:
    """Whether the table speaks of the running PyTorch, and the op is PyTorch's own."""
    same_release = torch.__version__.startswith(f"{TABLE_VERSION}.")
    return same_release and name.startswith("aten::") and name not in LEFT_TO_STOCK


def _cast_values(plan: AutocastPlan, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, with descriptions of the cast tensors in the tensors' places."""
    by_path = {path: tensor for name, value in values.items() for path, tensor in tensors_by_path(name, value)}
    made: dict[str, Operand] = {}
    for cast in plan.all_casts():
        source = described(made.get(cast.argument, by_path[cast.argument]))
        strides = None if source.strides is None else temporary_strides(source.shape, source.strides)
        made[cast.argument] = Operand(cast.to, source.shape, strides, source.device)
    return {name: replace_tensors(name, value, made) for name, value in values.items()}


def tensor_arguments(op: torch._ops.OpOverload, args: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors among a call's arguments, by their paths: `mat2`, `tensors[1]`, `inputs[key]`.

    Example:
        >>> [name for name, _ in tensor_arguments(torch.ops.aten.cat.default, [[torch.ones(1), torch.ones(1)], 0])]
        ['tensors[0]', 'tensors[1]']
    """
    for name, value in zip(_argument_names(op), args, strict=False):
        yield from tensors_by_path(name, value)


@functools.cache
def _argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


@functools.cache
def overload_name(op: torch._ops.OpOverload) -> str:
    """Returns an overload's name as the dispatcher spells it: `aten::add.Tensor`, `aten::mm`.

    Example:
        >>> overload_name(torch.ops.aten.mm.default)
        'aten::mm'
    """
    schema = op._schema
    return schema.name + (f".{schema.overload_name}" if schema.overload_name else "")


@functools.cache
def find_overload(name: str) -> torch._ops.OpOverload:
    """Returns the overload of a name as the dispatcher spells it.

    Example:
        >>> find_overload("aten::softmax.int")
        <OpOverload(op='aten.softmax', overload='int')>
    """
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")
    assert isinstance(found, torch._ops.OpOverload), name
    return found


@functools.cache
def is_composite(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether an op has no kernel of its own for a device type, but is made of others that are dispatched in turn.

    Example:
        >>> is_composite(torch.ops.aten.linear.default, "cpu"), is_composite(torch.ops.aten.mm.default, "cpu")
        (True, False)
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = overload_name(op)
    own = torch._C._dispatch_key_for_device(device_type)
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, own)


def has_our_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether calls of an op pass through a wrapper of ours, whatever its policy. Asked anew: a library may add one.

    Example:
        >>> has_our_kernel(torch.ops.aten.mm.default)
        True
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload_name(op), AUTOCAST_KEY))


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments or the results of a call, those in containers too.

    Example:
        >>> len(tensors_in([torch.ones(1), [torch.ones(1), None], 2]))
        2
    """
    return [leaf for leaf in _leaves(values) if leaf is not None]


def _leaves(values: Sequence[Any]) -> Iterator[torch.Tensor | None]:
    """Tensors and None, containers flattened."""
    for value in values:
        if value is None or isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _leaves(value)
        elif isinstance(value, Mapping):
            yield from _leaves(tuple(value.values()))


def _names(dtypes: Sequence[torch.dtype | None]) -> str:
    return ", ".join("none" if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes) or "no tensors"


def _dtypes_of(dtypes: Mapping[str, torch.dtype], paths: Sequence[str]) -> str:
    return ", ".join(f"{path} in {_names([dtypes[path]])}" if path in dtypes else f"no {path}" for path in paths)
