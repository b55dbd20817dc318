"""`why`: the dtype of an expression, explained in numbered steps.

The steps for PyTorch's own rule mirror torch_promote.reference.promotion.states, whose functions compute the dtypes in
them; the result is that of `infer_elementwise`. rule_step_writer explains the other rules.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import torch

from torch_promote.errors import PromotionRuleError
from torch_promote.reference.derivation.expression import ExpressionError, NumberTerm, TensorTerm, parse
from torch_promote.reference.derivation.operators import OPERATORS
from torch_promote.reference.derivation.rule_step_writer import RuleStepWriter
from torch_promote.reference.derivation.step_writer import StepWriter
from torch_promote.reference.dtypes import Kind, dtype_name, is_complex, is_floating, is_integral, kind, typecode
from torch_promote.reference.elementwise.strides import ShapeError
from torch_promote.reference.elementwise.tensor_iterator import infer_elementwise, wrap_number
from torch_promote.reference.promotion.states import Number, Operand, combine_categories, number_dtype
from torch_promote.reference.promotion.table import PromotionError, promote_types
from torch_promote.reference.promotion_rules import PromotionRule, promotion_rule

__all__ = ["Derivation", "why"]

#: Columns of a printed derivation.
_WIDTH = 100

_KIND_WORDS = {
    Kind.BOOL: "bool",
    Kind.INTEGRAL: "integral",
    Kind.FLOATING: "floating",
    Kind.COMPLEX: "complex",
    Kind.OPAQUE: "opaque",
}


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

    def __str__(self) -> str:
        lines = [self.expression if self.rule == "torch" else f"{self.expression}, by the rule {self.rule}"]
        for number, step in enumerate(self.steps, start=1):
            lines += textwrap.wrap(f"{number}. {step}", _WIDTH, subsequent_indent=" " * len(f"{number}. "))
        if self.error is not None:
            lines += textwrap.wrap(f"{'The rule' if self.by_rule else 'PyTorch'} raises: {self.error}", _WIDTH)
        elif self.dtype is not None:
            where = f" of shape {list(self.shape)}" if self.shape else ", 0-dim"
            lines.append(f"Result: {dtype_name(self.dtype)}{where}")
        return "\n".join(lines)


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
    tree = parse(expression)
    default = default_dtype or torch.get_default_dtype()
    chosen = promotion_rule(rule, default)
    writer: StepWriter = _StateStepWriter(default) if chosen.name == "torch" else RuleStepWriter(default, rule=chosen)
    try:
        value = writer.visit(tree)
    except (PromotionError, ShapeError, PromotionRuleError) as error:
        by_rule = isinstance(error, PromotionRuleError)
        return Derivation(str(tree), tuple(writer.steps), error=str(error), rule=chosen.name, by_rule=by_rule)
    if isinstance(tree, TensorTerm | NumberTerm) or not isinstance(value, Operand):
        raise ExpressionError(f"{expression!r} has no operator with a tensor operand, so nothing is promoted.")
    return Derivation(str(tree), tuple(writer.steps), value.dtype, value.shape, rule=chosen.name)


@dataclass(slots=True)
class _StateStepWriter(StepWriter):
    """Writes the steps by PyTorch's own rule, which gives each operand a state."""

    def operate(self, symbol: str, names: list[str], values: tuple[Operand | Number, Operand | Number]) -> Operand:
        sides = [value if isinstance(value, Operand) else wrap_number(value) for value in values]
        numbers = tuple(None if isinstance(value, Operand) else value for value in values)
        for name, side, number in zip(names, sides, numbers, strict=True):
            self.steps.append(self._describe(name, side, number))
        common = self._promote(sides)
        preset = OPERATORS[symbol].preset
        if preset == "binary_float" and is_integral(common, include_bool=True):
            self.steps.append(
                f"{symbol} does not compute in {dtype_name(common)}: integral dtypes become the default dtype, "
                f"{dtype_name(self.default_dtype)}."
            )
        result = infer_elementwise(*sides, preset=preset, default_dtype=self.default_dtype)
        self.compute(symbol, tuple(sides), numbers, result)
        return Operand(result.dtype, result.shape)

    def reciprocal_dtype(self, tensor: Operand) -> tuple[torch.dtype, str]:
        result = infer_elementwise(tensor, preset="unary_float", default_dtype=self.default_dtype)
        return result.dtype, f"{dtype_name(tensor.dtype)} is integral, so it becomes the default dtype"

    def _describe(self, name: str, side: Operand, number: Number | None) -> str:
        if number is None:
            if side.shape:
                return f"{name} is a tensor with dimensions: state dim, {dtype_name(side.dtype)}."
            return f"{name} is a 0-dim tensor: state zero, {dtype_name(side.dtype)}."
        counts_as = dtype_name(number_dtype(number, self.default_dtype))
        if isinstance(number, float):
            counts_as = f"the default dtype, {counts_as}"
        elif isinstance(number, complex):
            counts_as = f"the complex dtype of the default dtype, {counts_as}"
        return f"{number} is a Python {type(number).__name__}: state wrapped. It counts as {counts_as}."

    def _promote(self, sides: list[Operand]) -> torch.dtype:
        """Writes the step that promotes two operands, by their states."""
        names = [_state(side) for side in sides]
        dtypes = [self._dtype(side) for side in sides]
        if names[0] == names[1]:
            if dtypes[0] is dtypes[1]:
                self.steps.append(f"Both are {dtype_name(dtypes[0])} in state {names[0]}: nothing is promoted.")
                return dtypes[0]
            common = promote_types(*dtypes)
            self.steps.append(
                f"Both are in state {names[0]}, so the two are promoted. {_looked_up(dtypes[0], dtypes[1], common)}"
            )
            return common
        # The stronger state comes first: dim, zero, wrapped.
        order = sorted(range(2), key=lambda i: ("dim", "zero", "wrapped").index(names[i]))
        (stronger, weaker), (higher, lower) = ([names[i] for i in order], [dtypes[i] for i in order])
        words, joined = _combine(higher, lower)
        self.steps.append(f"{stronger} {dtype_name(higher)} with {weaker} {dtype_name(lower)}: {words}")
        return joined

    def _dtype(self, side: Operand) -> torch.dtype:
        if not side.wrapped:
            return side.dtype
        if is_complex(side.dtype):
            return number_dtype(1j, self.default_dtype)
        return self.default_dtype if is_floating(side.dtype) else side.dtype


def _state(side: Operand) -> str:
    return "dim" if side.shape else "wrapped" if side.wrapped else "zero"


def _looked_up(a: torch.dtype, b: torch.dtype, common: torch.dtype) -> str:
    row, column = typecode(a), typecode(b)
    if row is None or column is None:
        return f"They give {dtype_name(common)}: an unsigned integer takes the floating dtype."
    return f"The table has {dtype_name(common)} for them (row {row}, column {column})."


def _combine(higher: torch.dtype, lower: torch.dtype) -> tuple[str, torch.dtype]:
    """The text for a call of `combine_categories`, and its result. Both functions have the same branches."""
    joined = combine_categories(higher, lower)
    if joined is None:
        raise PromotionError(
            f"{dtype_name(higher)} and {dtype_name(lower)} have no common dtype: bits promote only with themselves."
        )
    strong, weak = dtype_name(higher), dtype_name(lower)
    kinds = f"{weak} is {_KIND_WORDS[kind(lower)]}, a higher kind than {_KIND_WORDS[kind(higher)]}"
    if not is_complex(higher) and is_complex(lower):
        if is_floating(higher):
            return f"{kinds}, but {strong} decides the precision: {dtype_name(joined)}.", joined
        return f"{kinds}, so it decides.", joined
    if not is_complex(higher) and not is_floating(higher) and (higher is torch.bool or is_floating(lower)):
        if higher is lower:
            return "they are the same.", joined
        return f"{kinds}, so the two are promoted. {_looked_up(higher, lower, joined)}", joined
    if higher is lower:
        return "they are the same.", joined
    return f"{weak} is not of a higher kind than {strong}, so {strong} stays: a weaker state does not widen.", joined
