"""Expressions such as "int32[3] + 5.5": their grammar and their parser, which uses Python's own."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import torch

from torch_promote.errors import TorchPromoteError, did_you_mean
from torch_promote.reference.derivation.operators import OPERATORS
from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name
from torch_promote.reference.promotion.states import Number

__all__ = ["Binary", "ExpressionError", "Node", "NumberTerm", "TensorTerm", "parse"]

_SYMBOLS: dict[type[ast.AST], str] = {operator.node: symbol for symbol, operator in OPERATORS.items()}

_HELP = "Operands are dtype[sizes] such as int32[2, 3], dtype[] for 0-dim, and Python numbers."


class ExpressionError(TorchPromoteError, ValueError):
    """An invalid expression.

    Example:
        >>> parse("int32 + 1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.reference.derivation.expression.ExpressionError: int32 in 'int32 + 1' has no sizes. ...
    """


@dataclass(frozen=True, slots=True)
class TensorTerm:
    """A tensor in an expression: `int32[2, 3]`, or `int32[]` for a 0-dim one.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes.

    Example:
        >>> parse("int32[2, 3]")
        TensorTerm(dtype=torch.int32, shape=(2, 3))
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class NumberTerm:
    """A Python number in an expression.

    Attributes:
        value: The number.

    Example:
        >>> parse("-2.5")
        NumberTerm(value=-2.5)
    """

    value: Number

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator between two expressions.

    Attributes:
        symbol: The operator, as Python writes it.
        left: The left operand.
        right: The right operand.

    Example:
        >>> print(parse("2 ** (int8[] - 1)"))
        2 ** (int8[] - 1)
    """

    symbol: str
    left: Node
    right: Node

    def __str__(self) -> str:
        # Python reads -1 ** x as -(1 ** x), so a negative number on the left is put in parentheses too.
        left = f"({self.left})" if isinstance(self.left, Binary) or str(self.left).startswith("-") else str(self.left)
        right = f"({self.right})" if isinstance(self.right, Binary) else str(self.right)
        return f"{left} {self.symbol} {right}"


Node = TensorTerm | NumberTerm | Binary


def parse(expression: str) -> Node:
    """Parses an expression.

    Args:
        expression: Operands joined by the operators + - * / // % ** & | ^ < <= > >= == !=, with parentheses. A tensor
            is its dtype and its sizes: `int32[2, 3]`, `int32[]`.

    Returns:
        The expression as a tree, with Python's precedence.

    Raises:
        ExpressionError: The expression is invalid. The message says where, and what is legal.

    Example:
        >>> str(parse("int8[3]+int64[ ]*2.5"))
        'int8[3] + (int64[] * 2.5)'
    """
    # Python does not allow an empty subscript, but does allow an empty tuple as one.
    readable = re.sub(r"\[\s*\]", "[()]", expression.strip())
    try:
        tree = ast.parse(readable, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ExpressionError(
            f"{expression!r} is not a valid expression: {getattr(error, 'msg', error)}. {_HELP}"
        ) from None
    return _node(tree.body, expression)


def _node(tree: ast.expr, expression: str) -> Node:
    match tree:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SYMBOLS:
            return Binary(_SYMBOLS[type(op)], _node(left, expression), _node(right, expression))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _SYMBOLS:
            return Binary(_SYMBOLS[type(op)], _node(left, expression), _node(right, expression))
        case ast.Compare():
            raise ExpressionError(
                f"{expression!r} chains comparisons, which tensors do not support. Use parentheses and &."
            )
        case ast.Constant(value=bool() | int() | float() | complex() as value):
            return NumberTerm(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() | complex() as value)):
            return NumberTerm(-value)
        case ast.Subscript(value=named, slice=sizes):
            return TensorTerm(_dtype(named, expression), _shape(sizes, expression))
        case ast.Name() | ast.Attribute():
            name = dtype_name(_dtype(tree, expression))
            raise ExpressionError(
                f"{name} in {expression!r} has no sizes. Write {name}[3], or {name}[] for a 0-dim tensor."
            )
    raise ExpressionError(
        f"{ast.unparse(tree)!r} in {expression!r} is neither an operand nor a supported operator. {_HELP}"
    )


def _dtype(named: ast.expr, expression: str) -> torch.dtype:
    name = ast.unparse(named).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ExpressionError(
        f"{name!r} in {expression!r} is not a dtype of this PyTorch.{did_you_mean(name, map(dtype_name, ALL_DTYPES))}"
    )


def _shape(sizes: ast.expr, expression: str) -> tuple[int, ...]:
    shape: list[int] = []
    for size in sizes.elts if isinstance(sizes, ast.Tuple) else [sizes]:
        if not (isinstance(size, ast.Constant) and type(size.value) is int):
            raise ExpressionError(
                f"{ast.unparse(size)!r} in {expression!r} is not a size. Sizes are integers, 0 or more."
            )
        shape.append(size.value)
    return tuple(shape)
