"""Expressions such as "int32[3] + 5.5" and "cat(int8[2], f2[2])": their parser, and the functions that they may call.

Python's own parser reads the expression, in which a tensor looks like a subscript: `int32[2, 3]`.
"""

from __future__ import annotations

import ast
import difflib
import functools
import math
import operator
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_promote.errors import ExpressionError, did_you_mean
from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name, named_dtype
from torch_promote.reference.promotion import Operand

#: The operators between two operands: Python's syntax node to the symbol and the function that Python calls.
_BINARY: dict[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
    ast.MatMult: ("@", operator.matmul),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
    ast.BitXor: ("^", operator.xor),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
_UNARY: dict[type[ast.unaryop], tuple[str, Callable[[Any], Any]]] = {
    ast.USub: ("-", operator.neg),
    ast.UAdd: ("+", operator.pos),
    ast.Invert: ("~", operator.invert),
}
_NUMBERS = {"inf": math.inf, "nan": math.nan}

_HELP = (
    "Operands are dtype[sizes] such as int32[2, 3] or f2[3], dtype[] for 0-dim, Python numbers, and calls such as "
    "cat(int8[2], float16[2]). Operators are + - * / // % ** @ & | ^ ~ < <= > >= == and !=."
)


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an expression: an operand or another argument, which has a value; or a call of a function."""

    text: str  # with the full names of dtypes
    value: Any = None  # an `Operand` for a tensor, or a number, string, dtype or None
    # A function, the name of one, or the name of a method after a dot. None: nothing is called.
    function: str | Callable[..., Any] | None = None
    args: tuple[Node, ...] = ()  # those of a method start with the tensor
    kwargs: tuple[tuple[str, Node], ...] = ()
    symbol: str = ""  # an operator as Python writes it; "" for others


def parse(expression: str) -> Node:
    """Parses an expression into a tree, with Python's precedence. Raises ExpressionError if it is invalid."""
    # A tensor is its dtype and sizes (`int32[2, 3]`, `int32[]`); `inf` and `nan` are numbers; calls are those of
    # functions of PyTorch, or of methods: `cat([int8[2], f2[2]])`, `f2[2].sum(dtype=f4)`.
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
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
                type(op) in _BINARY
            ):
                symbol, function = _BINARY[type(op)]
                return _made(tree, function=function, args=(self.node(left), self.node(right)), symbol=symbol)
            case ast.Compare(ops=[_, _, *_]):
                raise ExpressionError(
                    f"{self.expression!r} chains comparisons, which tensors do not support. Use parentheses and &."
                )
            case ast.Constant(value=bool() | int() | float() | complex() as value):
                return _made(tree, value=value)
            case ast.Name(id="inf" | "nan" as name):
                return _made(tree, value=_NUMBERS[name])
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name(id="inf" | "nan") as number):
                return _made(tree, value=-self.node(number).value)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                symbol, unary = _UNARY[type(op)]
                return _made(tree, function=unary, args=(self.node(operand),), symbol=symbol)
            case ast.Call(func=function, args=args, keywords=keywords):
                return self._call(tree, function, args, keywords)
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=int() as index)):
                return _made(tree, function=operator.getitem, args=(self.node(call), Node(str(index), index)))
            case ast.Subscript(value=named, slice=sizes):
                return _made(tree, value=Operand(self._dtype(named), self._shape(sizes)))
            case ast.Name() | ast.Attribute():
                dtype = dtype_name(self._dtype(tree))
                raise ExpressionError(
                    f"{dtype} in {self.expression!r} has no sizes. Write {dtype}[3], or {dtype}[] for a 0-dim tensor."
                )
        raise ExpressionError(
            f"{_text(tree)!r} in {self.expression!r} is neither an operand nor a supported operator. {_HELP}"
        )

    def _call(self, tree: ast.expr, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Node:
        name = _text(function)
        receiver: tuple[Node, ...] = ()
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            if not isinstance(function, ast.Attribute):
                raise ExpressionError(f"{name!r} in {self.expression!r} is not the name of a function.")
            name, receiver = f".{function.attr}", (self.node(function.value),)
        named = []
        for keyword in keywords:
            if keyword.arg is None:
                raise ExpressionError(f"'**' in {self.expression!r}: write the arguments of {name} one by one.")
            named.append((keyword.arg, self._argument(keyword.value)))
        return _made(tree, function=name, args=(*receiver, *map(self._argument, args)), kwargs=tuple(named))

    def _argument(self, tree: ast.expr) -> Node:
        match tree:
            case ast.List(elts=elements):
                return _made(tree, function=lambda *items: list(items), args=tuple(map(self._argument, elements)))
            case ast.Tuple(elts=elements):
                return _made(tree, function=lambda *items: items, args=tuple(map(self._argument, elements)))
            case ast.Constant(value=None | str() as value):
                return _made(tree, value=value)
            case ast.Name() | ast.Attribute() if _text(tree) not in _NUMBERS:
                return _made(tree, value=self._dtype(tree))
        return self.node(tree)

    def _dtype(self, named: ast.expr) -> torch.dtype:
        """The dtype that a name stands for. The name becomes PyTorch's, for the text of the nodes around it."""
        name = ast.unparse(named).removeprefix("torch.")
        dtype = named_dtype(name)
        if dtype is None:
            known = did_you_mean(name, map(dtype_name, ALL_DTYPES))
            raise ExpressionError(
                f"{name!r} in {self.expression!r} is not a dtype of this PyTorch.{known} Tensors are written with "
                "their dtype and sizes, such as float32[2, 3]."
            )
        setattr(named, "id" if isinstance(named, ast.Name) else "attr", dtype_name(dtype))
        return dtype

    def _shape(self, sizes: ast.expr) -> tuple[int, ...]:
        shape = []
        for size in sizes.elts if isinstance(sizes, ast.Tuple) else [sizes]:
            if not (isinstance(size, ast.Constant) and type(size.value) is int):
                raise ExpressionError(
                    f"{_text(size)!r} in {self.expression!r} is not a size. Sizes are integers, 0 or more."
                )
            shape.append(size.value)
        return tuple(shape)


def _text(tree: ast.expr) -> str:
    return ast.unparse(tree).replace("[()]", "[]")


def _made(tree: ast.expr, **attributes: Any) -> Node:
    # The attributes come first: making them replaces the names of dtypes in the tree.
    return Node(_text(tree), **attributes)


_F = torch.nn.functional
#: How a dotted name may start. A name without a dot is looked up in `_PLACES`; functions of torch.nn.functional have
#: defaults that those of torch with the same name lack.
_ROOTS: dict[str, Any] = {
    "torch": torch,
    "F": _F,
    "nn": torch.nn,
    "aten": torch.ops.aten,
    "ops": torch.ops,
    "Tensor": torch.Tensor,
    **{name: getattr(torch, name) for name in ("special", "linalg", "fft")},
}
_PLACES: tuple[Any, ...] = (_F, torch, torch.special, torch.linalg, torch.Tensor)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_FUNCTIONS = (*_BUILTIN, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
#: The modules whose functions in Python take and return tensors.
_MODULES = ("torch.functional", "torch.nn.functional", "torch._jit_internal", "torch._tensor", "torch._linalg_utils")


def find_function(name: str, args: Sequence[Any]) -> Any:
    """Returns the function that a name stands for, or raises ExpressionError."""
    # `softmax`, `F.softmax`, `torch.ops.aten.mm`, `linalg.norm`; a method starts with a dot, and the arguments tell
    # its receiver from a wrong one.
    *path, last = name.split(".")
    is_method = path == [""]
    if is_method:
        places: Sequence[Any] = (torch.Tensor,) if args and isinstance(args[0], Operand) else ()
    else:
        places = (functools.reduce(_attribute, path[1:], _ROOTS.get(path[0])),) if path else _PLACES
    for place in places:
        found = _attribute(place, last)
        if _is_allowed(found, last):
            return found
    known = sorted({known for place in places for known in dir(place) if _is_allowed(_attribute(place, known), known)})
    close = difflib.get_close_matches(last, known, n=3, cutoff=0.8)
    what = f"tensors have no method {last!r}." if is_method else f"no function of PyTorch is called {name!r}."
    hint = f" Closest: {', '.join(close)}." if close else ""
    raise ExpressionError(
        f"{what}{hint} Functions are those of torch, torch.nn.functional, "
        "torch.linalg, torch.special, torch.fft and torch.ops, and methods of tensors."
    )


def _attribute(place: Any, name: str) -> Any:
    try:
        return getattr(place, name, None)
    except RuntimeError:  # torch.classes names a class that is not registered in an error of its own
        return None


def _is_allowed(found: Any, name: str) -> bool:
    """Whether something is a function on tensors. `torch.load` and the like are not."""
    if found is None or name.startswith("_") or isinstance(found, type):
        return False
    return isinstance(found, _FUNCTIONS) or getattr(found, "__module__", None) in _MODULES
