"""Expressions such as "int32[3] + 5.5" and "cat(int8[2], f2[2])": their parser, which uses Python's."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from torch_promote.errors import TorchPromoteError, did_you_mean
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
)
from torch_promote.reference.derivation.operators import OPERATORS
from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name, named_dtype

__all__ = ["ExpressionError", "parse"]

_SYMBOLS: dict[type[ast.AST], str] = {operator.node: symbol for symbol, operator in OPERATORS.items()}
_SYMBOLS[ast.MatMult] = "@"
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "-", ast.UAdd: "+", ast.Invert: "~"}

_NUMBERS = {"inf": math.inf, "nan": math.nan}

_HELP = (
    "Operands are dtype[sizes] such as int32[2, 3] or f2[3], dtype[] for 0-dim, Python numbers, and calls such as "
    "cat(int8[2], float16[2]). Operators are + - * / // % ** @ & | ^ ~ < <= > >= == and !=."
)


class ExpressionError(TorchPromoteError, ValueError):
    """An invalid expression.

    Example:
        >>> parse("int32 + 1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_promote.reference.derivation.expression.ExpressionError: int32 in 'int32 + 1' has no sizes. ...
    """


def parse(expression: str) -> Node:
    """Parses an expression.

    Args:
        expression: Operands joined by the operators + - * / // % ** @ & | ^ ~ < <= > >= == !=, with parentheses. A
            tensor is its dtype and its sizes: `int32[2, 3]`, `int32[]`. `named_dtype` has the names of dtypes. `inf`
            and `nan` are numbers. Calls
            are those of functions of PyTorch, or of methods: `cat([int8[2], f2[2]])`, `f2[2].sum(dtype=f4)`.

    Returns:
        The expression as a tree, with Python's precedence.

    Raises:
        ExpressionError: The expression is invalid. The message says where, and what is legal.

    Example:
        >>> str(parse("int8[3]+int64[ ]*2.5"))
        'int8[3] + (int64[] * 2.5)'
    """
    # Python does not allow an empty subscript, but does allow an empty tuple as one.
    readable = re.sub(r"(?<=\w)\[\s*\]", "[()]", expression.strip())
    try:
        tree = ast.parse(readable, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ExpressionError(
            f"{expression!r} is not a valid expression: {getattr(error, 'msg', error)}. {_HELP}"
        ) from None
    return _Parser(expression).node(tree.body)


@dataclass(frozen=True, slots=True)
class _Parser:
    expression: str

    def node(self, tree: ast.expr) -> Node:
        match tree:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _SYMBOLS:
                return Binary(_SYMBOLS[type(op)], self.node(left), self.node(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _SYMBOLS:
                return Binary(_SYMBOLS[type(op)], self.node(left), self.node(right))
            case ast.Compare(ops=[_, _, *_]):
                raise ExpressionError(
                    f"{self.expression!r} chains comparisons, which tensors do not support. Use parentheses and &."
                )
            case ast.Constant(value=bool() | int() | float() | complex() as value):
                return NumberTerm(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() | complex() as value)):
                return NumberTerm(-value)
            case ast.Name(id="inf" | "nan" as name):
                return NumberTerm(_NUMBERS[name])
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf" | "nan" as name)):
                return NumberTerm(-_NUMBERS[name])
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return Unary(_UNARY[type(op)], self.node(operand))
            case ast.Call(func=function, args=args, keywords=keywords):
                return self._call(function, args, keywords)
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=int() as index)):
                return Item(self.node(call), index)
            case ast.Subscript(value=named, slice=sizes):
                return TensorTerm(self._dtype(named), self._shape(sizes))
            case ast.Name() | ast.Attribute():
                dtype = dtype_name(self._dtype(tree))
                raise ExpressionError(
                    f"{dtype} in {self.expression!r} has no sizes. Write {dtype}[3], or {dtype}[] for a 0-dim tensor."
                )
        raise ExpressionError(
            f"{ast.unparse(tree)!r} in {self.expression!r} is neither an operand nor a supported operator. {_HELP}"
        )

    def _call(self, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> FunctionCall:
        receiver, name = None, _dotted(function)
        if name is None and isinstance(function, ast.Attribute):
            receiver, name = self.node(function.value), function.attr
        if name is None:
            raise ExpressionError(f"{ast.unparse(function)!r} in {self.expression!r} is not the name of a function.")
        named = []
        for keyword in keywords:
            if keyword.arg is None:
                raise ExpressionError(f"'**' in {self.expression!r}: write the arguments of {name} one by one.")
            named.append((keyword.arg, self._argument(keyword.value)))
        return FunctionCall(name, receiver, tuple(map(self._argument, args)), tuple(named))

    def _argument(self, tree: ast.expr) -> Node:
        match tree:
            case ast.List(elts=items) | ast.Tuple(elts=items):
                kind: Any = list if isinstance(tree, ast.List) else tuple
                return Items(tuple(map(self._argument, items)), kind)
            case ast.Constant(value=None | str() as value):
                return Constant(value)
            case ast.Name() | ast.Attribute() if ast.unparse(tree) not in _NUMBERS:
                return Constant(self._dtype(tree))
        return self.node(tree)

    def _dtype(self, named: ast.expr) -> torch.dtype:
        name = ast.unparse(named).removeprefix("torch.")
        dtype = named_dtype(name)
        if dtype is not None:
            return dtype
        known = did_you_mean(name, map(dtype_name, ALL_DTYPES))
        raise ExpressionError(f"{name!r} in {self.expression!r} is not a dtype of this PyTorch.{known}")

    def _shape(self, sizes: ast.expr) -> tuple[int, ...]:
        shape: list[int] = []
        for size in sizes.elts if isinstance(sizes, ast.Tuple) else [sizes]:
            if not (isinstance(size, ast.Constant) and type(size.value) is int):
                raise ExpressionError(
                    f"{ast.unparse(size)!r} in {self.expression!r} is not a size. Sizes are integers, 0 or more."
                )
            shape.append(size.value)
        return tuple(shape)


def _dotted(tree: ast.expr) -> str | None:
    """The dotted name of a function, or None for a method of an operand."""
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Attribute):
        before = _dotted(tree.value)
        return None if before is None else f"{before}.{tree.attr}"
    return None
