"""The steps of `why` for the ops that a call dispatches: casts of autocast, promotion, the dtype of the result."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_promote.checking.expected_promotion import operands_of
from torch_promote.checking.registered_fake import has_fake
from torch_promote.checking.seen_calls import SeenCall, is_cast, is_composite_call, is_view, worth_a_step
from torch_promote.observe.ops import argument_names, overload_name, tensors_in
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference import Inference, Operand, PromotionRule
from torch_promote.reference.autocast import AutocastPlan
from torch_promote.reference.autocast import tensors_in as tensors_by_path
from torch_promote.reference.derivation.overflow import overflow_of_number, overflow_of_tensor
from torch_promote.reference.derivation.states_in_words import describe, promotion_steps
from torch_promote.reference.dtypes import dtype_name, is_integral
from torch_promote.reference.ops.dtype_rules import DTYPE_RULES
from torch_promote.reference.ops.elementwise_rules import ELEMENTWISE_RULES
from torch_promote.reference.promotion import Number
from torch_promote.reference.tensor_iterator import wrap_number

__all__ = ["CallWriter"]

#: What a rule says, for those whose docstrings do not say it in a sentence about one call.
_RULES = {
    "same": "",
    "unary": "It keeps the dtype of its operand.",
    "unary_float": "Integers and bools become the default dtype, {default}.",
    "like": "It keeps the dtype of its operand.",
    "each": "Each result is that of the op on one element of each list.",
    "one_dtype": "It takes operands of one dtype, and keeps it.",
    "modulus": "The modulus of a complex number is real.",
    "softmax": "It keeps the dtype, unless half_to_float is set.",
    "written": "An op that writes to a tensor keeps the tensor's dtype.",
}


@dataclass(slots=True)
class CallWriter:
    """Writes the steps of calls.

    Attributes:
        rule: The promotion rule.
        default_dtype: The dtype of Python floats.
        names: The tensors as the expression spells them, by `id`.
        steps: The steps so far, to which it adds.
        raises: Whether PyTorch refuses the call, so that no value overflows.
    """

    rule: PromotionRule
    default_dtype: torch.dtype
    names: Mapping[int, str]
    steps: list[str]
    raises: bool = False

    def write_all(self, calls: Sequence[SeenCall]) -> None:
        """Writes the steps of the calls that a function makes, without views among them.

        Args:
            calls: The calls.
        """
        for call in [call for call in calls if not is_view(call.op)] or calls:
            self.write(call, self.names)

    def write(self, call: SeenCall, names: Mapping[int, str]) -> None:
        """Writes the steps of a call.

        Args:
            call: The call.
            names: The tensors as the expression spells them, by `id`.
        """
        plan = None if call.expectation is None else call.expectation.plan
        name = overload_name(call.op)
        if is_cast(call.op) and call.results is not None:
            self.steps.append(f"{self._spell(call.args[0], names)} is cast to {_dtypes(call.results)}.")
            return
        if plan is not None and plan.policy is not None:
            self._autocast(call, plan, names)
            again = next((inner for inner in call.inner if overload_name(inner.op) == plan.runs), None)
            if again is not None:
                self.write(again, _carried(call, again, names))
            elif call.results is not None:
                self._plain(call, names)
            return
        if plan is not None and not is_view(call.op) and (plan.left_to_stock or not is_composite_call(call)):
            left = "PyTorch's own kernel for the op decides." if plan.left_to_stock else ""
            self.steps.append(f"Autocast has no policy for {name}. {left or 'It runs in the dtypes of its operands.'}")
        self._plain(call, names)

    def _autocast(self, call: SeenCall, plan: AutocastPlan, names: Mapping[int, str]) -> None:
        assert call.state is not None
        assert plan.device is not None
        assert plan.policy is not None
        name = overload_name(call.op)
        policy = plan.policy.value if isinstance(plan.policy, CastPolicy) else f"to run in {dtype_name(plan.policy)}"
        overridden = call.state.override(name, plan.device) is not None
        start = f"Autocast has the policy {policy} for {name}{' (an override)' if overridden else ''}"
        by_path = {
            path: tensor
            for argument, value in zip(argument_names(call.op), call.args, strict=False)
            for path, tensor in tensors_by_path(argument, value)
        }
        casts: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
        for cast in plan.all_casts():
            tensor = by_path[cast.argument]
            spelled = names.get(id(tensor))
            casts.setdefault((cast.from_, cast.to), []).append(
                cast.argument if spelled is None else f"{cast.argument} ({spelled})"
            )
        texts = [
            f"{_listed(paths)} {'are' if paths[1:] else 'is'} cast from {dtype_name(from_)} to {dtype_name(to)}"
            for (from_, to), paths in casts.items()
        ]
        texts += [f"it is called with {key}={dtype_name(value)}" for key, value in plan.dtype_arguments.items()]
        if plan.error is not None:
            texts = ["it must not be called"]
        elif not texts and plan.policy is CastPolicy.keep:
            texts = ["it runs as it is, with autocast off"]
        elif not texts and plan.policy is CastPolicy.fp32_set_opt_dtype:
            texts = ["its dtype argument is given, or its first operand is not cast, so nothing changes"]
        elif not texts:
            texts = ["no operand needs a cast"]
        self.steps.append(f"{start}: {'; '.join(texts)}.")

    def _plain(self, call: SeenCall, names: Mapping[int, str]) -> None:
        """Writes how the op arrives at its result's dtype, without autocast's casts."""
        name = overload_name(call.op)
        expectation = call.expectation
        inference = None if expectation is None else expectation.inference
        if expectation is not None and expectation.error is not None:
            self.steps.append(expectation.error)
            return
        inner = list(worth_a_step(call.inner))
        casts_inside = any(one.expectation is not None and one.expectation.has_policy for one in inner)
        if isinstance(inference, Inference) and not casts_inside:
            self._by_rule(call, inference, names)
            returned = [tensor.dtype for tensor in tensors_in(call.results or ())]
            if call.results is not None and returned != [dtype for dtype in inference.dtypes if dtype is not None]:
                self.steps.append(
                    f"PyTorch itself returns {_dtypes(returned)}: the reference is wrong here. Report it."
                )
            return
        if inner and (is_composite_call(call) or casts_inside):
            called = list(dict.fromkeys(overload_name(one.op) for one in inner))
            self.steps.append(f"{name} is a composite op: it calls {_listed(called)}.")
            for one in inner:
                self.write(one, names)
            return
        if call.results is None:
            return
        dtypes = _dtypes(tensors_in(call.results))
        if has_fake(call.op):  # it ran: the operands are fake tensors
            self.steps.append(f"The registered fake of {name} returns {dtypes}.")
        elif not (call.inner or is_composite_call(call)):
            self.steps.append(f"The reference has no rule for {name}. PyTorch returns {dtypes}.")
        else:
            self.steps.append(f"{name} returns {dtypes}.")

    def _by_rule(self, call: SeenCall, inference: Inference, names: Mapping[int, str]) -> None:
        name = overload_name(call.op)
        values = dict(zip(argument_names(call.op), call.args, strict=False))
        found = operands_of(call.op, values)
        if found is None or found.in_step or found.is_product:
            self._sentence(call, inference, names)
            return
        operands = [
            operand
            for argument in found.names
            for operand in _elements(values[argument])
            if isinstance(operand, torch.Tensor | bool | int | float | complex)
        ]
        aside = [
            f"{argument} ({self._spell(tensor, names)})"
            for argument, value in values.items()
            if argument not in found.names
            for tensor in _elements(value)
            if isinstance(tensor, torch.Tensor)
        ]
        if aside:
            self.steps.append(f"{_listed(aside)} {'take' if aside[1:] else 'takes'} no part in the promotion.")
        sides = [_side(operand) for operand in operands]
        if self.rule.name == "torch":
            computed = self._states(operands, sides, names)
        else:
            computed = self.rule.common(sides, name)
            spelled = _listed([self._spell(operand, names) for operand in operands])
            self.steps.append(f"The rule {self.rule.name} has {dtype_name(computed)} for {spelled}.")
        if found.divides and is_integral(computed, include_bool=True):
            floating = self.rule.common(sides, name, floats=True) if self.rule.name != "torch" else self.default_dtype
            self.steps.append(
                f"{name} does not compute in {dtype_name(computed)}: integral dtypes become "
                f"{'the default dtype, ' if self.rule.name == 'torch' else ''}{dtype_name(floating)}."
            )
            computed = floating
        compares = inference.dtypes == (torch.bool,) and computed is not torch.bool
        step = f"{name} computes in {dtype_name(computed)} and returns {_dtypes(inference.dtypes)}."
        dims = any(side.shape for side in sides)
        op = name.partition("::")[2].partition(".")[0]
        for operand, side in zip(operands, sides, strict=True) if not self.raises else ():
            if not isinstance(operand, torch.Tensor):
                step += overflow_of_number(operand, computed, op, compares)
            elif dims and not side.shape:
                step += overflow_of_tensor(self._spell(operand, names), side.dtype, computed, op, compares)
        self.steps.append(step)

    def _states(self, operands: Sequence[Any], sides: Sequence[Operand], names: Mapping[int, str]) -> torch.dtype:
        if len(sides) == 1:
            return sides[0].dtype
        for operand, side in zip(operands, sides, strict=True):
            number = None if isinstance(operand, torch.Tensor) else operand
            self.steps.append(describe(self._spell(operand, names), side, number, self.default_dtype))
        computed, steps = promotion_steps(sides, self.default_dtype)
        self.steps += steps
        return computed

    def _sentence(self, call: SeenCall, inference: Inference, names: Mapping[int, str]) -> None:
        """Writes the step of an op whose rule is not a promotion, in the words of the rule's docstring."""
        name = overload_name(call.op)
        values = dict(zip(argument_names(call.op), call.args, strict=False))
        rule = re.split(r"\W", inference.rule)[0]
        if isinstance(values.get("dtype"), torch.dtype):
            reason = "Its dtype argument says so."
        elif rule in _RULES:
            reason = _RULES[rule].format(default=dtype_name(self.default_dtype))
        else:
            function = DTYPE_RULES.get(rule) or ELEMENTWISE_RULES.get(rule)
            reason = "" if isinstance(function, functools.partial) else (function.__doc__ or "").partition("\n")[0]
        operands = [self._spell(tensor, names) for tensor in tensors_in(call.args)]
        start = f"{name} of {_listed(operands)}" if operands else name
        self.steps.append(f"{start} returns {_dtypes(inference.dtypes)}.{f' {reason}' if reason else ''}")

    def _spell(self, operand: Any, names: Mapping[int, str]) -> str:
        if not isinstance(operand, torch.Tensor):
            return str(operand)
        found = names.get(id(operand))
        return found or f"{dtype_name(operand.dtype)}[{', '.join(map(str, operand.shape))}]"


def _side(operand: torch.Tensor | Number) -> Operand:
    if isinstance(operand, torch.Tensor):
        return Operand(operand.dtype, tuple(operand.shape))
    return wrap_number(operand)


def _carried(call: SeenCall, again: SeenCall, names: Mapping[int, str]) -> dict[int, str]:
    """The names of the tensors of a call that autocast makes: those of the tensors that it cast."""
    carried = dict(names)
    for before, after in zip(call.args, again.args, strict=False):
        for old, new in zip(_elements(before), _elements(after), strict=False):
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and id(old) in names:
                cast = "" if old.dtype is new.dtype else f" in {dtype_name(new.dtype)}"
                carried[id(new)] = f"{names[id(old)]}{cast}"
    return carried


def _elements(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _dtypes(found: Sequence[Any]) -> str:
    names = [dtype_name(getattr(one, "dtype", one)) for one in found if one is not None]
    return _listed(names) if names else "no tensor"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0] if names else ""
