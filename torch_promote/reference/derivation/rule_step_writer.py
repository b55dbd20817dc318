"""The steps of a derivation by a promotion rule other than PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torch_promote.reference.derivation.operators import OPERATORS
from torch_promote.reference.derivation.step_writer import StepWriter
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion import Number, Operand
from torch_promote.reference.promotion_rules import PromotionRule
from torch_promote.reference.promotion_rules.rule import number_type
from torch_promote.reference.tensor_iterator import infer_elementwise, wrap_number

__all__ = ["RuleStepWriter"]


@dataclass(slots=True)
class RuleStepWriter(StepWriter):
    """Writes the steps by a promotion rule: the rule gives the common dtype, and the operands are cast to it.

    Attributes:
        rule: The rule.

    Example:
        >>> from torch_promote.reference.derivation.derivation import why
        >>> print(why("int32[3] + float32[]", rule="numpy"))
        int32[3] + float32[], by the rule numpy
        1. int32[3] is a tensor of int32.
        2. float32[] is a 0-dim tensor of float32, which counts like any other tensor.
        3. NumPy's table has float64 for int32 with float32.
        4. int32[3] and float32[] are cast to float64.
        5. + computes in float64 and returns float64.
        Result: float64 of shape [3]
    """

    rule: PromotionRule = field(kw_only=True)

    def operate(self, symbol: str, names: list[str], values: tuple[Operand | Number, Operand | Number]) -> Operand:
        """Writes the steps of an operator on two operands.

        Args:
            symbol: The operator.
            names: The operands as the expression spells them.
            values: The operands.

        Raises:
            PromotionRuleError: The operands have no common dtype under the rule.
            PromotionError: PyTorch refuses the operator on the operands.

        Example:
            >>> writer = RuleStepWriter(torch.float32, rule=PromotionRule("mine", {}, {}, {}))
            >>> writer.operate("+", ["int8[3]", "2"], (Operand(torch.int8, (3,)), 2)).dtype
            torch.int8
        """
        self.steps += [self._describe(name, value) for name, value in zip(names, values, strict=True)]
        common = self._common(symbol, values)
        tensors = {name: value for name, value in zip(names, values, strict=True) if isinstance(value, Operand)}
        cast = [name for name, tensor in tensors.items() if tensor.dtype is not common]
        if cast:
            self.steps.append(f"{' and '.join(cast)} {'are' if cast[1:] else 'is'} cast to {dtype_name(common)}.")
        sides = [v._replace(dtype=common) if isinstance(v, Operand) else wrap_number(v) for v in values]
        result = infer_elementwise(*sides, preset=OPERATORS[symbol].preset, default_dtype=self.default_dtype)
        given = tuple(value if isinstance(value, Operand) else wrap_number(value) for value in values)
        numbers = tuple(None if isinstance(value, Operand) else value for value in values)
        self.compute(symbol, given, numbers, result, names)
        return Operand(result.dtype, result.shape)

    def _common(self, symbol: str, values: tuple[Operand | Number, Operand | Number]) -> torch.dtype:
        """Writes the steps that lead to the dtype that the operator computes in."""
        op = OPERATORS[symbol].op
        common = self.rule.common(values, op)
        self.steps.append(self._promotion(values, common))
        if OPERATORS[symbol].preset != "binary_float":
            return common
        floating = self.rule.common(values, op, floats=True)
        if floating is not common:
            names = dtype_name(floating), dtype_name(common)
            self.steps.append(f"{symbol} computes in floating point, and the rule takes {names[0]} for {names[1]}.")
        return floating

    def reciprocal_dtype(self, tensor: Operand) -> tuple[torch.dtype, str]:
        """Returns the dtype of a tensor's reciprocal, and why it differs from the tensor's.

        Args:
            tensor: The tensor.

        Raises:
            PromotionRuleError: The rule has no floating dtype for the tensor's.

        Example:
            >>> writer = RuleStepWriter(torch.float32, rule=PromotionRule("mine", {}, {}, {}))
            >>> writer.reciprocal_dtype(Operand(torch.float16))
            (torch.float16, 'the rule takes float16 for float16 in floating point')
        """
        found = self.rule.common([tensor], "reciprocal", floats=True)
        return found, f"the rule takes {dtype_name(found)} for {dtype_name(tensor.dtype)} in floating point"

    def _describe(self, name: str, value: Operand | Number) -> str:
        if not isinstance(value, Operand):
            return f"{name} is a Python {type(value).__name__}: it is weak, so a tensor's dtype takes precedence."
        if value.shape:
            return f"{name} is a tensor of {dtype_name(value.dtype)}."
        how = (
            "is weaker than a tensor with dimensions" if self.rule.zero_dim_is_weak else "counts like any other tensor"
        )
        return f"{name} is a 0-dim tensor of {dtype_name(value.dtype)}, which {how}."

    def _promotion(self, values: tuple[Operand | Number, Operand | Number], common: torch.dtype) -> str:
        tensors = [value for value in values if isinstance(value, Operand)]
        if len(tensors) == 1:
            number = next(number_type(value) for value in values if not isinstance(value, Operand))
            assert number is not None
            return self.rule.words(number, tensors[0].dtype, common)
        a, b = tensors
        if a.dtype is b.dtype:
            return f"Both are {dtype_name(common)}: nothing is promoted."
        if self.rule.zero_dim_is_weak and bool(a.shape) is not bool(b.shape):
            strong, weak = (dtype_name(x.dtype) for x in ((a, b) if a.shape else (b, a)))
            return f"The rule has {dtype_name(common)} for {strong} with a weaker {weak}."
        return self.rule.words(a.dtype, b.dtype, common)
