"""The base class that evaluates an expression and writes the steps; a subclass knows the promotion rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from torch_promote.reference.derivation.expression import Binary, ExpressionError, Node, NumberTerm, TensorTerm
from torch_promote.reference.derivation.operators import OPERATORS, refuse, wrapped_value
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.elementwise.tensor_iterator import ElementwiseResult
from torch_promote.reference.promotion.states import Number, Operand

__all__ = ["StepWriter"]


@dataclass(slots=True)
class StepWriter(ABC):
    """Evaluates one expression, and writes a step for each thing that happens.

    Attributes:
        default_dtype: The dtype of Python floats.
        steps: The steps so far.

    Example:
        >>> StepWriter(torch.float32)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        TypeError: Can't instantiate abstract class StepWriter ...
    """

    default_dtype: torch.dtype
    steps: list[str] = field(default_factory=list)

    @abstractmethod
    def operate(self, symbol: str, names: list[str], values: tuple[Operand | Number, Operand | Number]) -> Operand:
        """Writes the steps of an operator on two operands, at least one of them a tensor. Returns the result.

        Args:
            symbol: The operator.
            names: The operands as the expression spells them.
            values: The operands.

        Example:
            >>> StepWriter.operate.__isabstractmethod__
            True
        """

    @abstractmethod
    def reciprocal_dtype(self, tensor: Operand) -> tuple[torch.dtype, str]:
        """Returns the dtype of a tensor's reciprocal, and why it differs from the tensor's.

        Args:
            tensor: The tensor.

        Example:
            >>> StepWriter.reciprocal_dtype.__isabstractmethod__
            True
        """

    def visit(self, node: Node) -> Operand | Number:
        """Evaluates a node of the expression, and writes its steps.

        Args:
            node: The node.

        Raises:
            ExpressionError: Python cannot compute the numbers in the node.

        Example:
            >>> from torch_promote.reference.derivation.derivation import why
            >>> len(why("int8[3] * (2 + 3)").steps)
            5
        """
        if isinstance(node, TensorTerm):
            return Operand(node.dtype, node.shape)
        if isinstance(node, NumberTerm):
            return node.value
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(left, Operand) or isinstance(right, Operand):
            return self._apply(node, left, right)
        return self._in_python(node, left, right)

    def _in_python(self, node: Binary, left: Number, right: Number) -> Number:
        if node.symbol == "**" and abs(right) > 1_000:
            raise ExpressionError(f"{node} is too large a number to compute.")
        try:
            value: Number = OPERATORS[node.symbol].of_numbers(left, right)
        except (ArithmeticError, TypeError) as error:
            raise ExpressionError(f"Python cannot compute {node}: {error}.") from None
        self.steps.append(f"{node} contains no tensor: Python computes {value} before PyTorch is called.")
        return value

    def _apply(self, node: Binary, left: Operand | Number, right: Operand | Number) -> Operand:
        names = [f"({name})" if isinstance(name, Binary) else str(name) for name in (node.left, node.right)]
        if node.symbol == "/" and isinstance(right, Operand) and not isinstance(left, Operand):
            reciprocal = self._reciprocal(str(node), names[1], right)
            return self.operate("*", [f"{names[1]}.reciprocal()", names[0]], (reciprocal, left))
        return self.operate(node.symbol, names, (left, right))

    def _reciprocal(self, expression: str, name: str, tensor: Operand) -> Operand:
        """PyTorch divides a number by a tensor in two ops. Source: torch/_tensor.py, __rdiv__ (v2.13)."""
        dtype, why = self.reciprocal_dtype(tensor)
        refuse("/", (tensor, tensor), (None, None), dtype)
        step = (
            f"{expression} is computed as {name}.reciprocal() times the number. The reciprocal is {dtype_name(dtype)}"
        )
        self.steps.append(f"{step}: {why}." if dtype is not tensor.dtype else f"{step}.")
        return Operand(dtype, tensor.shape)

    def compute(
        self,
        symbol: str,
        sides: tuple[Operand, ...],
        numbers: tuple[Number | None, ...],
        result: ElementwiseResult,
    ) -> None:
        """Writes the last step of an operator.

        Args:
            symbol: The operator.
            sides: Its operands, with numbers wrapped.
            numbers: The values of Python numbers, None for tensors.
            result: Its result.

        Raises:
            PromotionError: PyTorch refuses the operator on the operands.

        Example:
            >>> from torch_promote.reference.derivation.derivation import why
            >>> why("uint8[2] + 1000").steps[-1]
            '+ computes in uint8 and returns uint8. 1000 does not fit uint8 and wraps to 232.'
        """
        computed = result.computation_dtype
        assert computed is not None, sides
        refuse(symbol, sides, numbers, computed)
        step = f"{symbol} computes in {dtype_name(computed)} and returns {dtype_name(result.dtype)}."
        for number in numbers:
            if number is not None and wrapped_value(number, computed) != number:
                step += f" {number} does not fit {dtype_name(computed)} and wraps to {wrapped_value(number, computed)}."
        self.steps.append(step)
