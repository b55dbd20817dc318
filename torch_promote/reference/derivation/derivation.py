"""`why`: the dtype of an expression, explained in numbered steps.

states_in_words writes the steps for PyTorch's own rule; the result is that of `infer_elementwise`. rule_step_writer
explains the other rules.
"""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass

import torch

from torch_promote.errors import PromotionRuleError
from torch_promote.reference.derivation.expression import ExpressionError, parse
from torch_promote.reference.derivation.nodes import Items, NumberTerm, TensorTerm
from torch_promote.reference.derivation.operators import OPERATORS
from torch_promote.reference.derivation.rule_step_writer import RuleStepWriter
from torch_promote.reference.derivation.states_in_words import describe, promotion_steps
from torch_promote.reference.derivation.step_writer import Runner, StepWriter
from torch_promote.reference.dtypes import dtype_name, is_integral
from torch_promote.reference.promotion import Number, Operand, PromotionError
from torch_promote.reference.promotion_rules import PromotionRule, promotion_rule
from torch_promote.reference.strides import ShapeError
from torch_promote.reference.tensor_iterator import infer_elementwise, wrap_number

__all__ = ["Derivation", "derive", "why"]

#: Columns of a derivation as a str.
_WIDTH = 100


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

    def __str__(self) -> str:
        return self.text(_WIDTH)

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
        lines = _wrapped(title, width, "  ")
        for number, step in enumerate(self.steps, start=1):
            lines += _wrapped(f"{number}. {step}", width, " " * len(f"{number}. "))
        if self.error is not None:
            lines += _wrapped(f"{'The rule' if self.by_rule else 'PyTorch'} raises: {self.error}", width, "")
        elif self.results:
            lines += _wrapped(f"Results: {'; '.join(_result(*result) for result in self.results)}", width, "  ")
        elif self.dtype is not None:
            lines += _wrapped(f"Result: {_result(self.dtype, self.shape)}", width, "  ")
        return "\n".join(lines)


def _result(dtype: torch.dtype, shape: tuple[int, ...] | None) -> str:
    return f"{dtype_name(dtype)} of shape {list(shape)}" if shape else f"{dtype_name(dtype)}, 0-dim"


def _wrapped(text: str, width: int | None, indent: str) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def why(expression: str, default_dtype: torch.dtype | None = None, rule: str | PromotionRule = "torch") -> Derivation:
    """Explains the dtype of an expression, step by step.

    Args:
        expression: The expression; `torch_promote.reference.derivation.expression.parse` describes the grammar.
        default_dtype: The dtype of Python floats. None: the current default dtype.
        rule: The promotion rule, or its name.

    Returns:
        The derivation. `str()` formats it. If PyTorch or the rule raises, it ends with the last step before that.

    Raises:
        ExpressionError: The expression is invalid, or contains no tensor.
        RuleDefinitionError: There is no such rule.

    Example:
        >>> print(why("int32[3] + 5.5", default_dtype=torch.float32))
        int32[3] + 5.5
        1. int32[3] is a tensor with dimensions: state dim, int32.
        2. 5.5 is a Python float: state wrapped. It counts as the default dtype, float32.
        3. dim int32 with wrapped float32: float32 is floating, a higher kind than integral, so the two are
           promoted. The table has float32 for them (row i4, column f4).
        4. + computes in float32 and returns float32.
        Result: float32 of shape [3]

    Source: aten/src/ATen/native/TypeProperties.cpp, result_type (v2.13); aten/src/ATen/TensorIterator.cpp,
    TensorIteratorBase::compute_types (v2.13).
    """
    return derive(expression, default_dtype or torch.get_default_dtype(), rule)


def derive(
    expression: str,
    default_dtype: torch.dtype,
    rule: str | PromotionRule = "torch",
    runner: Runner | None = None,
    autocast: str | None = None,
) -> Derivation:
    """Explains the dtype of an expression, with a runner for calls of functions. Errors are those of `why`.

    Args:
        expression: The expression.
        default_dtype: The dtype of Python floats.
        rule: The promotion rule, or its name.
        runner: Explains calls of functions. None: they are errors.
        autocast: The region that the runner explains calls in, in words, or None.

    Example:
        >>> derive("int32[3] + 5.5", torch.float64).dtype
        torch.float64
    """
    tree = parse(expression)
    chosen = promotion_rule(rule, default_dtype)
    writer: StepWriter = (
        _StateStepWriter(default_dtype, runner=runner)
        if chosen.name == "torch"
        else RuleStepWriter(default_dtype, runner=runner, rule=chosen)
    )
    derivation = functools.partial(Derivation, str(tree), rule=chosen.name, autocast=autocast)
    try:
        value = writer.visit(tree)
    except (PromotionError, ShapeError, PromotionRuleError) as error:
        by_rule = isinstance(error, PromotionRuleError)
        return derivation(tuple(writer.steps), error=str(error), by_rule=by_rule)
    results = (value,) if isinstance(value, Operand) else value if isinstance(value, tuple | list) else ()
    described = tuple((one.dtype, one.shape) for one in results if isinstance(one, Operand))
    if isinstance(tree, TensorTerm | NumberTerm | Items) or not described:
        raise ExpressionError(
            f"{expression!r} has no operator or function with a tensor operand, so nothing is promoted."
        )
    several = described if len(described) > 1 else ()
    return derivation(tuple(writer.steps), described[0][0], described[0][1], results=several)


@dataclass(slots=True)
class _StateStepWriter(StepWriter):
    """Writes the steps by PyTorch's own rule, which gives each operand a state."""

    def operate(self, symbol: str, names: list[str], values: tuple[Operand | Number, Operand | Number]) -> Operand:
        sides = [value if isinstance(value, Operand) else wrap_number(value) for value in values]
        numbers = tuple(None if isinstance(value, Operand) else value for value in values)
        for name, side, number in zip(names, sides, numbers, strict=True):
            self.steps.append(describe(name, side, number, self.default_dtype))
        common = self._promote(sides)
        preset = OPERATORS[symbol].preset
        if preset == "binary_float" and is_integral(common, include_bool=True):
            self.steps.append(
                f"{symbol} does not compute in {dtype_name(common)}: integral dtypes become the default dtype, "
                f"{dtype_name(self.default_dtype)}."
            )
        result = infer_elementwise(*sides, preset=preset, default_dtype=self.default_dtype)
        self.compute(symbol, tuple(sides), numbers, result, names)
        return Operand(result.dtype, result.shape)

    def reciprocal_dtype(self, tensor: Operand) -> tuple[torch.dtype, str]:
        result = infer_elementwise(tensor, preset="unary_float", default_dtype=self.default_dtype)
        return result.dtype, f"{dtype_name(tensor.dtype)} is integral, so it becomes the default dtype"

    def _promote(self, sides: list[Operand]) -> torch.dtype:
        """Writes the step that promotes two operands, by their states."""
        joined, steps = promotion_steps(sides, self.default_dtype)
        self.steps += steps
        return joined
