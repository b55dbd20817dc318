"""The base class that evaluates an expression and writes the steps; a subclass knows the promotion rule."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torch_promote.reference.derivation.expression import ExpressionError
from torch_promote.reference.derivation.nodes import (
    Binary,
    Constant,
    FunctionCall,
    Item,
    Items,
    Node,
    NumberTerm,
    TensorTerm,
    Unary,
    in_parentheses,
)
from torch_promote.reference.derivation.operators import OPERATORS, refuse
from torch_promote.reference.derivation.overflow import overflow_of_number, overflow_of_tensor
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.promotion import Number, Operand
from torch_promote.reference.tensor_iterator import ElementwiseResult

__all__ = ["Runner", "StepWriter"]

_UNARY: dict[str, Callable[[Any], Any]] = {"-": operator.neg, "+": operator.pos, "~": operator.invert}


class Runner(Protocol):
    """Explains calls of functions, which the reference alone cannot: their overloads and shapes are PyTorch's.

    Example:
        >>> from torch_promote.checking.why import why
        >>> why("abs(complex64[2])").dtype
        torch.float32
    """

    @property
    def takes_operators(self) -> bool:
        """Whether it explains the operators of Python, too, as it does under autocast.

        Example:
            >>> from torch_promote.checking.why import why
            >>> why("2 ** float16[3]", autocast="cuda").dtype
            torch.float32
        """

    def run(
        self,
        function: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: Mapping[int, str],
        steps: list[str],
    ) -> Any:
        """Explains a call, and returns its results.

        Args:
            function: A function, or its name as the expression spells it. A name that starts with a dot is a method.
            args: Its positional arguments, with an `Operand` for each tensor.
            kwargs: Its keyword arguments.
            names: The operands as the expression spells them, by `id`.
            steps: The steps so far, to which it adds.

        Raises:
            PromotionError: PyTorch refuses the call.
            ExpressionError: There is no such function, or it does not take the arguments.

        Example:
            >>> from torch_promote.checking.why import why
            >>> why("sort(float16[3])").results
            ((torch.float16, (3,)), (torch.int64, (3,)))
        """


@dataclass(slots=True)
class StepWriter(ABC):
    """Evaluates one expression, and writes a step for each thing that happens.

    Attributes:
        default_dtype: The dtype of Python floats.
        steps: The steps so far.
        runner: Explains calls of functions. None: they are refused.

    Example:
        >>> StepWriter(torch.float32)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        TypeError: Can't instantiate abstract class StepWriter ...
    """

    default_dtype: torch.dtype
    steps: list[str] = field(default_factory=list)
    runner: Runner | None = None
    _named: dict[int, tuple[Any, str]] = field(default_factory=dict)

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

    def visit(self, node: Node) -> Any:
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
        value = self._value(node)
        if isinstance(value, Operand):
            self._named[id(value)] = (value, in_parentheses(node))
        return value

    def _value(self, node: Node) -> Any:
        match node:
            case TensorTerm():
                return Operand(node.dtype, node.shape)
            case NumberTerm() | Constant():
                return node.value
            case Items():
                return node.kind(map(self.visit, node.items))
            case Item():
                return self._item(node)
            case FunctionCall():
                receiver = [] if node.receiver is None else [self.visit(node.receiver)]
                args = [*receiver, *map(self.visit, node.args)]
                name = f".{node.name}" if receiver else node.name
                return self._run(node, name, args, {name: self.visit(value) for name, value in node.kwargs})
            case Unary():
                return self._of_operator(node, _UNARY[node.symbol], [self.visit(node.operand)])
            case Binary():
                values = [self.visit(node.left), self.visit(node.right)]
                if node.symbol == "@":
                    return self._of_operator(node, operator.matmul, values)
                return self._of_operator(node, OPERATORS[node.symbol].of_numbers, values)

    def _of_operator(self, node: Unary | Binary, function: Callable[..., Any], values: list[Any]) -> Any:
        for value in values:
            if not isinstance(value, Operand | bool | int | float | complex):
                raise ExpressionError(f"{node.symbol} takes a tensor or a number, and {value!r} in {node} is neither.")
        if not any(isinstance(value, Operand) for value in values):
            return self._in_python(node, function, values)
        by_states = self.runner is None or not self.runner.takes_operators
        if by_states and isinstance(node, Binary) and node.symbol in OPERATORS:
            return self._apply(node, *values)
        return self._run(node, function, values, {})

    def _run(self, node: Node, function: str | Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.runner is None:
            raise ExpressionError(
                f"{node} is not an operator that promotes its operands, and the reference alone explains no other. "
                "torch_promote.why and `torch-promote why` explain calls of functions."
            )
        names = {number: name for number, (_, name) in self._named.items()}
        return self.runner.run(function, args, kwargs, names, self.steps)

    def _item(self, node: Item) -> Any:
        values = self.visit(node.of)
        if not isinstance(values, tuple | list) or isinstance(values, Operand) or node.index >= len(values):
            raise ExpressionError(f"{node.of} has no result number {node.index}.")
        return values[node.index]

    def _in_python(self, node: Unary | Binary, function: Callable[..., Any], values: list[Any]) -> Number:
        if node.symbol == "**" and abs(values[1]) > 1_000:
            raise ExpressionError(f"{node} is too large a number to compute.")
        try:
            value: Number = function(*values)
        except (ArithmeticError, TypeError) as error:
            raise ExpressionError(f"Python cannot compute {node}: {error}.") from None
        self.steps.append(f"{node} contains no tensor: Python computes {value} before PyTorch is called.")
        return value

    def _apply(self, node: Binary, left: Operand | Number, right: Operand | Number) -> Operand:
        names = [in_parentheses(node.left), in_parentheses(node.right)]
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
        names: Sequence[str],
    ) -> None:
        """Writes the last step of an operator.

        Args:
            symbol: The operator.
            sides: Its operands, with numbers wrapped.
            numbers: The values of Python numbers, None for tensors.
            result: Its result.
            names: The operands as the expression spells them.

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
        dims = any(side.shape for side in sides)
        op, compares = OPERATORS[symbol].op, result.dtype is torch.bool
        for side, number, name in zip(sides, numbers, names, strict=True):
            if number is not None:
                step += overflow_of_number(number, computed, op, compares)
            elif dims and not side.shape:
                step += overflow_of_tensor(name, side.dtype, computed, op, compares)
        self.steps.append(step)
